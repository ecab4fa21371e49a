"""Any number of points as at most a few thousand bins that do not hide anything.

Each bin keeps the smallest, the largest and the mean value, so a spike of one step in a million is in the
`maximum` of its bin. Where the points fit, they are returned as they are, one per bin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


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
    """As float32; what is too large for it becomes the largest float32, because infinity cannot be drawn."""
    limit = float(np.finfo(np.float32).max)
    return np.clip(values, -limit, limit).astype(np.float32)
