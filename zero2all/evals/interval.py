"""The 95 % confidence interval of a mean: how far it would move if other questions of the same kind had been asked.

(That of a share of right answers is `judge.wilson`.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Of a mean, by bootstrap: the middle 95 % of the means of samples drawn with replacement (the same every time)."""
    found = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.quantile(found[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
