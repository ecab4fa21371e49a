"""Training with optimizer states on the host (`parallel.offload`): losses, speed, what is not hidden, memory.

    python benchmarks/offload.py                                                     7.5 B parameters, offloaded
    python benchmarks/offload.py --offload none --json none.json                     the same on the device alone
    python benchmarks/offload.py --against none.json                                 and the difference of the losses
    python benchmarks/offload.py --layers 44                                         10 B: fits only with offload
    python benchmarks/offload.py --hidden 64 --layers 2 --intermediate 96 --heads 4 --kv-heads 2 --vocab 256 \
        --seq-len 32 --micro-batch 2 --tokens-per-step 128 --steps 5 --precision float32       on a CPU

A Llama of the given sizes, on random ids or on those of a file (`--tokens ids.npy`, one dimension). The step is the
trainer's own. Not hidden: the time that the stream of the GPU waited in front of a block for its new weights. Compute
alone: the same steps without updates. Host memory: what the process holds when it ends, and at its peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import machine
from zero2all.config import RunConfig, config_from_values
from zero2all.estimate.memory import estimate_memory
from zero2all.model.config import parameter_counts
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device, set_cpu_threads, set_memory_settings
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.world import World
from zero2all.train.build import empty_state, op_context
from zero2all.train.micro_batch import memory_settings
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.step_timer import Mark, mark_now, seconds_between
from zero2all.train.train_step import StepPlan, train_step

FIRST_STEPS = 3
"""Left out of the speed: kernels are compiled, memory of the host is touched for the first time."""
GB = 1e9


def main() -> None:
    """Train, measure, print."""
    arguments = _arguments()
    set_memory_settings(expandable_segments=True)
    config = _config(arguments)
    world = World(device=pick_device(arguments.device))
    threads = set_cpu_threads(config.parallel.cpu_threads, None)
    started = time.perf_counter()
    state = build(config, world)
    _wait(world.device)
    count = parameter_counts(config.model)["total"]
    print(
        f"{count / 1e9:.3f} B parameters built in {time.perf_counter() - started:.1f} s, {threads} threads", flush=True
    )
    ids = None if arguments.tokens is None else np.load(arguments.tokens, mmap_mode="r")
    losses, seconds, waits = train(state, config, world, arguments.steps, ids)
    state.weights.wait()
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None
    alone = compute_alone(state, config, world, arguments.compute_steps, ids)
    settings = memory_settings(config, state.model.ops, world.mesh, state.micro_batch_samples)
    found = {
        "parameters": count,
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "losses": losses,
        "step_seconds": seconds,
        "tokens_per_second": config.train.tokens_per_step / statistics.median(seconds[FIRST_STEPS:] or seconds),
        "not_hidden_seconds": statistics.median(waits[FIRST_STEPS:] or waits),
        "compute_alone_tokens_per_second": config.train.tokens_per_step / statistics.median(alone) if alone else None,
        "peak_device_gb": None if peak is None else peak / GB,
        "estimated_device_gb": estimate_memory(config.model, settings).total / GB,
        "host": host_memory(),
        "machine": machine(),
    }
    report(found, arguments.against)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 4096, "layers": 32, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocab": 65536}
    batch = {"seq_len": 4096, "micro_batch": 2, "tokens_per_step": 65536, "steps": 20, "compute_steps": 3}
    for name, value in {**sizes, **batch}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup", type=int, default=5, help="steps over which the rate rises")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--linear", default="auto", help="ops.linear")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--offload", default="optimizer", help="none or optimizer")
    parser.add_argument("--bucket-mb", type=float, default=128.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cpu-threads", type=int, help="parallel.cpu_threads; the update takes one less on a GPU")
    parser.add_argument("--tokens", type=Path, help="token ids, .npy")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--against", type=Path, help="figures of another run, to compare the losses with")
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> RunConfig:
    values: dict[str, Any] = {
        "data": {"seq_len": arguments.seq_len},
        "model": {
            "hidden_size": arguments.hidden,
            "layers": arguments.layers,
            "intermediate_size": arguments.intermediate,
            "heads": arguments.heads,
            "kv_heads": arguments.kv_heads,
            "vocab_size": arguments.vocab,
            "max_seq_len": arguments.seq_len,
            "tied_embeddings": False,
        },
        "train": {
            "name": "offload",
            "steps": max(arguments.steps, arguments.warmup + 1),
            "tokens_per_step": arguments.tokens_per_step,
            "micro_batch_samples": arguments.micro_batch,
            "precision": arguments.precision,
            "recompute": arguments.recompute,
        },
        "optim": {"lr_max": arguments.lr},
        "schedule": {"warmup_steps": arguments.warmup},
        "ops": {"linear": arguments.linear},
        "parallel": {
            "device": arguments.device,
            "bucket_mb": arguments.bucket_mb,
            "cpu_threads": arguments.cpu_threads,
            "offload": arguments.offload,
        },
    }
    return config_from_values(values, "benchmarks/offload.py")


def build(config: RunConfig, world: World) -> TrainState:
    """The state of a new run, as `zero2all.train.build` builds it."""
    ops = resolve(config.ops, op_context(config, world.device.type, DTYPES[config.train.precision]))
    state = empty_state(config, world, ops)
    assert isinstance(config.train.micro_batch_samples, int), "the benchmark names the micro-batch"
    state.micro_batch_samples = config.train.micro_batch_samples
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, config.train.seed)
    state.weights.publish_masters()
    return state


def train(
    state: TrainState, config: RunConfig, world: World, steps: int, ids: np.ndarray | None
) -> tuple[list[float], list[float], list[float]]:
    """Losses, seconds, and seconds that were not hidden, of each step. The host runs one step ahead of the figures, as
    in a real run."""
    waits = _watch_waits(state, world.device)
    losses, ends, not_hidden = [], [mark_now(world.device)], []
    pending = None
    for step in range(steps):
        batch = _batch(config, step, ids)
        lr = config.optim.lr_max * min(1.0, (step + 1) / max(1, config.schedule.warmup_steps))
        following = train_step(state, batch, 1, config, world, StepPlan(lr))
        ends.append(mark_now(world.device))
        if pending is not None:
            losses.append(_report_loss(pending.result()))
        pending = following
        not_hidden.append(list(waits))
        waits.clear()
    assert pending is not None, "at least one step"
    losses.append(_report_loss(pending.result()))
    _wait(world.device)
    seconds = [seconds_between(*pair) for pair in itertools.pairwise(ends)]
    return losses, seconds, [sum(seconds_between(*pair) for pair in pairs) for pairs in not_hidden]


def _report_loss(result: Any) -> float:
    print(f"step {result.step:3d}  loss {result.loss:.6f}  norm {result.grad_norm:.4f}", flush=True)
    return float(result.loss)


def _watch_waits(state: TrainState, device: torch.device) -> list[tuple[Mark, Mark]]:
    """Marks around each wait of the forward pass for weights. In between the stream of the GPU has nothing else to do:
    it reaches the first mark when all before it is computed, and the second when the weights are there."""
    marks: list[tuple[Mark, Mark]] = []
    wait = state.weights.wait

    def watched(*arguments: Any) -> None:
        before = mark_now(device)
        wait(*arguments)
        marks.append((before, mark_now(device)))

    state.weights.wait = watched  # type: ignore[method-assign]
    return marks


def compute_alone(
    state: TrainState, config: RunConfig, world: World, steps: int, ids: np.ndarray | None
) -> list[float]:
    """Seconds of each step without updates; the gradients are set to zero on the device."""

    def only_clear(*_scale_and_refused: Any) -> None:
        state.weights.zero_gradients()

    state.optimizer.step = only_clear  # type: ignore[assignment, method-assign]
    ends = [mark_now(world.device)]
    for step in range(steps):
        train_step(state, _batch(config, step, ids), 1, config, world, StepPlan(0.0))
        ends.append(mark_now(world.device))
    _wait(world.device)
    return [seconds_between(*pair) for pair in itertools.pairwise(ends)]


def _batch(config: RunConfig, step: int, ids: np.ndarray | None) -> Batch:
    rows, length = config.samples_per_step, config.data.seq_len + 1
    if ids is None:
        tokens = np.random.default_rng(step).integers(0, config.model.vocab_size, (rows, length))
    else:
        first = step * rows * length
        tokens = np.asarray(ids[first : first + rows * length], dtype=np.int64).reshape(rows, length)
    channels = np.zeros(rows, dtype=np.int64)
    return Batch(tokens, channels, channels, 0)


def host_memory() -> dict[str, float]:
    """GB of this process."""
    import psutil

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"now_gb": psutil.Process().memory_info().rss / GB, "peak_gb": peak / GB}


def report(found: dict[str, Any], against: Path | None) -> None:
    """Print the figures."""
    speed, alone = found["tokens_per_second"], found["compute_alone_tokens_per_second"]
    print(f"{speed:,.0f} tokens/s, {found['not_hidden_seconds']:.3f} s of a step not hidden")
    if alone is not None:
        print(f"compute alone: {alone:,.0f} tokens/s, so {speed / alone:.1%} of it")
    if found["peak_device_gb"] is not None:
        estimate = found["estimated_device_gb"]
        print(f"device: {found['peak_device_gb']:.1f} GB at the peak, {estimate:.1f} GB estimated")
    each = found["host"]["now_gb"] * GB / found["parameters"]
    print(
        f"host: {found['host']['now_gb']:.1f} GB, {found['host']['peak_gb']:.1f} at the peak; {each:.1f} bytes a value"
    )
    if against is not None:
        other = json.loads(against.read_text())["losses"]
        differences = [abs(one - two) / two for one, two in zip(found["losses"], other, strict=False)]
        print(f"losses of {len(differences)} steps differ by at most {max(differences):.2e} (relative)")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
