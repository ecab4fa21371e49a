"""Smooth a curve at full resolution, before it is thinned out for the screen: an exponential mean.

It looks as far ahead as back: one that only looks back trails a falling loss. Values that are not finite weigh nothing,
and the ends are debiased. `width` is its time constant, counted in points.
"""

from __future__ import annotations

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
    """The smoothed curve: as many points as `values`, NaN only where nothing finite is within reach."""
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
