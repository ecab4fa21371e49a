"""Any number of points as at most a few thousand bins that do not hide anything, smoothed before.

Each bin keeps the smallest, the largest and the mean value, so a spike of one step in a million is in the
`maximum` of its bin. Where the points fit, they are returned as they are, one per bin.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_POINTS = 50  # finite points without which a curve is drawn as it is
WIDTHS_PER_CURVE = 20  # a wider mean of a short and steep curve lies beside it
LARGEST_WIDTH = 1_000_000
KIND = "ema"
_START_WIDTHS = 8  # beyond so many widths a neighbour counts less than a thousandth
_MAX_START = 20_000
_GROWTH = 1e12

Floats = NDArray[np.float64]


def parse_smoothing(text: str) -> float | None:
    """Read the width in `ema:width`, or `none`; ValueError says what was expected."""
    if text == "none":
        return None
    kind, _, width = text.partition(":")
    try:
        if kind == KIND and 0 < float(width) <= LARGEST_WIDTH:
            return float(width)
    except ValueError:
        pass
    raise ValueError(
        f"is {text[:80]!r}; expected none, or {KIND} and a width in points up to {LARGEST_WIDTH:,}, for example "
        f"{KIND}:20"
    )


def width_for(values: NDArray[np.floating], wanted: float | None) -> float | None:
    """The width that is wanted, at most a twentieth of the curve `values`; None where it has too few points."""
    points = int(np.count_nonzero(np.isfinite(values)))
    return None if wanted is None or points < MIN_POINTS else min(wanted, points / WIDTHS_PER_CURVE)


def smooth(values: NDArray[np.floating], width: float) -> Floats:
    """The smoothed curve, at full resolution: as many points as `values`, NaN where nothing finite is near.

    An exponential mean that looks as far ahead as back: one that only looks back trails a falling loss. Values that are
    not finite weigh nothing, and the ends are debiased. `width` is its time constant, counted in points.
    """
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0).astype(np.float64, copy=False)
    if len(values) == 0 or width <= 1:
        return np.where(known, filled, np.nan)
    total = _two_sided(filled, width)
    if known.all():
        return total / _two_sided_weights(len(values), width)
    weight = _two_sided(known.astype(np.float64), width)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weight > 0, total / weight, np.nan)


def _two_sided(values: Floats, width: float) -> Floats:
    """Each value and its neighbours on both sides, each counting `decay` times the one before.

    Near the start it looks no further ahead than back, because a loss is steep there; at the end it looks back only.
    """
    decay, count = 1.0 - 1.0 / width, len(values)
    total = _exponential(values, width)
    first = min(count, int(np.ceil(_START_WIDTHS * width)), _MAX_START)
    if first < count:
        total[first:-1] += decay * _exponential(values[first:][::-1], width)[::-1][1:]
    powers = decay ** np.arange(1, first + 1)
    for place in range(1, first):
        reach = min(place, count - 1 - place)
        total[place] += powers[:reach] @ values[place + 1 : place + 1 + reach]
    return total


def _exponential(values: Floats, width: float) -> Floats:
    """y[i] = decay * y[i-1] + values[i]: a cumulative sum per block, which ends before 1 / decay**i loses precision."""
    decay = 1.0 - 1.0 / width
    count = len(values)
    length = int(np.clip(np.log(_GROWTH) / -np.log(decay), 1, count))
    blocks = -(-count // length)
    padded = np.zeros(blocks * length)
    padded[:count] = values
    powers = decay ** np.arange(length)
    inside = np.cumsum(padded.reshape(blocks, length) / powers, axis=1) * powers
    step, carried = decay * powers[-1], 0.0
    carries = np.empty(blocks)
    for block, last in enumerate(inside[:, -1].tolist()):
        carries[block] = carried
        carried = last + step * carried
    inside += carries[:, None] * (decay * powers)
    return inside.reshape(-1)[:count]


def _two_sided_weights(count: int, width: float) -> Floats:
    """What `_two_sided` makes of ones: it only changes near the ends."""
    reach = int(np.ceil(40 * width))
    ends = _two_sided(np.ones(min(count, 2 * reach)), width)
    if count <= 2 * reach:
        return ends
    return np.concatenate([ends[:reach], np.full(count - 2 * reach, 2.0 * width - 1.0), ends[reach:]])


@dataclass(frozen=True)
class Bins:
    """A curve ready to draw: columns of equal length in order of `x`; NaN in bins without a finite value."""

    x: NDArray[np.float64]  # the middle of the bin, or the point itself where there is one point per bin
    minimum: NDArray[np.float32]
    maximum: NDArray[np.float32]
    mean: NDArray[np.float32]
    smooth: NDArray[np.float32] | None  # the mean of the smoothed curve; None when no smoothing was asked for
    count: NDArray[np.uint32]  # finite values in the bin
    nonfinite: int  # NaN and infinities within the range, which no bin shows

    def __len__(self) -> int:
        return len(self.x)


def bins_of(
    x: Floats,
    values: Floats,
    smooth: Floats | None = None,
    low: float | None = None,
    high: float | None = None,
    count: int = 2000,
) -> Bins:
    """Put `values` at `x` (any order) into at most `count` bins between `low` and `high`, both included."""
    if count < 1:
        raise ValueError(f"count={count}: at least one bin is needed.")
    if len(x) and not (math.isfinite(x[0]) and (np.diff(x) >= 0).all()):  # also when x holds NaN
        order = np.argsort(x, kind="stable")[: int(np.isfinite(x).sum())]
        x, values = x[order], values[order]
        smooth = None if smooth is None else smooth[order]
    first = 0 if low is None else int(np.searchsorted(x, low, "left"))
    end = len(x) if high is None else int(np.searchsorted(x, high, "right"))
    x, values = x[first:end], values[first:end]
    smooth = None if smooth is None else smooth[first:end]
    known = np.isfinite(values)
    nonfinite = len(values) - int(np.count_nonzero(known))
    if len(x) <= count:
        raw = _narrow(np.where(known, values, np.nan))
        return Bins(
            x.astype(np.float64), raw, raw, raw, None if smooth is None else _narrow(smooth), known.astype(np.uint32),
            nonfinite,
        )  # fmt: skip
    left = float(x[0]) if low is None else low
    right = float(x[-1]) if high is None else high
    edges = np.linspace(left, right, count + 1)
    starts = np.searchsorted(x, edges[:-1], "left")
    starts[0] = 0  # rounding of the first edge must not lose the first point
    sizes = np.diff(np.append(starts, len(x)))
    filled = np.flatnonzero(sizes)
    cuts = starts[filled]
    if nonfinite:
        counts = np.add.reduceat(known, cuts, dtype=np.uint32)
        lowest = np.minimum.reduceat(np.where(known, values, np.inf), cuts)
        highest = np.maximum.reduceat(np.where(known, values, -np.inf), cuts)
        totals = np.add.reduceat(np.where(known, values, 0.0), cuts)
    else:
        counts = sizes[filled].astype(np.uint32)
        lowest, highest, totals = (how.reduceat(values, cuts) for how in (np.minimum, np.maximum, np.add))

    def spread(column: Floats, of: NDArray[np.uint32]) -> NDArray[np.float32]:
        whole = np.full(count, np.nan)
        whole[filled] = np.where(of > 0, column, np.nan)
        return _narrow(whole)

    all_counts = np.zeros(count, np.uint32)
    all_counts[filled] = counts
    means = totals / np.maximum(counts, 1)
    smoothed = None
    if smooth is not None:
        drawn = np.isfinite(smooth)
        weights = np.add.reduceat(drawn, cuts, dtype=np.uint32)
        smoothed = spread(np.add.reduceat(np.where(drawn, smooth, 0.0), cuts) / np.maximum(weights, 1), weights)
    return Bins(
        x=0.5 * (edges[:-1] + edges[1:]),
        minimum=spread(lowest, counts),
        maximum=spread(highest, counts),
        mean=spread(means, counts),
        smooth=smoothed,
        count=all_counts,
        nonfinite=nonfinite,
    )


def _narrow(values: Floats) -> NDArray[np.float32]:
    """As float32; a value too large for it becomes the largest float32, because infinity cannot be drawn."""
    limit = float(np.finfo(np.float32).max)
    return np.clip(values, -limit, limit).astype(np.float32)
