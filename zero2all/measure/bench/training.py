"""`compile`, `gc` and `optimizer`: three choices of a training step, on our model and our optimizers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zero2all.common.errors import UsageError
from zero2all.common.progress import say
from zero2all.config import RunConfig
from zero2all.estimate.run.batch import BatchShape
from zero2all.measure.bench.samples import WITHIN_NOISE, Bench, Row, in_turn, is_faster, times_faster
from zero2all.measure.child import MEASURED, run_child
from zero2all.measure.step_timer import device_name, iterations, random_state, wait_for
from zero2all.measure.variants import ANCHOR
from zero2all.ops.registry import resolve
from zero2all.parallel.layout import layout_table
from zero2all.parallel.parts import Box, Part
from zero2all.train.optimizers.base import Master
from zero2all.train.optimizers.factory import Implementation, build_optimizer
from zero2all.train.periodic import scheduled_garbage_collection
from zero2all.train.setup import op_context
from zero2all.train.state import DTYPES

COMPILES = ("none", "block", "trunk")
OPTIMIZERS: tuple[tuple[Any, Implementation], ...] = (
    *(("adamw", "fused"), ("adamw", "eager"), ("adamw_bf16", "auto"), ("adamw_8bit", "auto"), ("lion", "auto")),
    *(("sgd", "auto"), ("adafactor", "auto"), ("muon", "auto")),
)


# ---- compile ----------------------------------------------------------------------------------------------------


def bench_compile(
    source: str, overrides: list[str], batch: BatchShape, device: torch.device, seconds: float, row_seconds: float
) -> Bench:
    """Steps of a config without and with torch.compile, each in a process of its own that may take `row_seconds`."""
    bench = Bench("compile", f"{source}, {batch} ({batch.tokens:,} tokens an iteration), {device_name(device)}")
    for kind in COMPILES:
        say(f"bench compile: {kind}")
        words = [source, "--row", ANCHOR, "--batch", batch, "--seconds", seconds, "--warm-up-seconds", 1]
        more = [*overrides, "--ops.compile", kind, "--parallel.device", device.type]
        found = run_child("row", words, more, row_seconds)
        if found["status"] != MEASURED:
            bench.left_out.append(f"{kind}: {found['status']}: {found.get('reason', '')}")
            continue
        columns = {"first step": f"{found['first_step_seconds']:.1f} s", "peak": f"{found['peak_gib']:.2f} GiB"}
        bench.rows.append(Row(kind, found["iteration_seconds"], batch.tokens / 1e3, "k tokens/s", columns))
    bench.advice = compile_advice(bench.rows)
    return bench


def compile_advice(rows: list[Row]) -> list[str]:
    """Compile where steps get shorter, and after how many steps that pays for the compilation."""
    plain = next((row for row in rows if row.what == "none"), None)
    if plain is None or len(rows) < 2:
        return []
    best = min((row for row in rows if row is not plain), key=lambda row: row.median)
    if is_faster(plain, best):
        return [
            f"Leave ops.compile at none: it is {times_faster(plain, best)} times as fast as compiled ({best.what})."
        ]
    if not is_faster(best, plain):
        return [WITHIN_NOISE]
    first = [float(row.more["first step"].split()[0]) for row in (best, plain)]
    steps = max(0.0, first[0] - first[1]) / (plain.median - best.median)
    return [
        f"`--ops.compile {best.what}` makes iterations {times_faster(best, plain)} times as fast. Compilation is paid "
        f"back after {steps:,.0f} iterations."
    ]


# ---- garbage collection -----------------------------------------------------------------------------------------


@dataclass
class Collections:
    """What Python's collector did while it was watched."""

    seconds: list[float] = field(default_factory=list)
    _started: float = 0.0

    def __call__(self, phase: str, _: dict[str, Any]) -> None:
        """For gc.callbacks."""
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._started)


@contextmanager
def watched_collections() -> Iterator[Collections]:
    """The collections in the block."""
    found = Collections()
    gc.callbacks.append(found)
    try:
        yield found
    finally:
        gc.callbacks.remove(found)


def bench_gc(config: RunConfig, batch: BatchShape, device: torch.device, seconds: float, blocks: int = 4) -> Bench:
    """Steps with Python's own garbage collection and with the schedule of our trainer, in blocks that take turns."""
    state = random_state(
        config, resolve(config.ops, op_context(config, device.type, DTYPES[config.train.precision])), device
    )
    iterate = iterations(state, batch, config.train.z_loss, device)
    bench = Bench(
        "gc",
        f"{batch} ({batch.tokens:,} tokens), {len(gc.get_objects()):,} live objects, {device_name(device)}",
    )
    iterate(1)
    wait_for(device)
    times: dict[str, list[float]] = {"Python's own": [], "our schedule": []}
    pauses: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(blocks):
        for name, took in times.items():
            with watched_collections() as collections:
                if name == "our schedule":
                    with scheduled_garbage_collection() as after_step:
                        collections.seconds.clear()  # before the first step a run collects once
                        took += _steps(iterate, batch, device, seconds / (2 * blocks), after_step)
                else:
                    took += _steps(iterate, batch, device, seconds / (2 * blocks), lambda _: None)
            pauses[name] += collections.seconds
    started = time.perf_counter()
    gc.collect()
    whole = time.perf_counter() - started
    for name, took in times.items():
        more = {
            "longest": f"{1e3 * max(took):.1f} ms",
            "collections": f"{len(pauses[name]):,}",
            "of the time": f"{100 * sum(pauses[name]) / sum(took):.2f} %",
        }
        bench.rows.append(Row(name, took, more=more))
    bench.advice = gc_advice(bench.rows, {name: sum(pauses[name]) / sum(took) for name, took in times.items()}, whole)
    return bench


