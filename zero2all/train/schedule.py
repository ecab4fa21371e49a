"""The learning rate as a pure function of the step: linear warmup, then cosine or constant."""

from __future__ import annotations

import math

from zero2all.train.config import ScheduleConfig


def learning_rate(step: int, steps: int, lr_max: float, config: ScheduleConfig) -> float:
    """The rate of step `step` (the first is 0) in a run of `steps`."""
    if step < config.warmup_steps:
        return lr_max * (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return lr_max
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    lr_min = lr_max * config.lr_min_share
    return lr_min + (lr_max - lr_min) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
