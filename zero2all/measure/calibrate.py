"""`z2a perf calibrate`: measure what this machine can do, and keep it as a profile (`zero2all.estimate.machine`).

Figures are measured in the order of their importance: the machine, the products and operators of the configs and a few
real steps of each (`anchor_figure`), a coarse grid of products and attention for other models, other
implementations. Each is on disk before the next begins, so that a calibration that ends early is continued by the same
command, and one for a further config adds to the profile. No figure is begun when the time is up.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch

from zero2all.common.errors import BadInputError, is_out_of_memory
from zero2all.common.jsonio import append_line, whole_lines
from zero2all.common.progress import human_seconds, say
from zero2all.config.training import OptimConfig, RunConfig
from zero2all.estimate.floors import optimizer_work
from zero2all.estimate.flops import peak_flops
from zero2all.estimate.kernel_groups import ATTENTION, GEMM
from zero2all.estimate.machine import AttentionTime, Kind, Machine, Matmul, TimeCurve, write_machine
from zero2all.estimate.step import HOST_OPS_PER_BLOCK
from zero2all.measure.clock import HEATER_BYTES, HEATER_SIDE, Stopwatch, device_name, watched_gpu
from zero2all.measure.figures import (
    ATTENTION_GRID,
    FigureToMeasure,
    Setting,
    attention_figure,
    machine_figures,
    model_products,
    operator_figures,
    product_grid,
    settled,
    update_figures,
)
from zero2all.measure.machine_profiles import profile_key, profile_path
from zero2all.measure.operators import context_here
from zero2all.measure.short_run import measure_steps
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.ops.registry import OPERATORS, resolve
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.predict.batch import BatchShape
from zero2all.predict.step_prediction import predict

Figures = dict[str, dict[str, Any]]
WARM_UP_SHARE = 0.15  # of the time, at most, until the clock has settled
LARGER = (1.5, 2.0, 4.0, 8.0, 16.0, 32.0)  # models that are offloaded are larger than those that fit
SAME_SIZE = 0.01  # points of a curve closer than this are one
LEAST_FREE = 0.5  # of the memory; below it the allocator gives back what it keeps
FLOAT8_OVER_BFLOAT16 = 2.0
MOST_FAILED = 0.5  # of the figures of a call; with more, there is no profile
FOR_DOCUMENTS = ("flex", "varlen")
"""Attention with documents, which no prediction is made for yet; the first takes a minute to compile."""


def default_config() -> str:
    """The preset that is calibrated where none is named: one that suits the device."""
    return "z2all-1b" if pick_device("auto").type == "cuda" else "quickstart"


@dataclass(frozen=True)
class Calibration:
    """What a calibration found."""

    machine: Machine
    path: Path
    measured: int  # figures of this call
    left: list[str]  # figures that the time did not suffice for
    failed: dict[str, str]  # figures that could not be measured, and why
    gpu: dict[str, Any]  # power and clock meanwhile
    anchors: dict[str, dict[str, Any]]  # real steps beside the sum of their figures


def calibrate(
    configs: list[tuple[RunConfig, BatchShape]], most_seconds: float, again: bool = False, path: Path | None = None
) -> Calibration:
    """Measure for at most `most_seconds`, with AdamW, whose update is predicted. Known figures stay unless `again`."""
    started = time.perf_counter()
    config = configs[0][0]
    set_cpu_threads(config.parallel.cpu_threads, None)
    device = pick_device(config.parallel.device)
    key = profile_key(device)
    path = path or profile_path(key)
    store = FigureStore(path.with_suffix(".figures.jsonl"), key, again)
    settings = [
        Setting(each, resolve(each.ops, dataclasses.replace(context_here(each), seq_len=batch.seq_len)), batch, device)
        for each, batch in [(dataclasses.replace(one, optim=OptimConfig()), batch) for one, batch in configs]
    ]
    say(f"calibrate: {key['device']}: at most {human_seconds(most_seconds)}; figures go to {store.path}")
    with watched_gpu(device) as gpu:
        left, measured = _measure_all(settings, store, device, started, most_seconds)
    failed = {name: str(found["failed"]) for name, found in store.figures.items() if "failed" in found}
    check_enough(failed, measured)
    machine = dataclasses.replace(machine_of(store.figures, key, device, settings[0].ops.taken, gpu), left=len(left))
    write_machine(path, machine)
    anchors = {name: v for name, v in store.figures.items() if name.startswith("anchor/") and "failed" not in v}
    return Calibration(machine, path, measured, left, failed, gpu, anchors)


def reasons(failed: Mapping[str, str]) -> list[str]:
    """Why figures failed, a line for each reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for name, why in failed.items():
        found.setdefault(why, []).append(name)
    by_number = sorted(found.items(), key=lambda one: -len(one[1]))
    return [f"{why} ({len(names)}, the first: {names[0]})" for why, names in by_number]


