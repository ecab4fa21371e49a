"""`z2a perf profile`: a few steps of the trainer (`zero2all.measure.short_run`) taken apart.

First steps without a profiler, for the true time; then some under torch's profiler, which costs time of its own, for
the trace and its anatomy. The parts of a step (forward, loss, backward, …) are those of the trainer's own metrics.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run does
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its news of starting and stopping; what failed is seen in the trace

import torch

from zero2all.common.errors import UserError
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.config import RunConfig
from zero2all.estimate.floors import operator_work
from zero2all.measure.anatomy import Anatomy, add_floors
from zero2all.measure.clock import Ceilings, device_name, measured_ceilings
from zero2all.measure.short_run import ReadyRun
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.predict.batch import BatchShape, check_batch, own_batch
from zero2all.train.state import DTYPES
from zero2all.train.step_timer import scheduled_garbage_collection

MOST_PASSES = 4  # of a step: more of the same would only make the trace larger
CPU_SAMPLES, CPU_SEQ_LEN = 2, 256  # by default on a CPU, where a whole micro-batch would take minutes
PLAIN_SECONDS, WARM_UP_SECONDS = 2.0, 1.5
TRACE_NAME = "trace.json.gz"
TOP = 15
LONGEST_NAME = 70
Cells = list[list[str]]


@dataclass(frozen=True)
class Profile:
    """All that was found."""

    config: str
    device: str
    dtype: str
    batch: BatchShape
    seconds: float  # of a step, without a profiler
    parts: dict[str, float]  # of a step, as the trainer's metrics have them
    ceilings: Ceilings
    anatomy: Anatomy
    ops: dict[str, str]
    notes: list[str]


def default_batch(config: RunConfig, device: torch.device) -> BatchShape:
    """The config's own with few passes; on a CPU a small one."""
    own = own_batch(config)
    if device.type == "cuda":
        return dataclasses.replace(own, accumulation=min(own.accumulation, MOST_PASSES))
    return BatchShape(min(own.samples, CPU_SAMPLES), min(own.seq_len, CPU_SEQ_LEN), min(own.accumulation, 2))


def profile_config(name: str, config: RunConfig, batch: BatchShape | None, steps: int, output: Path) -> Profile:
    """Profile on the config's device; `batch` None: `default_batch`. The trace goes to `output`."""
    set_cpu_threads(config.parallel.cpu_threads, None)
    device, dtype = pick_device(config.parallel.device), DTYPES[config.train.precision]
    batch = batch or default_batch(config, device)
    check_batch(batch, config)
    output.mkdir(parents=True, exist_ok=True)
    say(f"perf profile: {name}, {batch}, {device_name(device)}: warm-up")
    ceilings, run = measured_ceilings(device, dtype, 0.1), ReadyRun(config, batch, device)
    with scheduled_garbage_collection():
        run.warm_up(WARM_UP_SECONDS)
        plain = min(run.timed_steps(PLAIN_SECONDS))
        run.steps(1)
        parts = {part: seconds for part, seconds in run.parts.items() if seconds}
        say(f"perf profile: {plain:.3g} s a step; {steps} are profiled")
        anatomy = run.profiled_steps(steps, output / TRACE_NAME)
    if anatomy.kind != device.type:
        raise UserError(
            f"The profiler recorded no kernel of {device_name(device)}. On many machines only an administrator may "
            f"read the GPU's counters: set NVreg_RestrictProfilingToAdminUsers=0 for the driver, or start the "
            f"container with --cap-add SYS_ADMIN."
        )
    work = operator_work(config.model, batch.samples * batch.seq_len, batch.seq_len, dtype.itemsize)
    add_floors(anatomy, work, batch.accumulation, ceilings.copy_bytes_per_second, ceilings.matmul_flops_per_second)
    notes = [f"The profiler made a step {100 * (anatomy.seconds / plain - 1):.0f} % longer."]
    own = own_batch(config)
    if own.accumulation > batch.accumulation:
        notes.append(
            f"A run has {own.accumulation} passes in a step, {batch.accumulation} were profiled: its update is a "
            f"smaller share."
        )
    return Profile(
        config=name,
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        batch=batch,
        seconds=plain,
        parts=parts,
        ceilings=ceilings,
        anatomy=anatomy,
        ops=dict(run.ops.taken),
        notes=notes,
    )


def as_json(found: Profile) -> dict[str, Any]:
    """Everything."""
    plain = dataclasses.asdict(found)
    for row, plain_row in zip(found.anatomy.rows, plain["anatomy"]["rows"], strict=True):
        plain_row["floor_percent"] = row.floor_percent
    return plain


def title_of(found: Profile) -> str:
    """What was profiled."""
    return (
        f"{found.config} on {found.device}, {found.dtype}, {found.batch}: {1e3 * found.seconds:,.1f} ms a step, "
        f"{found.batch.tokens / found.seconds:,.0f} tokens/s"
    )


def tables_of(found: Profile) -> list[Cells]:
    """Groups of kernels with the idle time, parts of a step, and the slowest kernels."""
    groups = {**found.anatomy.groups, "together": found.anatomy.seconds}
    return [
        [["group", "ms a step", "%"], *_times(groups, found.anatomy.seconds)],
        [["part of a step", "ms a step", "%"], *_times(found.parts, sum(found.parts.values()))],
        _kernel_cells(found),
    ]


def _times(of: dict[str, float], whole: float) -> Cells:
    return [[t(name), f"{1e3 * spent:,.2f}", f"{100 * spent / whole:.1f}"] for name, spent in of.items()]


def _kernel_cells(found: Profile) -> Cells:
    """The kernels or operators that take most of the time."""
    rows = []
    for row in found.anatomy.rows[:TOP]:
        floor = row.floor_percent
        figures = [f"{row.calls:g}", f"{1e3 * row.seconds:,.3f}", f"{100 * row.seconds / found.anatomy.seconds:.1f}"]
        rows.append([_short(row.name), t(row.group), *figures, "" if floor is None else f"{floor:.0f}"])
    name = "kernel" if found.anatomy.kind == "cuda" else "operator"
    return [[name, "group", "calls", "ms a step", "%", "% of floor"], *rows]


def _short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
