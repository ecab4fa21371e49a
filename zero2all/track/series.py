"""One metric as columns, and how the attempts of a run become one curve.

A resumed run repeats the steps after its checkpoint: the rows of a later attempt take back everything an earlier one
wrote beyond the point it resumed from, even where it has not come that far again; an event `rollback` does the same. Of
other writers (late evaluations) only the same metric at the same step is replaced. What was taken back is kept as a
*ghost*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Series:
    """One metric over the run: four columns of equal length, in order of steps, each step once."""

    step: NDArray[np.int64]
    value: NDArray[np.float64]
    tokens: NDArray[np.int64]
    time: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Series:
        """The points that `index` chooses."""
        return Series(self.step[index], self.value[index], self.tokens[index], self.time[index])


NO_POINTS = Series(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class SeriesPart:
    """What one attempt wrote of a metric, or wrote between two rollbacks, in the order it was written."""

    points: Series
    cut: int | None = None  # this part takes back what earlier ones wrote beyond this step; None takes nothing back


def join_attempts(parts: Sequence[SeriesPart]) -> tuple[Series, Series]:
    """Lay the attempts of one writer over each other, the later over the earlier: the curve, and its ghosts."""
    kept: list[Series] = []
    ghosts: list[Series] = []
    for part in parts:
        if part.cut is not None:
            for number, earlier in enumerate(kept):
                gone = earlier.step > part.cut
                if gone.any():
                    ghosts.append(earlier.take(gone))
                    kept[number] = earlier.take(~gone)
        if len(part.points):
            kept.append(_last_of_each_step(part.points)[0])
    curve, replaced = _last_of_each_step(concatenate(kept))
    ghosts.append(replaced)
    return curve, by_step(concatenate(ghosts))


def join_writers(curves: Sequence[Series]) -> Series:
    """One metric that several writers wrote: at each step the row that was written last by the clock."""
    curves = [curve for curve in curves if len(curve)]
    if len(curves) <= 1:
        return curves[0] if curves else NO_POINTS
    everything = concatenate(curves)
    order = np.lexsort((np.arange(len(everything)), everything.time, everything.step))
    return _last_of_each_step(everything.take(order))[0]


def by_step(points: Series) -> Series:
    """The points in order of steps; those of one step stay in their order."""
    if len(points) < 2 or (np.diff(points.step) >= 0).all():
        return points
    return points.take(np.argsort(points.step, kind="stable"))


def concatenate(several: Sequence[Series]) -> Series:
    """All points, one series after the other."""
    several = [points for points in several if len(points)]
    if len(several) <= 1:
        return several[0] if several else NO_POINTS
    names = ("step", "value", "tokens", "time")
    return Series(*(np.concatenate([getattr(points, name) for points in several]) for name in names))


def _last_of_each_step(points: Series) -> tuple[Series, Series]:
    """The points in order of steps, of each step the last; and the points that had to give way."""
    if len(points) < 2 or (np.diff(points.step) > 0).all():
        return points, NO_POINTS
    points = by_step(points)
    is_last = np.append(points.step[1:] != points.step[:-1], True)
    return (points, NO_POINTS) if is_last.all() else (points.take(is_last), points.take(~is_last))
