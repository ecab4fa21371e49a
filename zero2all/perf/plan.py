"""`z2a perf plan`: the layout of a run that is predicted to be fastest, why, and a config for it.

All layouts are predicted at once (`zero2all.limits.layouts`). Then the ranking is walked from the top with the full
models (`predict_step`, `estimate_memory`) and the checks that a run makes at its start (`zero2all.parallel.check`),
until enough are found. On one GPU the best few can be measured: each runs in a process of its own
(`zero2all.perf.row`).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import say
from zero2all.config import RunConfig, config_yaml
from zero2all.limits.layouts import LayoutTimes, enumerate_layouts, predict_layouts, settings_of
from zero2all.limits.machine import Machine
from zero2all.limits.memory import ALLOWANCE, GIB, MemorySettings, estimate_memory
from zero2all.limits.step import StepTime, predict_step
from zero2all.ops.registry import footprints, resolve
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Mesh
from zero2all.perf.batch import BatchShape
from zero2all.perf.child import run_child
from zero2all.perf.memory import operators_on_a_gpu
from zero2all.perf.variants import ANCHOR
from zero2all.train.micro_batch import memory_settings, stage_of
from zero2all.train.setup import op_context
from zero2all.train.state import DTYPES

MEASURED_TOKENS = 1 << 17
"""Of a measured iteration, about: a whole step of a large batch takes long and says no more."""
LOOKED_AT = 2000
"""Layouts of the ranking that are checked in full at most."""
TRIED = ("tensor", "pipeline", "context", "expert", "zero", "samples", "recompute", "schedule")
Row = Mapping[str, int | str]


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its prediction by the full model."""

    number: int  # among all layouts
    row: Row
    time: StepTime
    memory: float  # bytes of the fullest process
    measured: dict[str, Any] = field(default_factory=dict)  # by --measure

    @property
    def tokens_per_second(self) -> float:
        """Predicted, of all processes."""
        return self.time.tokens_per_second


@dataclass(frozen=True)
class LayoutPlan:
    """What `plan_layouts` found."""

    config: RunConfig
    machine: Machine
    gpus: int
    room: float  # bytes of a device that a layout may use
    candidates: tuple[Candidate, ...]  # the fastest first
    considered: int
    fitting: int
    rejected: dict[str, int]  # rule -> layouts
    alternatives: tuple[str, ...]  # what the best with another value of one column costs, in words


def plan_layouts(config: RunConfig, gpus: int, machine: Machine, wanted: int = 10) -> LayoutPlan:
    """The fastest layouts of a config on so many GPUs of a machine."""
    if gpus > 1 and machine.most_ranks < gpus:
        raise UsageError(
            f"{machine.name} has links for {machine.most_ranks} GPUs, but --gpus is {gpus}. Name a cluster with "
            f"--cluster."
        )
    settings = plan_settings(config)
    rows, model = config.samples_per_step, config.model
    layouts, rejected = enumerate_layouts(model, gpus, rows, config.data.seq_len, machine.gpus_per_node)
    if not len(layouts):
        raise _no_layout(gpus, rows, rejected)
    times = predict_layouts(model, settings, machine, layouts)
    room = machine.memory_bytes * (1 - ALLOWANCE)
    fits = times.memory <= room
    order = np.argsort(np.where(fits, times.seconds, np.inf), kind="stable")[: min(LOOKED_AT, int(fits.sum()))]
    found: list[Candidate] = []
    refused = 0
    for number in order:
        candidate = full_candidate(config, settings, machine, int(number), layouts.row(int(number)))
        if candidate is None or candidate.memory > room:
            refused += 1
        else:
            found.append(candidate)
        if len(found) >= 3 * wanted:
            break
    rule = (
        f"does not fit into {room / GIB:.1f} GiB: the {machine.memory_bytes / GIB:.1f} GiB of {machine.name} less "
        f"{ALLOWANCE:.0%} for context, NCCL and gaps"
    )
    rejected[rule] = int((~fits).sum()) + refused
    if not found:
        raise _no_layout(gpus, rows, rejected)
    found.sort(key=lambda one: one.time.estimate)
    alternatives = explain_alternatives(times, fits, found[0].number)
    return LayoutPlan(
        config, machine, gpus, room, tuple(found[:wanted]), len(layouts), int(fits.sum()), rejected, alternatives
    )


