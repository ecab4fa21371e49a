"""Failures, how often to save, and the share of time that is not lost (goodput).

M is the mean time between failures of the whole fleet, delta what one checkpoint stops the run for, R what a restart
takes, tau the time between checkpoints.
Young 1974: tau = sqrt(2 delta M). Daly 2006: sqrt(2 delta M) (1 + sqrt(delta/2M)/3 + delta/18M) - delta, and M where
delta is 2M or more.
Goodput: tau / (M e^(R/M) (e^((tau+delta)/M) - 1)), about 1 - delta/tau - (tau/2 + R)/M.
"""

from __future__ import annotations

import math

LLAMA3_FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16_384)
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3 report): 1.97e-5, one per 50,677 GPU-hours."""


def young_interval(save: float, mtbf: float) -> float:
    """Young's time between checkpoints."""
    return math.sqrt(2 * save * mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    """Daly's time between checkpoints."""
    if save >= 2 * mtbf:
        return mtbf
    small = save / (2 * mtbf)
    return young_interval(save, mtbf) * (1 + math.sqrt(small) / 3 + small / 9) - save


def goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Share of the time that the run makes progress which is kept."""
    if (interval + save + restart) / mtbf > 700:  # e^700 is near the largest float
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf))
