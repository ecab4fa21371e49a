"""95 % confidence intervals: how far a figure would move if other questions of the same kind had been asked."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000
Z = 1.959964  # standard deviations of the normal distribution that hold 95 %


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of a mean, by bootstrap: the middle 95 % of the means of samples drawn with replacement (the same every time)."""
    found = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.quantile(found[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def share_interval(right: int, total: int) -> tuple[float, float]:
    """Of a share of right answers, after Wilson: inside 0 and 1, and honest where all or none are right."""
    share = right / total
    spread = Z * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2))
    middle, width = share + Z**2 / (2 * total), 1 + Z**2 / total
    return max(0.0, (middle - spread) / width), min(1.0, (middle + spread) / width)
