"""Find spikes in a curve: values far above the 128 finite values before them, by two rules.

- *sigma*: value > mean + 6 standard deviations, the rule of OLMo-core. Calm curves, single spikes.
- *mad*: value > median + 7 robust standard deviations (1.4826 × the median distance from the median). It still finds
  the second spike of a burst, where the first has widened the standard deviation.

All points are first looked at with a margin, by running totals and by a median every 16 points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from zero2all.track.series import Series

WINDOW = 128
SIGMAS = 6.0
ROBUST_SIGMAS = 7.0
SIGMA_OF_MAD = 1.4826
MAX_SPIKES = 10_000  # more marks than this say nothing: the curve is noise. The highest are kept.
_MARGIN = 0.8
_MEDIAN_STRIDE = 16
_BATCH = 8_192

Floats = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Spike:
    """A point far above the 128 before it."""

    step: int
    time: float
    tokens: int
    value: float
    mean: float
    sigma: float
    median: float
    mad: float  # median distance from the median
    rules: tuple[str, ...]  # which rules found it: "sigma", "mad" or both


def find_spikes(points: Series) -> list[Spike]:
    """Every spike of the curve, in order of steps."""
    known = np.flatnonzero(np.isfinite(points.value))
    values = points.value[known]
    if len(values) <= WINDOW:
        return []
    windows = sliding_window_view(values, WINDOW)[:-1]
    after = values[WINDOW:]
    spikes: list[Spike] = []
    with np.errstate(over="ignore", invalid="ignore"):
        candidates = np.flatnonzero(_may_be_sigma(values) | _may_be_mad(windows, after))
        for start in range(0, len(candidates), _BATCH):
            places = candidates[start : start + _BATCH]
            spikes += _judged(points, known[places + WINDOW], windows[places], after[places])
    if len(spikes) > MAX_SPIKES:
        highest = sorted(spikes, key=lambda spike: spike.median - spike.value)[:MAX_SPIKES]
        spikes = sorted(highest, key=lambda spike: spike.step)
    return spikes


def _may_be_sigma(values: Floats) -> NDArray[np.bool_]:
    """For each point with a window before it: whether it is near or above the sigma rule."""
    centred = values - np.median(values)
    mean = _window_totals(centred, WINDOW)[:-1] / WINDOW
    square = _window_totals(centred * centred, WINDOW)[:-1] / WINDOW
    # A variance this small against the square is rounding; the rule itself will look.
    sigma = np.sqrt(np.maximum(square - mean * mean, 0.0))
    return centred[WINDOW:] > mean + _MARGIN * SIGMAS * sigma


def _window_totals(values: Floats, length: int) -> Floats:
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


def _may_be_mad(windows: Floats, after: Floats) -> NDArray[np.bool_]:
    """The same for the rule of the median, by a window at most 8 points away: 120 of its 128 values are the same."""
    sampled = windows[::_MEDIAN_STRIDE]
    limits = np.empty(len(sampled))
    for start in range(0, len(sampled), _BATCH):
        median, mad = _robust(sampled[start : start + _BATCH])
        limits[start : start + _BATCH] = median + _MARGIN * ROBUST_SIGMAS * SIGMA_OF_MAD * mad
    nearest = (np.arange(len(after)) + _MEDIAN_STRIDE // 2) // _MEDIAN_STRIDE
    return after > limits[np.minimum(nearest, len(limits) - 1)]


def _judged(points: Series, index: Places, windows: Floats, values: Floats) -> list[Spike]:
    mean, sigma = windows.mean(axis=1), windows.std(axis=1)
    median, mad = _robust(windows)
    # A window of equal values has no spread of its own: any step up from it would be a spike.
    by_sigma = (sigma > 1e-9 * np.abs(mean)) & (values > mean + SIGMAS * sigma)
    by_mad = (mad > 1e-9 * np.abs(median)) & (values > median + ROBUST_SIGMAS * SIGMA_OF_MAD * mad)
    spikes = []
    for place in np.flatnonzero(by_sigma | by_mad).tolist():
        at = int(index[place])
        rules = (("sigma",) if by_sigma[place] else ()) + (("mad",) if by_mad[place] else ())
        step, time, tokens = int(points.step[at]), float(points.time[at]), int(points.tokens[at])
        value, m, s, med, dist = (float(column[place]) for column in (values, mean, sigma, median, mad))
        spikes.append(Spike(step, time, tokens, value, m, s, med, dist, rules))
    return spikes


def _robust(windows: Floats) -> tuple[Floats, Floats]:
    """The median of each window, and the median distance from it."""
    median = np.median(windows, axis=1)
    return median, np.median(np.abs(windows - median[:, None]), axis=1)