def _steps(
    iterate: Callable[[int], object],
    batch: BatchShape,
    device: torch.device,
    seconds: float,
    after: Callable[[int], None],
) -> list[float]:
    took: list[float] = []
    while len(took) < 3 or sum(took) < seconds:
        started = time.perf_counter()
        iterate(batch.accumulation)
        wait_for(device)
        after(len(took) + 1)
        took.append(time.perf_counter() - started)
    return took


def gc_advice(rows: list[Row], shares: dict[str, float], whole_seconds: float) -> list[str]:
    """What the schedule gains here, and what one full collection would cost every rank."""
    own, ours = rows
    advice = [
        f"One full collection takes {1e3 * whole_seconds:.0f} ms here, {whole_seconds / ours.median:.2f} iterations. "
        f"Of many ranks one collects at any time, and all wait for it."
    ]
    if is_faster(ours, own):
        advice.append(f"The schedule of `z2a train` makes an iteration {times_faster(ours, own)} times as fast.")
    elif not shares[own.what]:
        advice.append("Python's collector did not run in so few iterations: measure longer with --seconds.")
    else:
        saved = 100 * (shares[own.what] - shares[ours.what])
        advice.append(f"On one process the schedule gains {saved:.2f} % of the time, inside the noise of a step.")
    return advice


# ---- optimizers -------------------------------------------------------------------------------------------------


def bench_optimizer(config: RunConfig, device: torch.device, seconds: float) -> Bench:
    """One update of all parameters of a config by each optimizer, on random gradients."""
    table = {parameter.name: parameter for parameter in layout_table(config.model)}
    count = sum(_size(parameter.shape) for parameter in table.values())
    bench = Bench(
        "optimizer", f"{count / 1e6:,.1f} M parameters, {device_name(device)}; state beside weight and gradient"
    )
    for kind, implementation in OPTIMIZERS:
        name = f"{kind} ({implementation})" if implementation != "auto" else kind
        say(f"bench optimizer: {name}")
        dtype = torch.bfloat16 if kind == "adamw_bf16" else torch.float32
        masters = {}
        for parameter in table.values():
            values = torch.randn(parameter.shape, device=device).mul_(0.02).to(dtype)
            gradient = torch.randn(parameter.shape, device=device).mul_(0.01).to(dtype)
            part = Part(values, parameter.shape, Box.whole(parameter.shape))
            masters[parameter.name] = Master(part, lambda gradient=gradient: gradient)  # type: ignore[misc]
        try:
            optimizer = build_optimizer(masters, replace(config.optim, kind=kind), table, implementation)
            took = in_turn({name: optimizer.step}, seconds / len(OPTIMIZERS), device)[name]
        except (UsageError, RuntimeError) as error:
            bench.left_out.append(f"{name}: {' '.join(str(error).split())[:200]}")
            continue
        state = sum(part.values.nbytes for part in optimizer.state_tensors().values())
        bench.rows.append(
            Row(name, took, count / 1e9, "G parameters/s", {"state": f"{state / count:.2f} bytes/parameter"})
        )
        del optimizer, masters
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    bench.advice = optimizer_advice(bench.rows)
    return bench


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def optimizer_advice(rows: list[Row]) -> list[str]:
    """Fused or not is a matter of speed. Another kind is another method: only its cost is said."""
    by_name = {row.what: row for row in rows}
    fused, eager = by_name.get("adamw (fused)"), by_name.get("adamw (eager)")
    if fused is None or eager is None:
        return []
    if is_faster(fused, eager):
        advice = [
            f"Fused AdamW is {times_faster(fused, eager)} times as fast as the formulas one by one; auto takes it."
        ]
    elif is_faster(eager, fused):
        advice = [f"Fused AdamW is slower than the formulas one by one here ({times_faster(eager, fused)} times)."]
    else:
        advice = ["Fused AdamW and the formulas one by one take the same time here, within the noise."]
    slower = [row for row in rows if row not in (fused, eager) and is_faster(fused, row)]
    if slower:
        listed = ", ".join(f"{row.what} {row.median / fused.median:.1f}" for row in slower)
        advice.append(f"Times the cost of fused AdamW per update: {listed}. With long iterations it may not matter.")
    return advice
