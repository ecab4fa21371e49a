"""Smooth a curve at full resolution, before it is thinned out for the screen.

Values that are not finite weigh nothing, and the ends are debiased. All methods look as far ahead as back, the
exponential mean too: one that only looks back trails a falling loss. None subtracts running totals from each other, so
a spike of 1e30 leaves no rounding noise on the values around it.

`width` is counted in points: the time constant of the exponential mean, the length of the window and of the median,
the standard deviation of the Gaussian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Kind = Literal["ema", "window", "gaussian", "median"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MIN_POINTS = 50  # finite points without which a curve is drawn as it is
WIDTHS_PER_CURVE = 20  # a wider mean of a short and steep curve lies beside it
EXACT_SIGMA = 16  # wider Gaussians are four running means in a row, within 4 % of them
LARGEST_WIDTH = 1_000_000
MEDIANS_PER_WINDOW = 16  # a running median is computed this often per window and drawn straight in between
FLAT = 4  # A Gaussian this many times as wide as the curve weighs all points within 4 % alike; none is wider.
_START_WIDTHS = 8  # beyond so many widths a neighbour counts less than a thousandth
_MAX_START = 20_000
_ROWS = 16_384
_GROWTH = 1e12

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Smoothing:
    """How to smooth: the kind, and its width in points."""

    kind: Kind
    width: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: use one of {', '.join(KINDS)}.")
        if not 0 < self.width <= LARGEST_WIDTH:
            raise ValueError(f"width={self.width}: the width is a number of points, at most {LARGEST_WIDTH:,}.")


def parse_smoothing(text: str) -> Smoothing | None:
    """Read `kind:width`, or `none`; ValueError says what was expected."""
    if text == "none":
        return None
    kind, _, width = text.partition(":")
    try:
        return Smoothing(kind, float(width))  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(
            f"is {text[:80]!r}; expected none, or a kind ({', '.join(KINDS)}) and a width in points up to "
            f"{LARGEST_WIDTH:,}, for example ema:20"
        ) from None


def smoothing_of(values: NDArray[np.floating], wanted: Smoothing | None) -> Smoothing | None:
    """What is wanted, no wider than a twentieth of the whole curve `values`; None where it has too few points."""
    points = np.count_nonzero(np.isfinite(values))
    if wanted is None or points < MIN_POINTS:
        return None
    return Smoothing(wanted.kind, min(wanted.width, points / WIDTHS_PER_CURVE))


def smooth(values: NDArray[np.floating], how: Smoothing) -> Floats:
    """The smoothed curve: as many points as `values`, NaN only where nothing finite is within reach."""
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0).astype(np.float64, copy=False)
    if len(values) == 0 or how.width <= (0 if how.kind == "gaussian" else 1):
        return np.where(known, filled, np.nan)
    if how.kind == "median":
        return _running_median(np.where(known, filled, np.nan), max(1, round(how.width)))
    method = {"ema": _two_sided, "window": _window, "gaussian": _gaussian}[how.kind]
    total = method(filled, how.width)
    if how.kind == "ema" and known.all():
        return total / _two_sided_weights(len(values), how.width)
    weight = method(known.astype(np.float64), how.width)
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


def _window(values: Floats, width: float) -> Floats:
    """Totals over a centred window that shrinks from both sides near the ends, so a slope is not bent there."""
    half = round((width - 1) / 2)
    count = len(values)
    half = min(half, (count - 1) // 2)
    if half == 0:
        return values
    result = np.empty(count)
    result[half : count - half] = window_totals(values, 2 * half + 1)
    result[:half] = np.cumsum(values[: 2 * half])[0 : 2 * half : 2]
    result[count - half :] = np.cumsum(values[::-1][: 2 * half])[0 : 2 * half : 2][::-1]
    return result


def window_totals(values: Floats, length: int) -> Floats:
    """The total of every `length` neighbours: a part of one block's suffix sums and one of the next's prefix sums."""
    count = len(values)
    blocks = -(-count // length)
    padded = np.zeros(blocks * length)
    padded[:count] = values
    grid = padded.reshape(blocks, length)
    prefix = np.cumsum(grid, axis=1).reshape(-1)
    suffix = np.zeros((blocks, length))
    suffix[:, 1:] = np.cumsum(grid[:, :0:-1], axis=1)[:, ::-1]  # a window that starts a block is all prefix
    windows = count - length + 1
    totals: Floats = prefix[length - 1 : length - 1 + windows] + suffix.reshape(-1)[:windows]
    return totals


def _gaussian(values: Floats, sigma: float) -> Floats:
    if sigma <= EXACT_SIGMA:
        reach = int(np.ceil(4 * sigma))
        kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
        return np.convolve(values, kernel)[reach : reach + len(values)]
    sigma = min(sigma, max(EXACT_SIGMA, FLAT * len(values)))
    # Four boxes of this length have together the variance of the Gaussian.
    half = max(1, round((np.sqrt(12 * sigma * sigma / 4 + 1) - 1) / 2))
    padded = np.concatenate([np.zeros(4 * half), values, np.zeros(4 * half)])
    for _ in range(4):
        padded = window_totals(padded, 2 * half + 1) / (2 * half + 1)
    return padded


def _running_median(values: Floats, width: int) -> Floats:
    """The median of a centred window, exact at up to 16 places per window and straight lines between them."""
    count = len(values)
    half = min((width - 1) // 2, (count - 1) // 2)
    if half == 0:
        return values
    stride = max(1, (2 * half + 1) // MEDIANS_PER_WINDOW)
    inner = np.arange(half, count - half, stride)
    windows = sliding_window_view(values, 2 * half + 1)[::stride]
    medians = [_median_of_rows(windows[start : start + _ROWS]) for start in range(0, len(windows), _ROWS)]
    # Near the ends the window shrinks from both sides.
    first, last = np.arange(0, half, stride), np.arange(count - 1, max(inner[-1], half), -stride)[::-1]
    reach = np.concatenate([first, count - 1 - last])
    ends = [
        _median_of_rows(values[None, centre - far : centre + far + 1])
        for centre, far in zip(np.concatenate([first, last]).tolist(), reach.tolist(), strict=True)
    ]
    places = np.concatenate([first, inner, last])
    at_places = np.concatenate([*ends[: len(first)], *medians, *ends[len(first) :]])
    known = np.isfinite(at_places)
    if not known.any():
        return np.full(count, np.nan)
    smoothed: Floats = np.interp(np.arange(count), places[known], at_places[known])
    return smoothed


def _median_of_rows(windows: Floats) -> Floats:
    """The median of the numbers in each row, NaN where a row has none. Much faster than numpy's nanmedian."""
    ordered = np.sort(windows, axis=1)  # NaN comes last
    counts = np.count_nonzero(~np.isnan(ordered), axis=1)
    rows = np.arange(len(ordered))
    low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, ordered.shape[1] - 1)
    return np.where(counts > 0, 0.5 * (ordered[rows, low] + ordered[rows, high]), np.nan)
