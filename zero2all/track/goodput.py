"""The account of a run's time: steps that survive, and everything else by its cause.

`z2a perf explain` reads this one. It comes from the run's metrics: the rows and
events of training, one file per start of the run, and the incidents of the supervisor, which say how long a hang was
waited for. Goodput is the time of the surviving steps over the time the run was up. Steps that a later start or a
rollback repeated are lost. The time between an end that nobody restarted and the next start is not counted: a person
had stopped the run, and nothing ran then.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.track.listing import TRAIN_WRITER
from zero2all.track.reader import Event, RunReader, Series
from zero2all.track.series import concatenate
from zero2all.track.writer import END_KIND, SEGMENT_KIND

SUPERVISOR = "supervisor"
CAUSES = ("steps", "lost steps", "start", "load", "save", "validate", "hang wait", "restart", "other")
CLEAN_ENDS = ("done", "preempted")
"""Ends that were meant: the last step, or a signal, after which the run was saved."""
START_SECONDS = 2.0
"""How exactly the system knows when a process began."""
RESTART_SECONDS = 600.0
"""An incident and a start further apart than this are not one restart: somebody started the run again."""


@dataclass
class Goodput:
    """Seconds of a run by cause."""

    seconds: dict[str, float]
    starts: int
    interruptions: int
    """Starts after an end that nobody meant."""
    incidents: int
    steps: int
    """Surviving."""
    lost_steps: int
    data_wait_seconds: float
    """Part of the steps: time in which they waited for data."""
    stopped_seconds: float
    """Between an end and the next start by a person; not part of the total."""

    @property
    def total_seconds(self) -> float:
        """Time in which the run was up, or was being brought up again."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of surviving steps."""
        return self.seconds["steps"] / self.total_seconds if self.total_seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "total_seconds": self.total_seconds, "goodput": self.goodput}


@dataclass
class _Start:
    """One start of training."""

    begun: float  # its process
    wrote: float  # its first line
    resumed_from: int
    rows: Series
    is_lost: NDArray[np.bool_]
    waited: NDArray[np.float64]  # for data, of each row
    validated: NDArray[np.float64]  # when validations were written
    events: list[Event]

    @property
    def last(self) -> float:
        """Its last sign of life."""
        said = [event.time for event in self.events[-1:]]
        return max([self.wrote, *self.rows.time[-1:].tolist(), *self.validated[-1:].tolist(), *said])


def run_goodput(reader: RunReader) -> Goodput:
    """Add up the time of a run; of one without metrics of training nothing."""
    events = sorted(reader.events(), key=lambda event: event.time)
    incidents = [event for event in events if event.writer == SUPERVISOR and event.kind == "incident"]
    evals = [name for name in reader.metrics() if name.startswith("eval/")]
    validated = np.unique(concatenate([reader.written(name, TRAIN_WRITER) for name in evals]).time)
    starts = _starts(reader, [event for event in events if event.writer == TRAIN_WRITER], validated)
    found = Goodput(dict.fromkeys(CAUSES, 0.0), len(starts), 0, len(incidents), 0, 0, 0.0, 0.0)
    for start in starts:
        _add_start(found, start)
    for start, following in pairwise(starts):
        found.stopped_seconds += _add_gap(found.seconds, start.last, following.begun, incidents)
        ends = [event.data.get("reason") for event in start.events if event.kind == END_KIND]
        found.interruptions += not ends or ends[-1] not in CLEAN_ENDS
    return found


def number_of(value: Any) -> float:
    """A number of an event; 0 where there is none."""
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else 0.0


