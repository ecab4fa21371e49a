"""Curves as the page asks for them: a metric of a run along an axis, as a band of bins with a smoothed line.

Beyond what `RunReader.bins` gives, the page needs the end of a curve only (what came after the last point it has),
the difference to another run at equal x, and the parts that a later attempt took back. Smoothing is done at full
resolution, but only on the points that are asked for and on enough neighbours that no difference can be seen, so that
following a run of a million steps costs as little as following one of a thousand.

Curves travel as one small JSON heading and the columns as raw little-endian numbers:

    uint32 length of the heading | heading (JSON, padded with spaces) | columns, each beginning at a multiple of 8

The heading has one entry per curve: its facts, and `columns`, which lists the name, type and length of each column in
their order. x is float64 (tokens and times need it), all else float32. A band of 1,600 bins with its smoothed line
takes 38 KB, whatever the length of the run, and the page uses it without parsing.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.schema import Problem, Range, UnknownName, build
from zero2all.track.bins import bins_of, parse_smoothing, smooth, width_for
from zero2all.track.reader import Axis, RunReader, Series

MAX_BINS = 4_000
MAX_BAD_MARKS = 200
REACH = 20.0  # how many widths away a neighbour still matters

ALIGNMENT = 8
REDRAWN_WIDTHS = 3.0
MAX_REDRAWN = 200

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One curve as it is sent: JSON facts and columns of numbers."""

    facts: dict[str, Any]
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Query:
    """One curve that is wanted."""

    run: str
    metric: str
    axis: Axis = "step"
    low: float | None = None
    high: float | None = None
    after: float | None = None  # only points beyond this; None for all
    count: Annotated[int, Range(minimum=1, maximum=MAX_BINS)] = 1000
    smooth: str | None = None  # as `parse_smoothing` reads it; None: not at all
    base: str | None = None  # id of the run whose values are subtracted
    ghosts: bool = False  # what later attempts took back, instead of the curve

    @cached_property
    def smoothing(self) -> float | None:
        """The width of the mean in points; ValueError when `smooth` cannot be read."""
        return parse_smoothing(self.smooth or "none")


def read_query(given: Any) -> Query:
    """A query from a request; BadInputError if it is not valid."""
    problems: list[Problem] = []
    query: Query = build(Query, given, "query", problems)
    problems = [problem for problem in problems if not isinstance(problem, UnknownName)]
    if isinstance(given, dict):  # a config may have numbers as text, a query may not
        numbers = {name: given.get(name) for name in ("low", "high", "after", "count")}
        problems += [Problem(name, value, "a number") for name, value in numbers.items() if isinstance(value, str)]
    if query is None or problems:
        raise BadInputError(" ".join(map(str, problems)))
    try:
        _ = query.smoothing
    except ValueError as error:
        raise BadInputError(f"`smooth` {error}.") from None
    return query


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
    return reader.along(points, axis)


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
    width = width_for(values, query.smoothing)
    smoothed = None if width is None else _smooth_part(values, first, end, width)
    part_x, part = x[first:end], values[first:end]
    low = None if query.after is not None else query.low
    bins = bins_of(part_x, part, smoothed, low, query.high, query.count)
    filled = bins.count > 0
    drawn: dict[str, NDArray[Any] | None] = {
        "x": bins.x,
        "low": bins.minimum,
        "high": bins.maximum,
        "mean": bins.mean,
        "smooth": bins.smooth,
    }
    columns: dict[str, NDArray[Any]] = {name: each[filled] for name, each in drawn.items() if each is not None}
    if bins.nonfinite:
        bad = part_x[~np.isfinite(part)]
        columns["bad"] = bad[:: max(1, len(bad) // MAX_BAD_MARKS)][:MAX_BAD_MARKS]
    if width is not None and query.after is not None:  # what is new moves the smoothed line before it, too
        start = max(0, first - math.ceil(REDRAWN_WIDTHS * width))
        chosen = slice(start, first, max(1, (first - start) // MAX_REDRAWN))
        columns["again_x"], columns["again"] = x[chosen], _smooth_part(values, start, first, width)[:: chosen.step]
    facts = {
        "total": total,
        "before": before,
        "start": float(x[0]) if total else None,
        "end": float(x[-1]) if total else None,
        "nonfinite": bins.nonfinite,
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


def _smooth_part(values: Floats, first: int, end: int, width: float) -> Floats:
    reach = math.ceil(REACH * width)
    start = max(0, first - reach)
    stop = min(len(values), end + reach)
    return smooth(values[start:stop], width)[first - start : end - start]


def pack_curves(curves: Sequence[Curve]) -> bytes:
    """The answer to a request for these curves."""
    heading: list[dict[str, Any]] = []
    blocks: list[bytes] = []
    for curve in curves:
        columns = []
        for name, values in curve.columns.items():
            kind = "f64" if values.dtype == np.float64 else "f32"
            raw = np.ascontiguousarray(values, dtype="<f8" if kind == "f64" else "<f4").tobytes()
            columns.append([name, kind, len(values)])
            blocks.append(raw + bytes(-len(raw) % ALIGNMENT))
        heading.append({**curve.facts, "columns": columns})
    text = jsonio.dumps_line(heading).rstrip(b"\n")
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    return struct.pack("<I", len(text)) + text + b"".join(blocks)


def unpack_curves(answer: bytes) -> list[Curve]:
    """The other direction, for Python programs that talk to a board."""
    (length,) = struct.unpack_from("<I", answer)
    offset = 4 + length
    curves = []
    for entry in jsonio.loads(answer[4:offset]):
        columns: dict[str, NDArray[Any]] = {}
        for name, kind, count in entry.pop("columns"):
            dtype = np.dtype("<f8" if kind == "f64" else "<f4")
            columns[name] = np.frombuffer(answer, dtype, count, offset)
            offset += count * dtype.itemsize + (-count * dtype.itemsize % ALIGNMENT)
        curves.append(Curve(entry, columns))
    return curves
