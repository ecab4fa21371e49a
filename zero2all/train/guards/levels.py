"""The recent loss level of each channel or source: the last rows and their median.

The unit of distance is a quarter of the median, or the robust standard deviation of the rows where that is more. There
is no level with few rows, or while it moves (the medians of the older and the newer half differ by half a unit or
more), because rows read at different times cannot be compared then. The window is counted in rows, not in steps.

Cost: 2 kB for each channel and source. The levels of a step are computed together, as rows of one matrix; for 64 rows
out of 100 sources of 1,000 shards, a step takes `shards` 1.5 ms on one slow core (Neoverse-N1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero2all.train.guards.detector import MAD_TO_SIGMA

WINDOW_ROWS = 256
MIN_WINDOW_ROWS = 64
UNIT_SHARE = 0.25
"""One unit is at least this share of the median."""
LEVEL_UNITS = 0.5
"""A level that moves this far within its window is not steady."""
NOTHING = np.float32(np.inf)
"""Marks an empty place in a window; sorts after all losses."""
NO_LIMIT = 2**62
NO_SHARD = -1
"""The shard of an empty place, and of rows whose shard does not matter."""


@dataclass(frozen=True)
class Levels:
    """N levels."""

    medians: np.ndarray
    units: np.ndarray
    are_steady: np.ndarray  # whether rows may be compared with this level; otherwise it has no meaning

    def distances(self, losses: np.ndarray) -> np.ndarray:
        """How many units each of N losses lies above its level."""
        return (losses - self.medians) / self.units

    def of(self, which: np.ndarray) -> Levels:
        """The levels at these indices, in that order."""
        return Levels(self.medians[which], self.units[which], self.are_steady[which])


class Windows:
    """The last rows of each of some groups, the newest at the right, with the shard each came from."""

    def __init__(self, most_of_a_shard: Sequence[int]) -> None:
        """`most_of_a_shard`: per group, how many rows of one shard its window holds, the newest ones."""
        self._most_of_a_shard = np.array(most_of_a_shard, np.int64)
        self._losses = np.full((len(most_of_a_shard), WINDOW_ROWS), NOTHING)
        self._shards = np.full((len(most_of_a_shard), WINDOW_ROWS), NO_SHARD, np.int32)

    def add(self, groups: np.ndarray, losses: np.ndarray, shards: np.ndarray) -> None:
        """Add rows in the order in which they were read: their groups, losses and shards, (B,) each."""
        order = np.argsort(groups, kind="stable")
        groups, losses, shards = groups[order], losses[order].astype(np.float32), shards[order]
        present, starts, counts = np.unique(groups, return_index=True, return_counts=True)
        # The windows of the groups that have rows, with the new rows behind them; then the newest of each.
        rows = np.repeat(np.arange(len(present)), counts)
        columns = WINDOW_ROWS + np.arange(len(groups)) - np.repeat(starts, counts)
        longer = np.full((len(present), WINDOW_ROWS + counts.max(initial=0)), NOTHING)
        longer[:, :WINDOW_ROWS], longer[rows, columns] = self._losses[present], losses
        origins = np.full(longer.shape, NO_SHARD, np.int32)
        origins[:, :WINDOW_ROWS], origins[rows, columns] = self._shards[present], shards
        newest = (np.arange(len(present)) * longer.shape[1] + counts)[:, None] + np.arange(WINDOW_ROWS)
        self._losses[present], self._shards[present] = longer.ravel().take(newest), origins.ravel().take(newest)
        # Where one shard has too many, choose again.
        limited = self._most_of_a_shard[groups] < NO_LIMIT
        rows, shards = rows[limited], shards[limited]
        _, firsts = np.unique(_pairs(rows, shards), return_index=True)
        rows, shards = rows[firsts], shards[firsts]
        held = np.count_nonzero(origins[rows] == shards[:, None], axis=1)
        for row in np.unique(rows[held > self._most_of_a_shard[present[rows]]]).tolist():
            group = int(present[row])
            self._put(group, *_newest_of_each(longer[row], origins[row], int(self._most_of_a_shard[group])))

    def levels(self, groups: np.ndarray, left_out: np.ndarray) -> Levels:
        """The level of each group without the rows of a shard (NO_SHARD: with all rows), (B,) each."""
        _, firsts, places = np.unique(_pairs(groups, left_out), return_index=True, return_inverse=True)
        groups, left_out = groups[firsts], left_out[firsts]
        is_left_out = (self._shards[groups] == left_out[:, None]) & (left_out != NO_SHARD)[:, None]
        # Pairs whose shard is not in the window share a level: of many shards, most are not.
        pairs = _pairs(groups, np.where(is_left_out.any(axis=1), left_out, NO_SHARD))
        _, firsts, shared = np.unique(pairs, return_index=True, return_inverse=True)
        values = self._losses[groups[firsts]]
        values[is_left_out[firsts]] = NOTHING
        return _levels(values).of(shared[places])

    def drop(self, group: int, shard: int) -> None:
        """Remove the rows of a shard."""
        stay = self._shards[group] != shard
        self._put(group, self._losses[group][stay], self._shards[group][stay])

    def clear(self) -> None:
        """Remove all rows."""
        self._losses[...] = NOTHING
        self._shards[...] = NO_SHARD

    def rows(self, group: int) -> tuple[list[float], list[int]]:
        """Losses and shards of the rows of a group, the oldest first, as plain values."""
        there = self._losses[group] < NOTHING
        return self._losses[group][there].tolist(), self._shards[group][there].tolist()

    def set_rows(self, group: int, losses: list[float], shards: list[int]) -> None:
        """Restore the values of `rows`."""
        self._put(group, np.array(losses, np.float32), np.array(shards, np.int32))

    def _put(self, group: int, values: np.ndarray, origins: np.ndarray) -> None:
        empty = max(0, WINDOW_ROWS - len(values))
        self._losses[group, :empty], self._shards[group, :empty] = NOTHING, NO_SHARD
        self._losses[group, empty:], self._shards[group, empty:] = values[-WINDOW_ROWS:], origins[-WINDOW_ROWS:]


def _pairs(groups: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """A number for each pair of group and shard."""
    return np.asarray(groups * (shards.max(initial=NO_SHARD) + 2) + shards)


def _newest_of_each(values: np.ndarray, origins: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Without the oldest rows of shards that have more than `most`."""
    stay = origins != NO_SHARD
    for shard in np.unique(origins[stay]).tolist():
        stay[np.flatnonzero(origins == shard)[:-most]] = False
    return values[stay], origins[stay]


def _levels(values: np.ndarray) -> Levels:
    """The level of each row of a matrix (N, WINDOW_ROWS) of losses in order of time, NOTHING where none is."""
    there = values < NOTHING
    counts = np.count_nonzero(there, axis=1)
    is_newer = np.cumsum(there, axis=1, dtype=np.int32) > (counts // 2)[:, None]
    medians = np.where(counts > 0, _medians(values, counts), 0)
    older = np.where(counts > 0, _medians(np.where(is_newer, NOTHING, values), counts // 2), 0)
    newer = _medians(np.where(is_newer, values, NOTHING), counts - counts // 2)
    spread = MAD_TO_SIGMA * _medians(np.abs(values - medians[:, None]), counts)
    units = np.maximum(np.maximum(spread, UNIT_SHARE * medians), 1e-6)
    are_steady = (counts >= MIN_WINDOW_ROWS) & (np.abs(newer - older) < LEVEL_UNITS * units)
    return Levels(medians.astype(np.float64), units.astype(np.float64), are_steady)


def _medians(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The upper median of the first `counts` values of each row, once sorted."""
    ordered = np.sort(values, axis=1)
    return np.asarray(ordered[np.arange(len(values)), counts // 2])
