"""`z2a perf profile`: a few iterations of a training step (`zero2all.measure.step_timer`) taken apart.

In turn: iterations without a profiler, for the true time; the same under torch's profiler, for the trace and its
anatomy; one with the allocations recorded, for the memory over time; one pass with the memory of each block. Apart,
because each way of watching costs time of its own. At the end: profile.json, two pictures, tables.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its news of starting and stopping; what failed is seen in the trace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from zero2all.common.errors import UserError
from zero2all.common.files import write_json
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.config import RunConfig
from zero2all.estimate.floors import operator_work
from zero2all.estimate.kernel_groups import GROUPS, LOSS
from zero2all.estimate.run.batch import BatchShape, check_batch, own_batch
from zero2all.estimate.run.pictures import write_png
from zero2all.measure.anatomy import OUTSIDE, PHASE, STEP, UPDATE, Anatomy, add_floors, anatomy_of, inside
from zero2all.measure.block_memory import MIB, BlockMemory, block_memory
from zero2all.measure.op_bench import Ceilings, measured_ceilings
from zero2all.measure.step_timer import (
    Iterate,
    choices,
    device_name,
    iterations,
    peak_bytes,
    prepare,
    random_state,
    random_tokens,
    state_bytes_of,
    wait_for,
)
from zero2all.ops.registry import resolve
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.track.plot import COLORS, FAINT_INK, INK, thin_out
from zero2all.train.build import op_context
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.step_timer import scheduled_garbage_collection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PASSES = 4  # of an iteration: more of the same would only make the trace larger
CPU_SAMPLES, CPU_SEQ_LEN = 2, 256  # by default on a CPU, where a whole micro-batch would take minutes
WARM_UP_PASSES = 6  # compile, autotune, and the capture of a CUDA graph, which follows two eager passes
MOST_ALLOCATIONS = 500_000
TRACE_NAME, SNAPSHOT_NAME = "trace.json.gz", "memory_snapshot.pickle"


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocated bytes over one iteration."""

    points: list[tuple[float, float]] = field(default_factory=list)  # seconds since its start, bytes
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, start, end
    source: str = "not recorded yet"

    @property
    def peak(self) -> tuple[float, float]:
        """When, and how much."""
        return max(self.points, key=lambda point: point[1], default=(0.0, 0.0))

    def phase_at(self, seconds: float) -> str:
        """What ran at that time."""
        inside = [(start, name) for name, start, end in self.phases if start <= seconds <= end]
        return max(inside, default=(0.0, OUTSIDE))[1]


@dataclass
class Profile:
    """All that was found."""

    config: str
    device: str
    dtype: str
    batch: BatchShape
    seconds: float  # of an iteration, without a profiler
    ceilings: Ceilings
    anatomy: Anatomy
    ops: dict[str, dict[str, str]]
    notes: list[str]
    memory: MemoryTimeline = field(default_factory=MemoryTimeline)
    blocks: list[BlockMemory] = field(default_factory=list)
    peak_bytes: int = 0


def default_batch(config: RunConfig, device: torch.device) -> BatchShape:
    """The config's own with few passes; on a CPU a small one."""
    own = own_batch(config)
    if device.type == "cuda":
        return dataclasses.replace(own, accumulation=min(own.accumulation, MOST_PASSES))
    return BatchShape(min(own.samples, CPU_SAMPLES), min(own.seq_len, CPU_SEQ_LEN), min(own.accumulation, 2))


@dataclass(frozen=True)
class ProfileOptions:
    """What to profile, and where the trace and, on a GPU, the snapshot of its memory go."""

    name: str
    output: Path
    batch: BatchShape | None = None
    """None: `default_batch`."""
    steps: int = 3
    seconds: float = 120.0
    """Fewer steps where they would take longer."""


