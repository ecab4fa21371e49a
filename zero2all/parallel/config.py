"""Where a run computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.common.schema import PositiveInt


@dataclass(frozen=True)
class ParallelConfig:
    """The device of a run and the CPU threads it may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is a card, else the CPU."""
    cpu_threads: PositiveInt | None = None
    """CPU threads for the arithmetic. None takes all cores when a run starts, and what it started with on resume:
    float sums depend on the number of threads, so an exact resume needs the same one."""
