"""Ends a run on time: its decay is given another end when the machine turns out faster or slower than expected.

At LOOKS of its time or of its steps, those that are left are counted anew from the pace since the look before. Where
they differ, the run is asked to anneal over that many, as `z2a anneal` would: the rate then falls from where it stands,
and the record of it is in the run's folder and in its checkpoints, so that a run that was killed goes on the same way.
"""

from __future__ import annotations

import time
from pathlib import Path

from zero2all.config import RunConfig
from zero2all.train.anneal import request_anneal

LOOKS = (0.35, 0.55, 0.75, 0.9)
"""The first is where the decay of a run begins."""
TOLERANCE = 0.005


class Deadline:
    """Called after each step of a run that is to end at `ends_at`, by time.monotonic()."""

    def __init__(self, run: Path, config: RunConfig, ends_at: float, most_steps: int) -> None:
        self.run, self.ends_at, self.end, self.most_steps = run, ends_at, config.train.steps, most_steps
        self.to_share = config.schedule.min_lr_ratio
        self.looks = list(LOOKS)
        self.began: float | None = None
        self.mark = (0, 0.0)
        """The step and time from which the pace is measured."""

    def __call__(self, step: int) -> None:
        """Look, where it is time to."""
        now = time.monotonic()
        if self.began is None:  # without the first step, which compiles
            self.began, self.mark = now, (step, now)
            return
        share = max(step / self.end, (now - self.began) / (self.ends_at - self.began))
        if not self.looks or share < self.looks[0]:
            return
        self.looks.pop(0)
        pace = (step - self.mark[0]) / max(now - self.mark[1], 1e-6)
        left = max(1, min(round(pace * (self.ends_at - now)), self.most_steps - step))
        self.mark = (step, now)
        if abs(left - (self.end - step)) > TOLERANCE * self.end:
            self.end = step + left
            request_anneal(self.run, left, "linear", self.to_share)