def _starts(reader: RunReader, events: list[Event], validated: NDArray[np.float64]) -> list[_Start]:
    """The starts of training by the clock, each with its rows and events."""
    kept, lost, waits = reader.series("time/step"), reader.ghosts("time/step"), reader.series("time/data_wait")
    rows = concatenate([kept, lost])
    order = np.argsort(rows.time, kind="stable")
    rows, is_lost = rows.take(order), order >= len(kept)
    waited = np.where(np.isin(rows.step, waits.step) & ~is_lost, 1.0, 0.0)
    if len(waits):
        waited *= _finite(waits.value[np.searchsorted(waits.step, rows.step).clip(max=len(waits) - 1)])
    headers = [event for event in events if event.kind == SEGMENT_KIND]
    if not headers and len(rows):  # metrics of an older format, or without their first line
        begun = float(rows.time[0] - rows.value[0])
        headers = [Event(0, begun, SEGMENT_KIND, {"resumed_from": int(rows.step[0]) - 1}, TRAIN_WRITER, 1)]
    borders = [-np.inf, *(event.time for event in headers[1:]), np.inf]
    found = []
    for header, (low, high) in zip(headers, pairwise(borders), strict=False):
        begun = number_of(header.data.get("process_start")) or header.time
        resumed_from = int(number_of(header.data.get("resumed_from")))
        here = slice(*np.searchsorted(rows.time, [low, high]))
        parts = (rows.take(here), is_lost[here], waited[here])
        seen = validated[slice(*np.searchsorted(validated, [low, high]))]
        told = [event for event in events if low <= event.time < high]
        found.append(_Start(min(begun, header.time), header.time, resumed_from, *parts, seen, told))
    return found


def _add_start(found: Goodput, start: _Start) -> None:
    """The time of one start until its last sign of life. A row may stand for several steps."""
    seconds, rows = found.seconds, start.rows
    prepared = sum(number_of(event.data.get("seconds")) for event in start.events if event.kind == "prepared")
    seconds["load"] += prepared
    seconds["start"] += max(0.0, start.wrote - start.begun - prepared)
    counts = np.diff(rows.step, prepend=start.resumed_from)
    usual = int(np.median(counts[counts > 0])) if (counts > 0).any() else 1
    counts = np.where(counts > 0, counts, usual)  # behind a rollback
    borders = np.maximum.accumulate(np.concatenate([[start.wrote], rows.time, [start.last]]))
    spans = np.diff(borders)  # before each row and after the last one
    spent = np.minimum(spans[:-1], _finite(rows.value) * counts)
    seconds["steps"] += float(spent[~start.is_lost].sum())
    seconds["lost steps"] += float(spent[start.is_lost].sum())
    found.steps += int(counts[~start.is_lost].sum())
    found.lost_steps += int(counts[start.is_lost].sum())
    found.data_wait_seconds += float(np.minimum(spent, start.waited * counts).sum())
    # What is left of a span is a pause: saves say how long they stopped the loop, the rest is a validation, if there
    # was one, which is written before the next step begins.
    pauses = spans - np.append(spent, 0.0)
    saving = np.minimum(pauses, _stalls(start, len(pauses)))
    has_validation = np.diff(np.searchsorted(start.validated, borders, side="right")) > 0
    seconds["save"] += float(saving.sum())
    seconds["validate"] += float((pauses - saving)[has_validation].sum())
    seconds["other"] += float((pauses - saving)[~has_validation].sum())


def _stalls(start: _Start, pauses: int) -> NDArray[np.float64]:
    """Seconds that saves stopped the loop in each pause: the one behind the step that was saved, which may be some
    steps before the save was complete and reported."""
    found = np.zeros(pauses)
    for event in start.events:
        if event.kind in ("checkpoint", "checkpoint_failed"):
            before = start.rows.step[: np.searchsorted(start.rows.time, event.time)]
            own = np.flatnonzero(before <= event.step)
            found[own[-1] + 1 if len(own) else 0] += number_of(event.data.get("stall_seconds"))
    return found


def _add_gap(seconds: dict[str, float], end: float, begin: float, incidents: list[Event]) -> float:
    """Time between two starts: the wait for a hang, the restart; returns what was neither."""
    gap = max(0.0, begin - end)
    here = [event for event in incidents if end <= event.time <= begin + START_SECONDS]
    if not here or begin - here[-1].time > RESTART_SECONDS:
        return gap
    hung = sum(number_of(event.data.get("waited_seconds")) for event in here if event.data.get("kind") == "hang")
    seconds["hang wait"] += min(gap, hung)
    seconds["restart"] += gap - min(gap, hung)
    return 0.0


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, 0.0)