def profile_config(config: RunConfig, options: ProfileOptions, keep: Callable[[Profile], None]) -> Profile:
    """Profile some iterations; `keep` gets what was found after every part."""
    source, output, seconds = options.name, options.output, options.seconds
    set_cpu_threads(config.parallel.cpu_threads, None)
    device, dtype = pick_device(config.parallel.device), DTYPES[config.train.precision]
    batch = options.batch or default_batch(config, device)
    check_batch(batch, config)
    output.mkdir(parents=True, exist_ok=True)
    ceilings, phases = measured_ceilings(device, dtype, 0.1), _Phases()
    state = _ready_state(config, batch, device, phases)
    iterate = iterations(state, batch, config.train.z_loss, device, phases)
    with scheduled_garbage_collection():
        say(f"perf profile: {source}, {batch}, {device_name(device)}: warm-up")
        once = _warm_up(iterate, batch, device, seconds / 4)
        steps = max(1, min(options.steps, int(seconds / max(once, 1e-9) / 4)))
        say(f"perf profile: {once:.3g} s an iteration; {steps} are profiled")
        plain = min(_timed(iterate, batch, device) for _ in range(steps))
        anatomy = _anatomy(iterate, batch, device, steps, output / TRACE_NAME)
        work = operator_work(config.model, batch.samples * batch.seq_len, batch.seq_len, dtype.itemsize)
        limits = (ceilings.copy_bytes_per_second, ceilings.matmul_flops_per_second)
        add_floors(anatomy, work, batch.accumulation, *limits)
        found = Profile(
            config=source,
            device=device_name(device),
            dtype=str(dtype).removeprefix("torch."),
            batch=batch,
            seconds=plain,
            ceilings=ceilings,
            anatomy=anatomy,
            ops=choices(state.model.ops),
            notes=_notes(config, batch, anatomy, plain),
        )
        keep(found)
        say("perf profile: memory")
        found.memory = (_gpu_memory if device.type == "cuda" else _cpu_memory)(iterate, batch, state, phases, output)
        found.peak_bytes = peak_bytes(device)
        keep(found)
        if config.ops.compile == "none":
            found.blocks = _blocks(state, batch, config.train.z_loss, device)
    return found


def _ready_state(config: RunConfig, batch: BatchShape, device: torch.device, phases: _Phases) -> TrainState:
    """A model that has not run yet, as `zero2all.measure.step_timer` makes it; its loss is a phase of its own."""
    ops = resolve(config.ops, op_context(config, device.type, DTYPES[config.train.precision]))
    state = random_state(config, ops, device)
    prepare(state, config, batch, device)
    state.model.head_loss = inside(lambda: phases(LOSS), state.model.head_loss)  # type: ignore[method-assign]
    return state


class _Phases:
    """Annotates phases in a trace, and keeps the times of the last iteration by the host's clock."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.time()
        with record_function(PHASE + name):
            yield
        self.spans.append((name, started, time.time()))


def _warm_up(iterate: Iterate, batch: BatchShape, device: torch.device, seconds: float) -> float:
    """Seconds of the last of some iterations; no more of them are started after `seconds`."""
    ends = time.perf_counter() + seconds
    once = _timed(iterate, batch, device)
    for _ in range(math.ceil(WARM_UP_PASSES / batch.accumulation) - 1):
        if time.perf_counter() < ends:
            once = _timed(iterate, batch, device)
    return once


def _timed(iterate: Iterate, batch: BatchShape, device: torch.device) -> float:
    started = time.perf_counter()
    iterate(batch.accumulation)
    wait_for(device)
    return time.perf_counter() - started


def _anatomy(iterate: Iterate, batch: BatchShape, device: torch.device, steps: int, trace: Path) -> Anatomy:
    """Of some iterations; writes their trace, which Perfetto (ui.perfetto.dev) opens."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch_profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                iterate(batch.accumulation)
                wait_for(device)
    profiler.export_chrome_trace(str(trace))
    anatomy = anatomy_of(read_trace(trace))
    if anatomy.kind != device.type:
        raise UserError(
            f"The profiler recorded no kernel of {device_name(device)}. On many machines only an administrator may "
            f"read the GPU's counters: set NVreg_RestrictProfilingToAdminUsers=0 for the driver, or start the "
            f"container with --cap-add SYS_ADMIN."
        )
    return anatomy


