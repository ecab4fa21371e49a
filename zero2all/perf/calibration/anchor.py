"""A real training step beside the sum of its figures.

Figures are measured one at a time behind a heater. A step draws another power and so runs at another clock: all its
kernels at the same one, because the GPU follows its power over many kernels. The last figure of a config is therefore a
few real steps of a cut of its model, long enough for the clock to settle. What arithmetic limits (products and
attention) takes as much longer or shorter there as the clock says; what memory limits does not follow the clock:

    measured step = rest + arithmetic x clock factor

From the factors of a few different steps follows how much power products and attention draw, and from that the clock of
any other step (`Machine.clock_factor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from zero2all.common.errors import BadInputError
from zero2all.limits.floors import optimizer_work
from zero2all.limits.machine import Machine
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.perf.batch import BatchShape
from zero2all.perf.calibration.figures import Figure, Setting
from zero2all.perf.calibration.stopwatch import Stopwatch
from zero2all.perf.kernel_groups import ATTENTION, GEMM
from zero2all.perf.measure import measure
from zero2all.perf.predict import predict
from zero2all.perf.short_run import measure_steps, shaped

LAYERS, PASSES = 8, 8  # of the cut model: enough passes that the wait at the end of a step does not count
SECONDS, WARM_UP_SECONDS = 2.5, 3.0
FEW_TOKENS, HOST_SECONDS = 128, 1.0
BELIEVABLE = (0.85, 1.3)
"""A factor outside is no clock: a figure is wrong, or the host was too slow."""


def anchor_figure(setting: Setting, machine: Callable[[], Machine]) -> Figure:
    """Real steps of a config with fewer blocks; `machine` has the profile of all figures that it is the sum of."""
    layers = min(LAYERS, setting.model.layers)
    model = dataclasses.replace(setting.model, layers=layers)
    data = dataclasses.replace(setting.config.data, seq_len=setting.batch.seq_len)
    config = dataclasses.replace(setting.config, model=model, data=data)
    batch = dataclasses.replace(setting.batch, accumulation=PASSES)

    def run(watch: Stopwatch) -> dict[str, Any]:
        expected = predict(config, batch, machine(), setting.ops, config.parallel.asked_sizes(1))
        if watch.device.type == "cuda":
            torch.cuda.empty_cache()
        found = measure(config, batch, watch.device, SECONDS, WARM_UP_SECONDS)
        value = {
            "seconds": found["seconds_per_iteration"],
            "predicted": expected.step.estimate,
            "matmul": expected.components[GEMM],
            "attention": expected.components[ATTENTION],
            "watts": found["gpu"].get("watts"),
            "sm_mhz": found["gpu"].get("sm_mhz"),
            "celsius": found["gpu"].get("celsius"),
        }
        factor = clock_factor(value)
        if not BELIEVABLE[0] <= factor <= BELIEVABLE[1]:
            raise BadInputError(
                f"a real step took {value['seconds']:.4f} s and its figures add up to {value['predicted']:.4f} s: more "
                f"than a clock explains. Another process may use the GPU; calibrate again with --again."
            )
        return value

    return Figure(f"anchor/{model.hidden_size}-{model.intermediate_size}-{model.moe.experts}/{batch}", run)


def clock_factor(value: Mapping[str, float]) -> float:
    """What arithmetic takes in a real step / in its figures."""
    arithmetic = value["matmul"] + value["attention"]
    return (value["seconds"] - (value["predicted"] - arithmetic)) / arithmetic


def host_figure(setting: Setting) -> Figure:
    """What the host takes to queue forward and backward of a block: steps with so few tokens that the device waits."""
    layers = min(LAYERS, setting.model.layers)
    model = dataclasses.replace(setting.model, layers=layers)
    train = dataclasses.replace(setting.config.train, cuda_graph="off")
    config = dataclasses.replace(setting.config, model=model, train=train)

    def run(watch: Stopwatch) -> dict[str, Any]:
        found = measure(config, BatchShape(1, FEW_TOKENS, PASSES), watch.device, HOST_SECONDS, HOST_SECONDS)
        return {"block_seconds": found["seconds_per_iteration"] / (PASSES * layers)}

    return Figure("host", run)


def offload_figures(setting: Setting) -> Iterator[Figure]:
    """The update on the host with its copies, as `parallel.offload: optimizer` makes it: steps with few tokens, which
    wait for nothing else, of a small and of the whole model. AdamW alone would have the host's memory to itself."""
    for layers in dict.fromkeys((min(4, setting.model.layers), setting.model.layers)):
        model = dataclasses.replace(setting.model, layers=layers)
        yield Figure(f"operator/host_adamw/-/{model.hidden_size}-{layers}", partial(_offloaded, setting, model))


def _offloaded(setting: Setting, model: ModelConfig, watch: Stopwatch) -> dict[str, Any]:
    del watch
    parallel = dataclasses.replace(setting.config.parallel, offload="optimizer")
    batch = BatchShape(1, FEW_TOKENS, 1)
    config = shaped(dataclasses.replace(setting.config, model=model, parallel=parallel), batch)
    found = measure_steps(config, batch, HOST_SECONDS, anatomy=False)
    moved = optimizer_work(parameter_counts(model)["total"]).forward_bytes
    return {"bytes": moved, "forward": found["step_seconds"], "spread": found["noise"]}


def power_draws(anchors: Sequence[Mapping[str, float]], heater_share: float, factor: float) -> dict[str, float]:
    """Power of products and of attention, in that of the limit, at the clock `factor` of a profile: by least squares
    from the heater, whose share of products is known, and from real steps (`Machine.clock_factor`)."""
    rows, cubes = [(heater_share, 0.0)], [(1 / factor) ** 3]
    for one in anchors:
        matmul, attention = one["matmul"] * factor, one["attention"] * factor
        whole = one["predicted"] - one["matmul"] - one["attention"] + matmul + attention
        rows.append((matmul / whole, attention / whole))
        cubes.append((clock_factor(one) / factor) ** 3)
    found = np.linalg.lstsq(np.array(rows), np.array(cubes), rcond=None)[0]
    return {"matmul": float(max(found[0], 0.0)), "attention": float(max(found[1], 0.0))}