def check_enough(failed: Mapping[str, str], measured: int) -> None:
    """BadInputError where most figures failed, or one that a profile cannot be without."""
    needed = [name for name in ("stream", "launch") if name in failed]
    if not needed and len(failed) < MOST_FAILED * max(1, measured):
        return
    lines = "\n".join(f"  {line}" for line in reasons(failed))
    raise BadInputError(
        f"The calibration failed: {len(failed)} of {measured} figures could not be measured. No profile was written. "
        f"Why:\n{lines}\nRemove the cause and run it again; what was measured is kept."
    )


def _measure_all(
    settings: list[Setting], store: FigureStore, device: torch.device, started: float, most_seconds: float
) -> tuple[list[str], int]:
    """The figures that no time was left for, and how many were measured."""
    watch = Stopwatch(device)
    cold, hot = watch.warm_up(WARM_UP_SHARE * most_seconds)
    if device.type == "cuda":
        store.add("load", {"hot_over_cold": min(1.0, cold / hot)})
        store.add("overhead", _overhead(device))
    left, measured, said = [], 0, time.perf_counter()
    for figure in all_figures(settings, store):
        if figure.name in store.figures:
            continue
        if time.perf_counter() - started > most_seconds:
            left.append(figure.name)
            continue
        store.add(figure.name, _one(figure, watch))
        measured += 1
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if free < LEAST_FREE * total:
                torch.cuda.empty_cache()
        if time.perf_counter() - said > 10:
            said = time.perf_counter()
            say(f"calibrate: {measured} figures, {human_seconds(said - started)}: {figure.name}")
    return left, measured


def _one(figure: FigureToMeasure, watch: Stopwatch) -> dict[str, Any]:
    """A figure, or why there is none: one that does not run here must not cost the others."""
    try:
        return figure.measure(watch)
    except Exception as error:
        if is_out_of_memory(error) and watch.device.type == "cuda":
            torch.cuda.empty_cache()
        first = str(error).splitlines()[0] if str(error) else ""
        return {"failed": f"{type(error).__name__}: {first}"[:300]}