def read_trace(path: Path) -> list[Mapping[str, Any]]:
    """The events of a trace, packed or not."""
    data = path.read_bytes()
    events: list[Mapping[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


# ---- memory ----------------------------------------------------------------------------------------------------------


def _cpu_memory(
    iterate: Iterate, batch: BatchShape, state: TrainState, phases: _Phases, output: Path
) -> MemoryTimeline:
    """From the profiler's record of allocations, which begins at 0: the states of the run are added to it."""
    del phases
    with tempfile.TemporaryDirectory(dir=output) as folder:
        path = Path(folder) / "memory.json"
        with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(STEP):
            iterate(batch.accumulation)
        profiler.export_chrome_trace(str(path))
        return trace_memory(read_trace(path), state_bytes_of(state))


def trace_memory(events: list[Mapping[str, Any]], base: float) -> MemoryTimeline:
    """The allocations on the CPU that a trace holds, `base` bytes above 0."""
    began = next(one["ts"] for one in events if one.get("name") == STEP and one.get("cat") == "user_annotation")
    points = sorted(
        ((one["ts"] - began) / 1e6, base + one["args"]["Total Allocated"])
        for one in events
        if one.get("name") == "[memory]" and one["args"].get("Device Type") == 0
    )
    phases = [
        (one["name"].removeprefix(PHASE), (one["ts"] - began) / 1e6, (one["ts"] + one["dur"] - began) / 1e6)
        for one in events
        if one.get("cat") == "user_annotation" and str(one.get("name", "")).startswith(PHASE)
    ]
    return MemoryTimeline(points, sorted(phases, key=lambda phase: phase[1]), "tensors on the CPU")


def _gpu_memory(
    iterate: Iterate, batch: BatchShape, state: TrainState, phases: _Phases, output: Path
) -> MemoryTimeline:
    """From the allocator's own record, which pytorch.org/memory_viz shows too."""
    device = state.model.head_weight.device
    wait_for(device)
    before, began = torch.cuda.memory_allocated(device), time.time()
    phases.spans.clear()
    torch.cuda.memory._record_memory_history(
        enabled="all", context="alloc", stacks="python", max_entries=MOST_ALLOCATIONS
    )
    try:
        iterate(batch.accumulation)
        wait_for(device)
        torch.cuda.memory._dump_snapshot(str(output / SNAPSHOT_NAME))
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    index = device.index if device.index is not None else torch.cuda.current_device()
    spans = [(name, start - began, end - began) for name, start, end in phases.spans]
    return MemoryTimeline(snapshot_points(snapshot["device_traces"][index], before, began), spans, "the allocator")


def snapshot_points(entries: list[Mapping[str, Any]], before: float, began: float) -> list[tuple[float, float]]:
    """(seconds since `began`, bytes) after each entry of the allocator's record."""
    signs = {"alloc": 1, "free_completed": -1}
    now, points = float(before), [(0.0, float(before))]
    for entry in entries:
        if (sign := signs.get(entry["action"])) is not None:
            now += sign * entry["size"]
            points.append((entry["time_us"] / 1e6 - began, now))
    return points


def _blocks(state: TrainState, batch: BatchShape, z_loss: float, device: torch.device) -> list[BlockMemory]:
    rows = random_tokens(state.model.config.vocab_ids, batch, device)[0]
    shares = torch.full((batch.samples, batch.seq_len), 1.0 / batch.tokens, dtype=torch.float32, device=device)
    with block_memory(state.model, show=None) as found:
        total, _ = state.model.loss(rows[:, :-1], rows[:, 1:], shares, None, z_loss)
        total.backward()
        del total
    return found


def _notes(config: RunConfig, batch: BatchShape, anatomy: Anatomy, plain: float) -> list[str]:
    found = [f"The profiler made an iteration {100 * (anatomy.seconds / plain - 1):.0f} % longer."]
    own = own_batch(config)
    if own.accumulation > batch.accumulation:
        update = anatomy.phases.get(UPDATE, 0.0)
        in_run = update + (anatomy.seconds - update) * own.accumulation / batch.accumulation
        found.append(
            f"A run has {own.accumulation} passes in a step, {batch.accumulation} were profiled: the update is "
            f"{100 * update / anatomy.seconds:.1f} % here and {100 * update / in_run:.1f} % there."
        )
    if config.ops.compile != "none":
        found.append("Compiled blocks are not watched one by one: use --ops.compile none for the memory of each.")
    return found


# ---- files and tables ------------------------------------------------------------------------------------------------

TOP = 15
MOST_POINTS = 2_000
MOST_PHASES = 16
GIB = float(1 << 30)
Cells = list[list[str]]


def write_profile(found: Profile, output: Path) -> list[str]:
    """Write all files; returns their paths, or why one is missing."""
    said = [str(output / TRACE_NAME), *([str(output / SNAPSHOT_NAME)] if found.anatomy.kind == "cuda" else [])]
    write_json(output / "profile.json", as_json(found))
    for name, draw in (("anatomy.png", _draw_anatomy), ("memory.png", _draw_memory)):
        said.append(write_png(output / name, (7.6, 3.8), partial(draw, found)))
    return [*said, str(output / "profile.json")]


def as_json(found: Profile) -> dict[str, Any]:
    """Everything but the single allocations, of which the trace and the snapshot have all."""
    plain = dataclasses.asdict(found)
    for row, plain_row in zip(found.anatomy.rows, plain["anatomy"]["rows"], strict=True):
        plain_row["floor_percent"] = row.floor_percent
    seconds, peak = found.memory.peak
    plain["memory"] = {
        "source": found.memory.source,
        "peak_bytes": peak,
        "peak_at_seconds": seconds,
        "peak_phase": found.memory.phase_at(seconds),
        "phases": found.memory.phases,
    }
    return plain


def title_of(found: Profile) -> str:
    """What was profiled."""
    return (
        f"{found.config} on {found.device}, {found.dtype}, {found.batch}: {1e3 * found.seconds:,.1f} ms an iteration, "
        f"{found.batch.tokens / found.seconds:,.0f} tokens/s"
    )


def tables_of(found: Profile) -> list[Cells]:
    """All tables that have a row: groups, phases (without what is idle), kernels, memory, blocks."""
    whole = found.anatomy.seconds

    def times(of: dict[str, float]) -> Cells:
        return [[t(name), f"{1e3 * spent:,.2f}", f"{100 * spent / whole:.1f}"] for name, spent in of.items()]

    units = ["ms an iteration", "%"]
    blocks = [[row.name, *(f"{value / MIB:,.2f}" for value in dataclasses.astuple(row)[1:])] for row in found.blocks]
    tables = [
        [["group", *units], *times({**found.anatomy.groups, "together": whole})],
        [["phase (busy)", *units], *times(found.anatomy.phases)],
        _kernel_cells(found),
        _memory_cells(found),
        [["block, MiB", "forward, peak", "kept", "backward, peak", "kept"], *blocks],
    ]
    return [cells for cells in tables if len(cells) > 1]


def _kernel_cells(found: Profile) -> Cells:
    """The kernels or operators that take most of the time."""
    rows = []
    for row in found.anatomy.rows[:TOP]:
        floor = row.floor_percent
        figures = [f"{row.calls:g}", f"{1e3 * row.seconds:,.3f}", f"{100 * row.seconds / found.anatomy.seconds:.1f}"]
        rows.append([_short(row.name), t(row.group), *figures, "" if floor is None else f"{floor:.0f}"])
    name = "kernel" if found.anatomy.kind == "cuda" else "operator"
    return [[name, "group", "calls", "ms an iteration", "%", "% of floor"], *rows]


def _short(name: str, length: int = 70) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _memory_cells(found: Profile) -> Cells:
    """Peak and start."""
    seconds, peak = found.memory.peak
    first = found.memory.points[0][1] if found.memory.points else 0.0
    return [
        ["memory", "MiB", "when"],
        [t("peak in the iteration"), f"{peak / MIB:,.1f}", f"{seconds:.3f} s, {t(found.memory.phase_at(seconds))}"],
        [t("at its start"), f"{first / MIB:,.1f}", "0 s"],
        [
            t("peak of the GPU" if found.anatomy.kind == "cuda" else "peak of the process"),
            f"{found.peak_bytes / MIB:,.1f}",
            "",
        ],
    ]


# ---- pictures --------------------------------------------------------------------------------------------------------


def _draw_anatomy(found: Profile, figure: Figure) -> None:
    axis = figure.add_subplot()
    groups = {name: seconds for name, seconds in found.anatomy.groups.items() if seconds > 0}
    places = range(len(groups), 0, -1)
    for place, (name, seconds) in zip(places, groups.items(), strict=True):
        color = COLORS[GROUPS.index(name)] if name in GROUPS else FAINT_INK
        axis.barh(place, 1e3 * seconds, height=0.66, color=color, zorder=2)
        text = f" {1e3 * seconds:,.1f} ms, {100 * seconds / found.anatomy.seconds:.1f} %"
        axis.text(1e3 * seconds, place, text, va="center", fontsize=8.5, color=INK)
    axis.set_yticks(list(places), list(groups), color=INK)
    axis.set_xlim(0, 1.3e3 * max(groups.values()))
    axis.set_xlabel("ms an iteration")


def _draw_memory(found: Profile, figure: Figure) -> None:
    axis = figure.add_subplot()
    points = np.array(found.memory.points or [(0.0, 0.0)])
    seconds, values = thin_out(points[:, 0], points[:, 1], MOST_POINTS)
    for number, (name, start, end) in enumerate(found.memory.phases[:MOST_PHASES]):
        axis.axvspan(start, end, color=COLORS[number % 3], alpha=0.10, linewidth=0)
        axis.text((start + end) / 2, 1.01, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=7)
    axis.plot(seconds, values / GIB, drawstyle="steps-post", color=COLORS[0], linewidth=1.2)
    at, peak = found.memory.peak
    axis.plot([at], [peak / GIB], "o", color=COLORS[1], markersize=5)
    axis.annotate(f"{peak / GIB:.3g} GiB", (at, peak / GIB), xytext=(4, 4), textcoords="offset points", color=INK)
    axis.set_ylim(0, 1.12 * max(peak, 1.0) / GIB)
    axis.set_xlabel(f"seconds of an iteration; GiB allocated ({found.memory.source})")