def _no_layout(gpus: int, rows: int, rejected: Mapping[str, int]) -> BadInputError:
    counts = "\n".join(f"  {count:,}: {rule}" for rule, count in sorted(rejected.items(), key=lambda one: -one[1]))
    return BadInputError(
        f"No layout of {rows} samples per step runs on {gpus} GPUs. Rules that layouts break:\n{counts}\n"
        f"Use more GPUs, a smaller model or data.seq_len, another train.tokens_per_step, or an optimizer with less "
        f"state."
    )


def plan_settings(config: RunConfig) -> MemorySettings:
    """What all layouts of a config have in common, with the operators that a GPU takes."""
    alone = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **ALONE))
    ops = resolve(dataclasses.replace(config.ops, strict=False), op_context(alone, "cpu", DTYPES["float32"]))
    settings = memory_settings(alone, ops, Mesh(MeshSizes()), 1)
    return dataclasses.replace(settings, operators=footprints(operators_on_a_gpu(config)))


ALONE: dict[str, Any] = {
    **dict.fromkeys(("replicate", "shard", "pipeline", "context", "tensor", "expert", "chunks"), 1),
    "schedule": "1f1b",
    "zero": 0,
}


def config_of(config: RunConfig, row: Row) -> RunConfig:
    """The config of a layout."""
    axes = ("replicate", "shard", "pipeline", "context", "tensor", "expert", "chunks", "zero")
    spread: dict[str, Any] = {**{name: int(row[name]) for name in axes}, "schedule": row["schedule"]}
    parallel = dataclasses.replace(config.parallel, **spread)
    passes: dict[str, Any] = {"micro_batch_samples": int(row["samples"]), "recompute": row["recompute"]}
    train = dataclasses.replace(config.train, **passes)
    return dataclasses.replace(config, parallel=parallel, train=train)