def all_figures(settings: list[Setting], store: FigureStore) -> Iterator[FigureToMeasure]:
    """Everything, the most important first."""
    device, first, known = settings[0].device, settings[0], store.figures
    yield from machine_figures(device, first.dtype)
    for setting in settings:
        model = setting.model
        for tokens in dict.fromkeys((setting.tokens, max(64, setting.tokens // 4))):
            yield from model_products(setting, tokens)
            yield from operator_figures(setting, tokens, known)
            length = min(tokens, setting.batch.seq_len)
            yield attention_figure(setting, tokens, length, model.heads, model.kv_heads, model.head_size)
        yield from update_figures(setting)
        if device.type == "cuda":
            yield host_figure(setting)
            if setting is first:
                yield from offload_figures(setting)
            plain = {name: value for name, value in known.items() if not name.startswith("anchor/")}
            yield anchor_figure(setting, partial(machine_of, plain, store.key, device, setting.ops.taken, {}))
    yield from product_grid(device, first.product_dtype, first.ops.taken["linear"])
    for sizes in ATTENTION_GRID if device.type == "cuda" else ():
        yield attention_figure(first, *sizes)
    for other in other_settings(first):
        yield from model_products(other, first.tokens)
        yield from operator_figures(other, first.tokens, known)
        model = first.model
        yield attention_figure(other, first.tokens, first.batch.seq_len, model.heads, model.kv_heads, model.head_size)
        yield from update_figures(other)
        if other.product_dtype == "float8":
            yield from product_grid(device, "float8", "fp8")


def other_settings(setting: Setting) -> Iterator[Setting]:
    """The same config with each implementation that runs here and is not taken; float8 first."""
    context = context_here(setting.config)
    for operator, implementations in sorted(OPERATORS.items(), key=lambda one: one[0] != "linear"):
        for implementation in implementations:
            is_taken = setting.ops.taken[operator] == implementation.name
            if is_taken or operator == "cross_entropy" or implementation.name in FOR_DOCUMENTS:
                continue
            if implementation.check(context) is not None:
                continue
            ops = dataclasses.replace(setting.config.ops, strict=False, **cast(Any, {operator: implementation.name}))
            yield dataclasses.replace(setting, ops=resolve(ops, context))


def _overhead(device: torch.device) -> dict[str, float]:
    """Bytes that the context takes, and the workspaces of libraries, which lie in torch's memory."""
    (free, total), own = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    heater = 3 * HEATER_SIDE**2 * 2 + 2 * HEATER_BYTES
    workspace = torch.cuda.memory_allocated(device) - heater
    return {"cuda_context": float(max(0, total - free - own)), "workspace": float(max(0, workspace))}


class FigureStore:
    """The figures of one profile, a JSON line each, on disk at once."""

    def __init__(self, path: Path, key: Mapping[str, str], again: bool = False) -> None:
        self.path, self.key, self.figures = path, key, cast(Figures, {})
        if again:
            path.unlink(missing_ok=True)
        for found in whole_lines(path):
            if found.get("key", key) == dict(key) and "name" in found:
                self.figures[found["name"]] = found["value"]
        self.figures = {name: value for name, value in self.figures.items() if "failed" not in value}

    def add(self, name: str, value: dict[str, Any]) -> None:
        """Keep a figure."""
        self.figures[name] = value
        append_line(self.path, {"name": name, "value": value})


def machine_of(
    figures: Figures, key: Mapping[str, str], device: torch.device, taken: Mapping[str, str], gpu: Mapping[str, Any]
) -> Machine:
    """The profile for these implementations (`Ops.taken`); of an operator that was measured only by others, theirs.
    Products and attention take what they take at the clock of a real step, where one was measured."""
    good = {name: value for name, value in figures.items() if "failed" not in value}
    rates = {name.removeprefix("peak/"): v["flops_per_second"] for name, v in good.items() if name.startswith("peak/")}
    is_gpu = device.type == "cuda"
    load, launch = good.get("load", {"hot_over_cold": 1.0}), good["launch"]
    anchors = [value for name, value in good.items() if name.startswith("anchor/")]
    factor = statistics.fmean(map(clock_factor, anchors)) if anchors else 1.0
    hot = load["hot_over_cold"] / factor
    rates = {name: rate / factor for name, rate in rates.items()}
    draw = power_draws(anchors, _heater_share(good), factor) if anchors and is_gpu else {}
    watts = statistics.fmean(one["watts"] or 0.0 for one in anchors) if anchors else gpu.get("watts")
    reached = max(rates.values())
    peak = peak_flops(device_name(device)) or reached / hot  # of an unknown device: what was measured
    share = reached / (peak * hot)
    peaks = {name: rate / (share * hot) for name, rate in rates.items()}
    peaks["grouped"] = peaks.get("bfloat16", peaks["float32"])
    if is_gpu and "bfloat16" in peaks:
        peaks["float8"] = FLOAT8_OVER_BFLOAT16 * peaks["bfloat16"]
    overhead = good.get("overhead", {})
    return Machine(
        name=key["device"],
        key=dict(key),
        source="measured",
        memory_bytes=float(torch.cuda.mem_get_info(device)[1] if is_gpu else psutil.virtual_memory().total),
        peak_flops=peaks,
        stream_bytes_per_second=good["stream"]["bytes_per_second"],
        launch_seconds=launch["launch_seconds"],
        host_op_seconds=_host_op_seconds(good),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 0,
        matmul_rate=share,
        matmuls=tuple(_matmuls(good, taken, factor)),
        attention=tuple(_attention(good, taken, factor)),
        operators=_operators(good, taken),
        copy=_copies(good),
        overhead={name: float(value) for name, value in overhead.items()},
        hot_over_cold=hot,
        watts=float(watts or 0.0),
        draw=draw,
    )


def _heater_share(figures: Figures) -> float:
    """Of the time of the stopwatch's heater, that of its products."""
    products = 2 * 2.0 * HEATER_SIDE**3 / figures["peak/bfloat16"]["flops_per_second"]
    return float(products / (products + 2 * HEATER_BYTES / figures["stream"]["bytes_per_second"]))


def _host_op_seconds(figures: Figures) -> float:
    """Host seconds of one operator: from real passes where they were measured, because a model's operators are not the
    smallest."""
    if "host" in figures:
        return float(figures["host"]["block_seconds"] / HOST_OPS_PER_BLOCK)
    return float(figures["launch"]["host_op_seconds"])


def _matmuls(figures: Figures, taken: Mapping[str, str], factor: float) -> Iterator[Matmul]:
    chosen = _chosen(figures, "matmul", taken["linear"])
    for name, value in chosen.items():
        _, kind, dtype, _, sizes = name.split("/")
        m, n, k = map(int, sizes.split("x"))
        yield Matmul(m, n, k, cast(Kind, kind), dtype, factor * settled(value), value["spread"])


def _chosen(figures: Figures, group: str, by: str) -> Figures:
    """The figures of a group by this implementation, and those that no implementation matters for; without any by it,
    those by others."""
    place = {"matmul": 3, "operator": 2, "attention": 1}[group.split("/")[0]]
    ours = {name: value for name, value in figures.items() if name.startswith(f"{group}/")}
    alike = {name: value for name, value in ours.items() if name.split("/")[place] in (by, "-")}
    has_own = any(name.split("/")[place] == by for name in alike)
    return alike if has_own or all(name.split("/")[place] == "-" for name in ours) else ours


def _attention(figures: Figures, taken: Mapping[str, str], factor: float) -> Iterator[AttentionTime]:
    for value in _chosen(figures, "attention", taken["attention"]).values():
        at_clock = {name: factor * value[name] for name in ("forward", "backward")}
        yield AttentionTime(**{**value, **at_clock})


def _operators(figures: Figures, taken: Mapping[str, str]) -> dict[str, TimeCurve]:
    names = dict.fromkeys(name.split("/")[1] for name in figures if name.startswith("operator/"))
    by = {**taken, "adamw": taken["optimizer"], "swiglu": f"{taken['swiglu']}+{taken['linear']}"}
    curves = {}
    for name in names:
        found = _chosen(figures, f"operator/{name}", by.get(name, "-")).values()
        curves[name] = curve((value["bytes"], value["forward"]) for value in found)
        if name == "host_adamw":
            curves[name] = _with_larger(curves[name])
        if any("backward" in value for value in found):
            backward = ((value["backward_bytes"], value["backward"]) for value in found)
            curves[f"{name}/backward"] = curve(backward)
    return curves


def _with_larger(found: TimeCurve) -> TimeCurve:
    """The curve with points above the last one: its fixed part does not grow, only the rest is extrapolated."""
    (small, first), (large, last) = found.points[0], found.points[-1]
    if large == small or last <= first:
        return found
    rate = (last - first) / (large - small)
    return TimeCurve((*found.points, *((times * large, last + rate * (times - 1) * large) for times in LARGER)))


def _copies(figures: Figures) -> dict[str, TimeCurve]:
    found: dict[str, list[tuple[float, float]]] = {}
    for name, value in figures.items():
        if name.startswith("copy/"):
            found.setdefault(name.split("/")[1], []).append((value["bytes"], value["seconds"]))
    return {direction: curve(points) for direction, points in found.items()}


def curve(points: Any) -> TimeCurve:
    """By size; of points of nearly the same size, the mean."""
    merged: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if merged and point[0] <= merged[-1][0][0] * (1 + SAME_SIZE):
            merged[-1].append(point)
        else:
            merged.append([point])
    return TimeCurve(tuple((group[0][0], sum(seconds for _, seconds in group) / len(group)) for group in merged))


def machine_for(machine: Machine, path: Path, taken: Mapping[str, str], device: torch.device) -> Machine:
    """The profile of a machine for these implementations, from the figures beside it; without them as it is."""
    store = path.with_suffix(".figures.jsonl")
    if not store.is_file():
        return machine
    figures = FigureStore(store, machine.key).figures
    found = machine_of(figures, machine.key, device, taken, {"watts": machine.watts})
    return dataclasses.replace(found, links=machine.links, collectives=machine.collectives, left=machine.left)


# Figures are measured one at a time behind a heater. A step draws another power and so runs at another clock: all its
# kernels at the same one, because the GPU follows its power over many kernels. The last figure of a config is therefore
# a few real steps of a cut of its model, long enough for the clock to settle. What arithmetic limits (products and
# attention) takes as much longer or shorter there as the clock says; what memory limits does not follow the clock:
#
#     measured step = rest + arithmetic x clock factor
#
# From the factors of a few different steps follows how much power products and attention draw, and from that the clock
# of any other step (`Machine.clock_factor`).

LAYERS, PASSES = 8, 8  # of the cut model: enough passes that the wait at the end of a step does not count
SECONDS, WARM_UP_SECONDS = 2.5, 3.0
FEW_TOKENS, HOST_SECONDS = 128, 1.0
BELIEVABLE = (0.85, 1.3)
"""A factor outside is no clock: a figure is wrong, or the host was too slow."""


def anchor_figure(setting: Setting, machine: Callable[[], Machine]) -> FigureToMeasure:
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
        found = measure_steps(config, batch, SECONDS, warm_up_seconds=WARM_UP_SECONDS)
        value = {
            "seconds": found["step_seconds"],
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

    return FigureToMeasure(f"anchor/{model.hidden_size}-{model.intermediate_size}-{model.moe.experts}/{batch}", run)


def clock_factor(value: Mapping[str, float]) -> float:
    """What arithmetic takes in a real step / in its figures."""
    arithmetic = value["matmul"] + value["attention"]
    return (value["seconds"] - (value["predicted"] - arithmetic)) / arithmetic


def host_figure(setting: Setting) -> FigureToMeasure:
    """What the host takes to queue forward and backward of a block: steps with so few tokens that the device waits."""
    layers = min(LAYERS, setting.model.layers)
    model = dataclasses.replace(setting.model, layers=layers)
    train = dataclasses.replace(setting.config.train, cuda_graph="off")
    config = dataclasses.replace(setting.config, model=model, train=train)

    def run(_: Stopwatch) -> dict[str, Any]:
        found = measure_steps(config, BatchShape(1, FEW_TOKENS, PASSES), HOST_SECONDS)
        return {"block_seconds": found["step_seconds"] / (PASSES * layers)}

    return FigureToMeasure("host", run)


def offload_figures(setting: Setting) -> Iterator[FigureToMeasure]:
    """The update on the host with its copies, as `parallel.offload: optimizer` makes it: steps with few tokens, which
    wait for nothing else, of a small and of the whole model. AdamW alone would have the host's memory to itself."""
    for layers in dict.fromkeys((min(4, setting.model.layers), setting.model.layers)):
        model = dataclasses.replace(setting.model, layers=layers)
        yield FigureToMeasure(
            f"operator/host_adamw/-/{model.hidden_size}-{layers}", partial(_offloaded, setting, model)
        )


def _offloaded(setting: Setting, model: ModelConfig, watch: Stopwatch) -> dict[str, Any]:
    del watch
    parallel = dataclasses.replace(setting.config.parallel, offload="optimizer")
    config = dataclasses.replace(setting.config, model=model, parallel=parallel)
    found = measure_steps(config, BatchShape(1, FEW_TOKENS, 1), HOST_SECONDS)
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
