"""What the page knows about a run beside its curves: how it stands, what happened, what it generated.

Events are sent short; everything about one of them is sent when it is opened. Spikes that the trainer recorded come
with the losses of the channels and the documents of the batch; the board also looks for spikes in the loss itself, so
that runs of other programs have them marked too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.track.curves import along, start_time
from zero2all.track.library import OpenRun, live_facts
from zero2all.track.reader import Axis, Event, RunReader, Series, Spike

RICH_KINDS = ("text", "image", "histogram")
MAX_MARKS = 3_000
MAX_FOUND_SPIKES = 300
MAX_AROUND = 40
MAX_HISTOGRAMS = 120
SPIKE_METRIC = "loss"
FOUND = "found-"
"""The name of a spike the board found: this and its step."""


def run_facts(run: OpenRun) -> dict[str, Any]:
    """All about a run that is needed to lay out its page."""
    reader = run.reader
    header = next((event.data for event in reversed(reader.events()) if event.kind == "segment"), {})
    rich: dict[str, dict[str, int]] = {}
    for event in reader.events():
        if event.kind in RICH_KINDS:
            names = rich.setdefault(event.kind, {})
            name = str(event.data.get("name", ""))
            names[name] = names.get(name, 0) + 1
    return {
        "id": run.run_id,
        "name": run.run_id.partition("/")[2],
        "version": reader.version,
        **live_facts(run),
        "names": reader.metrics(),
        "start": start_time(reader),
        "host": header.get("host"),
        "rich": rich,
        "skipped_lines": reader.skipped_lines,
        "problems": reader.problems,
    }


# ---- events ----


def marks(reader: RunReader, axis: Axis) -> dict[str, Any]:
    """What happened, as marks on the axis: the latest MAX_MARKS, and how many were left out."""
    events = [(number, event) for number, event in enumerate(reader.events()) if event.kind not in RICH_KINDS]
    kept = events[-MAX_MARKS:]
    known = {event.step for _, event in kept if event.kind == "spike"}
    spikes = [spike for spike in reader.spikes(SPIKE_METRIC) if spike.step not in known]
    spikes = sorted(spikes, key=_height, reverse=True)[:MAX_FOUND_SPIKES]
    found = [{"i": str(number), **_mark(event)} for number, event in kept]
    found += [_spike_mark(spike) for spike in spikes]
    for mark, x in zip(found, _places(reader, found, axis), strict=True):
        mark["x"] = x
    found = [mark for mark in found if mark["x"] is not None]
    found.sort(key=lambda mark: mark["x"])
    return {"marks": found, "total": len(reader.events()), "left_out": len(events) - len(kept)}


def event_facts(reader: RunReader, name: str) -> dict[str, Any]:
    """Everything about one event, and the metrics at its step."""
    if name.startswith(FOUND):
        step = name.removeprefix(FOUND)
        spike = next((each for each in reader.spikes(SPIKE_METRIC) if str(each.step) == step), None)
        if spike is None:
            raise BadInputError(f"There is no spike at step {step}.")
        facts = {**_spike_mark(spike), "data": {"metric": SPIKE_METRIC, **_numbers(spike)}}
    else:
        events = reader.events()
        if not name.isdecimal() or int(name) >= len(events):
            raise BadInputError(f"There is no event {name}.")
        event = events[int(name)]
        facts = {"i": name, **_mark(event), "data": event.data}
    return {**facts, "around": _around(reader, facts["step"])}


def _mark(event: Event) -> dict[str, Any]:
    mark: dict[str, Any] = {
        "kind": event.kind,
        "step": event.step,
        "time": event.time,
        "writer": event.writer,
        "attempt": event.attempt,
    }
    if event.kind == "spike":
        mark |= {"metric": str(event.data.get("metric", SPIKE_METRIC)), "value": _finite(event.data.get("value"))}
    for name in ("reason", "message", "name", "stage"):
        if isinstance(event.data.get(name), str):
            mark["note"] = event.data[name][:200]
            break
    return mark


def _spike_mark(spike: Spike) -> dict[str, Any]:
    return {
        "i": f"{FOUND}{spike.step}",
        "kind": "spike",
        "step": spike.step,
        "time": spike.time,
        "metric": SPIKE_METRIC,
        "value": _finite(spike.value),
        "found": True,
    }


def _numbers(spike: Spike) -> dict[str, float | None]:
    return {name: _finite(getattr(spike, name)) for name in ("value", "mean", "sigma", "median", "mad")}


def _height(spike: Spike) -> float:
    return (spike.value - spike.mean) / spike.sigma if spike.sigma > 0 else math.inf


def _places(reader: RunReader, found: Sequence[dict[str, Any]], axis: Axis) -> list[float | None]:
    """Where the steps of some marks are on an axis."""
    if axis == "step":
        return [float(mark["step"]) for mark in found]
    if axis == "time":
        start = start_time(reader)
        return [mark["time"] - start for mark in found]
    points = _longest(reader)
    x = along(reader, points, axis)
    known = np.isfinite(x)
    if not known.any():
        return [None] * len(found)
    steps = np.array([mark["step"] for mark in found], dtype=np.float64)
    return [float(place) for place in np.interp(steps, points.step[known], x[known])]


def _longest(reader: RunReader) -> Series:
    names = reader.metrics()
    return reader.series(SPIKE_METRIC if SPIKE_METRIC in names else names[0] if names else SPIKE_METRIC)


def _around(reader: RunReader, step: int) -> dict[str, float | None]:
    names = [name for name in reader.metrics() if not name.startswith(("gpu/", "host/", "eval/"))]
    names.sort(key=lambda name: (name.count("/"), not name.startswith("loss"), name))
    values: dict[str, float | None] = {}
    for name in names[: 4 * MAX_AROUND]:
        points = reader.series(name)
        place = int(np.searchsorted(points.step, step))
        if place < len(points) and points.step[place] == step:
            values[name] = _finite(float(points.value[place]))
        if len(values) >= MAX_AROUND:
            break
    return values


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# ---- what was generated ----


def rich_values(reader: RunReader, kind: str, name: str) -> list[dict[str, Any]]:
    """The text samples, images or histograms of one name, in order of steps; texts are fetched one by one."""
    found = [
        (number, event)
        for number, event in enumerate(reader.events())
        if event.kind == kind and str(event.data.get("name", "")) == name
    ]
    found.sort(key=lambda each: each[1].step)
    if kind == "histogram" and len(found) > MAX_HISTOGRAMS:
        chosen = np.linspace(0, len(found) - 1, MAX_HISTOGRAMS).round().astype(int)
        found = [found[place] for place in chosen]
    hidden = ("text",) if kind == "text" else ()
    return [
        {"i": str(number), "step": event.step, "time": event.time}
        | {key: value for key, value in event.data.items() if key not in ("name", *hidden)}
        for number, event in found
    ]