def full_candidate(
    config: RunConfig, settings: MemorySettings, machine: Machine, number: int, row: Row
) -> Candidate | None:
    """The layout by the full models; None where the checks of a run refuse it."""
    spread, here = config_of(config, row), settings_of(settings, row, config.model)
    sizes = MeshSizes(*(int(row[name]) for name in ("pipeline", "replicate", "shard", "context", "tensor", "expert")))
    if spread_problems(spread, sizes):
        return None
    memory = 0.0
    for stage in range(sizes.pipeline):
        mesh = Mesh(sizes, stage * sizes.processes // sizes.pipeline)
        held = dataclasses.replace(here, stage=stage_of(spread, mesh, here.passes))
        memory = max(memory, estimate_memory(config.model, held).total)
    captured = max(sizes.pipeline, sizes.context, sizes.tensor, sizes.expert) == 1 and int(row["zero"]) < 2
    time = predict_step(
        *(config.model, here, machine, str(row["schedule"]), int(row["chunks"])),
        cuda_graph=captured and not config.model.moe.experts and config.train.cuda_graph != "off",
    )
    return Candidate(number, row, time, memory)


# ---- why -------------------------------------------------------------------------------------------------------------


def explain_alternatives(times: LayoutTimes, fits: np.ndarray[Any, Any], chosen: int) -> tuple[str, ...]:
    """For each column: the best layout that has another value there, how much slower it is, and which part of the
    step grows most; or that none with that value fits."""
    layouts, found = times.layouts, []
    for name in TRIED:
        values = sorted(set(layouts[name].tolist()) - {int(layouts[name][chosen])})
        for value in values:
            which = np.flatnonzero((layouts[name] == value) & fits)
            words = f"{name} {layouts.row(int(np.flatnonzero(layouts[name] == value)[0]))[name]}"
            if not len(which):
                found.append(t(f"{words}: no layout with it fits"))
                continue
            other = int(which[np.argmin(times.seconds[which])])
            slower = max(0.0, times.seconds[other] / times.seconds[chosen] - 1)  # the full model chose otherwise
            grows = {part: float(column[other] - column[chosen]) for part, column in times.parts.items()}
            part = max(grows, key=lambda one: grows[one])
            why = f"{t(part)} +{1e3 * grows[part]:.1f} ms"
            found.append(t(f"{words}: its best layout is {slower:.1%} slower ({why})"))
    return tuple(found)


def compare(first: Candidate, second: Candidate) -> str:
    """What makes the first faster, in words."""
    names = dict.fromkeys(part.name for one in (first, second) for part in one.time.parts)
    gains = {name: second.time.seconds(name) - first.time.seconds(name) for name in names}
    largest = sorted(gains, key=lambda name: -abs(gains[name]))[:2]
    terms = ", ".join(f"{t(name)} {-1e3 * gains[name]:+.1f} ms" for name in largest)
    return t(f"{second.time.estimate / first.time.estimate - 1:.1%} faster: {terms}")


# ---- measure and write -----------------------------------------------------------------------------------------------


def measure_candidates(plan: LayoutPlan, count: int, seconds: float, timeout: float) -> LayoutPlan:
    """The best few on the GPU of this machine, each in its own process, on random tokens."""
    if plan.gpus != 1:
        raise UsageError(
            f"--measure runs steps in one process on one GPU, but --gpus is {plan.gpus}. Write the config of the best "
            f"with --output and run `z2a train` for a few steps instead."
        )
    measured: list[Candidate] = []
    for candidate in plan.candidates[:count]:
        config = config_of(plan.config, candidate.row)
        samples, passes = int(candidate.row["samples"]), int(candidate.row["passes"])
        cut = max(1, MEASURED_TOKENS // (samples * config.data.seq_len))
        batch = BatchShape(samples, config.data.seq_len, min(passes, cut))
        found = _measure(config, batch, seconds, timeout)
        speed = found.get("tokens_per_second")
        what = found.get("status", "") if speed is None else f"{speed:,.0f} tokens/s"
        name = f"{samples} x {passes}, recompute {candidate.row['recompute']}"
        say(f"plan: {len(measured) + 1} of {min(count, len(plan.candidates))}: {name}: {what}")
        measured.append(dataclasses.replace(candidate, measured=found))
    rest = plan.candidates[count:]
    ranked = sorted(measured, key=lambda one: -one.measured.get("tokens_per_second", 0.0))
    return dataclasses.replace(plan, candidates=(*ranked, *rest))


def _measure(config: RunConfig, batch: BatchShape, seconds: float, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="z2a-plan-") as folder:
        source = Path(folder) / "config.yaml"
        source.write_text(config_yaml(config), encoding="utf-8")
        return run_child("row", [source, "--row", ANCHOR, "--batch", batch, "--seconds", seconds], [], timeout)


def plan_json(plan: LayoutPlan) -> dict[str, Any]:
    """The plan as JSON values: seconds, bytes, tokens/s of all GPUs."""
    return {
        "machine": plan.machine.name,
        "source": plan.machine.source,
        "gpus": plan.gpus,
        "room_bytes": plan.room,
        "layouts": plan.considered,
        "fitting": plan.fitting,
        "rejected": plan.rejected,
        "alternatives": list(plan.alternatives),
        "candidates": [
            {
                **candidate.row,
                "seconds": candidate.time.estimate,
                "lower": candidate.time.lower,
                "upper": candidate.time.upper,
                "interval_90": list(candidate.time.interval),
                "tokens_per_second": candidate.tokens_per_second,
                "mfu": candidate.time.mfu,
                "memory_bytes": candidate.memory,
                "parts": [dataclasses.asdict(part) for part in candidate.time.parts],
                "measured": candidate.measured or None,
            }
            for candidate in plan.candidates
        ],
    }


def plan_cells(candidates: Sequence[Candidate]) -> list[list[str]]:
    """A table of layouts."""
    heading = ["", "tp", "pp", "cp", "ep", "zero", "shard x replicate", "samples x passes", "recompute", "schedule"]
    heading += ["step s", "90 %", "tokens/s", "MFU", "GiB"]
    with_measured = any(one.measured for one in candidates)
    rows = [heading + (["measured tokens/s"] if with_measured else [])]
    for number, one in enumerate(candidates, 1):
        row, time = one.row, one.time
        schedule = f"{row['schedule']} x{row['chunks']}" if int(row["chunks"]) > 1 else str(row["schedule"])
        cells = [
            *(str(number), str(row["tensor"]), str(row["pipeline"]), str(row["context"]), str(row["expert"])),
            *(str(row["zero"]), f"{row['shard']} x {row['replicate']}", f"{row['samples']} x {row['passes']}"),
            *(str(row["recompute"]), schedule if int(row["pipeline"]) > 1 else "-"),
            *(f"{time.estimate:.4g}", f"{time.interval[0]:.4g} - {time.interval[1]:.4g}"),
            *(f"{time.tokens_per_second:,.0f}", f"{time.mfu['causal']:.1%}", f"{one.memory / GIB:.1f}"),
        ]
        if with_measured:
            cells.append(f"{one.measured['tokens_per_second']:,.0f}" if "tokens_per_second" in one.measured else "-")
        rows.append(cells)
    return rows
