"""Curves as the page asks for them: a metric of a run along an axis, as a band of buckets with a smoothed line.

Beyond what `RunReader.buckets` gives, the page needs the end of a curve only (what came after the last point it has),
the difference to another run at equal x, and the parts that a later attempt took back. Smoothing is done at full
resolution, but only on the points that are asked for and on enough neighbours that no difference can be seen, so that
following a run of a million steps costs as little as following one of a thousand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError
from zero2all.track.buckets import bucket
from zero2all.track.reader import Axis, RunReader, Series
from zero2all.track.smoothing import KINDS, LARGEST_WIDTH, Smoothing, smooth, smoothing_of
from zero2all.track.wire import Curve

MAX_BUCKETS = 4_000
MAX_BAD_MARKS = 200
REACH = {"ema": 20.0, "window": 1.0, "gaussian": 8.0, "median": 2.0}
"""How many widths away a neighbour still matters to a smoothed point: e^-20 of an exponential mean."""

REDRAWN_WIDTHS = 3.0
MAX_REDRAWN = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Query:
    """One curve that is wanted."""

    run: str
    metric: str
    axis: Axis = "step"
    low: float | None = None
    high: float | None = None
    after: float | None = None
    """Only points beyond this; None for all."""
    count: int = 1000
    smoothing: Smoothing | None = None
    base: str | None = None
    """Id of the run whose values are taken off."""
    ghosts: bool = False
    """What later attempts took back, instead of the curve."""


def read_query(given: Any) -> Query:
    """A query out of a request; raises BadInputError for what is none."""
    if not isinstance(given, dict):
        raise BadInputError("A query is a JSON object with `run` and `metric`.")
    run, metric, axis, base = given.get("run"), given.get("metric"), given.get("axis", "step"), given.get("base")
    if not isinstance(run, str) or not isinstance(metric, str) or not isinstance(base, str | None):
        raise BadInputError("`run`, `metric` and `base` of a query are texts.")
    if axis not in get_args(Axis):
        raise BadInputError(f"`axis` is {axis!r}; use one of {', '.join(get_args(Axis))}.")
    numbers = {name: given.get(name) for name in ("low", "high", "after")}
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise BadInputError(f"`{name}` of a query is a number.")
    count = given.get("count", 1000)
    if type(count) is not int or not 1 <= count <= MAX_BUCKETS:
        raise BadInputError(f"`count` of a query is a whole number from 1 to {MAX_BUCKETS:,}.")
    smoothing = read_smoothing(given.get("smooth") or "none")
    return Query(
        run, metric, axis, **numbers, count=count, smoothing=smoothing, base=base, ghosts=bool(given.get("ghosts"))
    )


def read_smoothing(text: Any) -> Smoothing | None:
    """`kind:width`, or `none`."""
    if text == "none":
        return None
    try:
        kind, _, width = str(text).partition(":")
        return Smoothing(kind, float(width))  # type: ignore[arg-type]
    except ValueError:
        raise BadInputError(
            f"`smooth` is {str(text)[:80]!r}; use none, or a kind ({', '.join(KINDS)}) and a width in points, at most "
            f"{LARGEST_WIDTH:,}, as in ema:20."
        ) from None


def start_time(reader: RunReader) -> float:
    """When the run began: zero of the time axis."""
    times = [event.time for event in reader.events()[:1]]
    if not times:
        times = [float(reader.series(name).time[0]) for name in reader.metrics()[:1]]
    return min(times, default=0.0)


def along(reader: RunReader, points: Series, axis: Axis) -> Floats:
    """Where points stand on an axis of the page, whose time begins with the run; NaN where the axis does not reach."""
    if axis == "time":
        return points.time - start_time(reader)
    x = reader.along(points, axis)
    return x if len(x) == len(points) else np.full(len(points), np.nan)


def curve(reader: RunReader, query: Query, base: RunReader | None = None) -> Curve:
    """The answer to one query."""
    points = reader.ghosts(query.metric) if query.ghosts else reader.series(query.metric)
    x, values = _in_order(along(reader, points, query.axis), points.value)
    if base is not None:
        x, values = _difference(x, values, base, query)
    total = len(x)
    before = 0 if query.after is None else int(np.searchsorted(x, query.after, "right"))
    first = before if query.low is None else max(before, int(np.searchsorted(x, query.low, "left")))
    end = total if query.high is None else max(first, int(np.searchsorted(x, query.high, "right")))
    smoothing = smoothing_of(values, query.smoothing)
    smoothed = None if smoothing is None else _smooth_part(values, first, end, smoothing)
    part_x, part = x[first:end], values[first:end]
    low = None if query.after is not None else query.low
    buckets = bucket(part_x, part, smoothed, low, query.high, query.count)
    filled = buckets.count > 0
    columns: dict[str, NDArray[Any]] = {
        "x": buckets.x[filled],
        "low": buckets.minimum[filled],
        "high": buckets.maximum[filled],
        "mean": buckets.mean[filled],
    }
    if buckets.smooth is not None:
        columns["smooth"] = buckets.smooth[filled]
    if buckets.nonfinite:
        bad = part_x[~np.isfinite(part)]
        columns["bad"] = bad[:: max(1, len(bad) // MAX_BAD_MARKS)][:MAX_BAD_MARKS]
    if smoothing is not None and query.after is not None:  # what is new moves the smoothed line before it, too
        start = max(0, first - math.ceil(REDRAWN_WIDTHS * smoothing.width))
        chosen = slice(start, first, max(1, (first - start) // MAX_REDRAWN))
        columns["again_x"], columns["again"] = x[chosen], _smooth_part(values, start, first, smoothing)[:: chosen.step]
    facts = {
        "total": total,
        "before": before,
        "start": float(x[0]) if total else None,
        "end": float(x[-1]) if total else None,
        "nonfinite": buckets.nonfinite,
        "last": next((float(value) for value in part[::-1] if math.isfinite(value)), None),
    }
    return Curve(facts, columns)


def _in_order(x: Floats, values: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(x)
    if not known.all():
        x, values = x[known], values[known]
    if len(x) and not (np.diff(x) >= 0).all():  # by the clock, late evaluations come between the others
        order = np.argsort(x, kind="stable")
        x, values = x[order], values[order]
    return x, values


def _difference(x: Floats, values: Floats, base: RunReader, query: Query) -> tuple[Floats, Floats]:
    """This run minus the other where both have values, the other drawn straight between its points."""
    points = base.series(query.metric)
    base_x, base_values = _in_order(along(base, points, query.axis), points.value)
    known = np.isfinite(base_values)
    base_x, base_values = base_x[known], base_values[known]
    if not len(base_x):
        return x[:0], values[:0]
    both = (x >= base_x[0]) & (x <= base_x[-1])
    return x[both], values[both] - np.interp(x[both], base_x, base_values)


def _smooth_part(values: Floats, first: int, end: int, how: Smoothing) -> Floats:
    reach = math.ceil(REACH[how.kind] * how.width)
    start = max(0, first - reach)
    stop = min(len(values), end + reach)
    return smooth(values[start:stop], how)[first - start : end - start]
