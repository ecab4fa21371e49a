"""Where the time of a run went: steps that survive, and everything else by its cause.

Everything is read from the metrics files: one of training per start of the run, and those of the supervisor, whose
incidents say how long a hang was waited for. Goodput is the time of the surviving steps over the time the run was up.
Steps that a later start or a rollback repeated are lost. The time between an end that nobody restarted and the next
start is not counted: nothing ran then.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import LARGEST_JSON_BYTES
from zero2all.track.listing import TRAIN_WRITER, metrics_files
from zero2all.track.rows import read_number, read_row
from zero2all.track.writer import METRICS_FOLDER

SUPERVISOR = "supervisor"
CAUSES = ("steps", "lost steps", "start", "load", "save", "validate", "hang wait", "restart", "other")
START_SECONDS = 2.0
"""How exactly the system knows when a process began."""
RESTART_SECONDS = 600.0
"""An incident and a start further apart than this are not one restart: somebody started the run again."""


@dataclass
class Goodput:
    """Seconds of a run by cause."""

    seconds: dict[str, float]
    total_seconds: float
    goodput: float
    """The share of surviving steps."""
    starts: int
    incidents: int
    steps: int
    """Surviving."""
    lost_steps: int
    data_wait_seconds: float
    """Part of the steps: time in which they waited for data."""
    stopped_seconds: float
    """Between an end and the next start by a person; not part of the total."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class _Start:
    """One metrics file of training."""

    begun: float
    resumed_from: int
    prepared: float = 0.0
    steps: list[tuple[int, float, float, float]] = field(default_factory=list)
    """(step, when it ended, its seconds, of which waiting for data); with `track.log_every_steps` some are missing."""
    saves: list[tuple[float, float]] = field(default_factory=list)
    validations: set[int] = field(default_factory=set)
    rollbacks: list[tuple[float, int]] = field(default_factory=list)
    first_row: float = 0.0
    last_row: float = 0.0


def run_goodput(run: Path) -> Goodput:
    """Add up the time of a run. BadInputError where it has no metrics."""
    files = metrics_files(run / METRICS_FOLDER)
    starts = [start for path, writer, _ in files if writer == TRAIN_WRITER and (start := _read_start(path))]
    if not starts:
        raise BadInputError(f"There are no metrics of training in {run}, so there is no time to add up.")
    starts.sort(key=lambda start: start.begun)
    incidents = sorted(
        (
            row
            for path, writer, _ in files
            if writer == SUPERVISOR
            for row in _rows(path)
            if row.get("kind") == "incident"
        ),
        key=lambda row: float(row["time"]),
    )
    seconds = dict.fromkeys(CAUSES, 0.0)
    data_wait = stopped = 0.0
    steps = lost_steps = 0
    for place, start in enumerate(starts):
        following = starts[place + 1] if place + 1 < len(starts) else None
        kept = min([each.resumed_from for each in starts[place + 1 :]], default=1 << 62)
        seconds["load"] += start.prepared
        seconds["start"] += max(0.0, start.first_row - start.begun - start.prepared)
        before, before_step = start.first_row, start.resumed_from
        for step, ended, took, waited in start.steps:
            went_back = [to for when, to in start.rollbacks if when >= ended]
            count = max(1, step - before_step)
            spent = min(max(0.0, ended - before), took * count)
            is_lost = step > min([kept, *went_back])
            seconds["lost steps" if is_lost else "steps"] += spent
            lost_steps, steps = lost_steps + count * is_lost, steps + count * (not is_lost)
            data_wait += 0.0 if is_lost else min(spent, waited * count)
            _add_pause(seconds, start, before, ended, max(0.0, ended - before - spent), before_step)
            before, before_step = max(before, ended), step
        _add_pause(seconds, start, before, start.last_row, max(0.0, start.last_row - before), before_step)
        if following is not None:
            stopped += _add_gap(seconds, start.last_row, following.begun, incidents)
    total = sum(seconds.values())
    share = seconds["steps"] / total if total else 0.0
    return Goodput(seconds, total, share, len(starts), len(incidents), steps, lost_steps, data_wait, stopped)


def _add_pause(seconds: dict[str, float], start: _Start, begin: float, end: float, pause: float, step: int) -> None:
    """Time between two steps: saves say how long they stopped the loop; the rest is a validation, if there was one."""
    saving = min(pause, sum(stall for when, stall in start.saves if begin <= when <= end))
    seconds["save"] += saving
    seconds["validate" if step in start.validations else "other"] += pause - saving


def _add_gap(seconds: dict[str, float], end: float, begin: float, incidents: list[dict[str, Any]]) -> float:
    """Time between two starts: the wait for a hang, the restart; returns what was neither."""
    gap = max(0.0, begin - end)
    here = [row for row in incidents if end <= float(row["time"]) <= begin + START_SECONDS]
    if not here or begin - float(here[-1]["time"]) > RESTART_SECONDS:
        return gap
    hung = sum(float(row["data"].get("waited_seconds") or 0.0) for row in here if row["data"].get("kind") == "hang")
    seconds["hang wait"] += min(gap, hung)
    seconds["restart"] += gap - min(gap, hung)
    return 0.0


def _read_start(path: Path) -> _Start | None:
    start: _Start | None = None
    for row in _rows(path):
        data, values, when = row.get("data", {}), row.get("values", {}), float(row["time"])
        kind = row.get("kind")
        if kind == "segment":
            begun = data.get("process_start")
            start = _Start(min(when, float(begun)) if begun else when, int(data.get("resumed_from") or 0))
            start.first_row = when
        if start is None:
            continue
        start.last_row = max(start.last_row, when)
        if kind == "prepared":
            start.prepared = float(data.get("seconds") or 0.0)
        elif kind in ("checkpoint", "checkpoint_failed"):
            start.saves.append((when, float(data.get("stall_seconds") or 0.0)))
        elif kind == "rollback":
            start.rollbacks.append((when, int(data["to_step"])))
        elif "time/step" in values:
            figures = (read_number(values["time/step"]) or 0.0, read_number(values.get("time/data_wait", 0.0)) or 0.0)
            start.steps.append((int(row["step"]), when, *figures))
        elif any(name.startswith("eval/") for name in values):
            start.validations.add(int(row["step"]))
    return start


def _rows(path: Path) -> list[dict[str, Any]]:
    with open(path, "rb") as file:
        return [row for line in file if len(line) < LARGEST_JSON_BYTES and (row := read_row(line)) is not None]
