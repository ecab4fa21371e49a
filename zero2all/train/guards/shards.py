"""Finds shards whose samples are far harder or far easier than the rest, although they are scattered over the run.

Each row of a step is compared with the last rows of its channel, and with the last rows of the other shards of its
source (`Levels`), by its distance in units of their spread. Of the two distances the smaller counts:

    hard side    y = min( y_channel,  y_source)       poisoned: random bytes, a wrong encoding, another tokenizer
    easy side    y = min(-y_channel, -y_source)       newlines, tables of one value, text seen before

A source of one shard, or whose other shards were all reported, is compared with its channel alone, by y_channel - 1 or
-y_channel - 1. The test is a bet against "on average y is at most 1.5":

    W = product over a shard's rows of (1 + b (y' - 1.5))        y' = y kept within -1 ... 6;  b = 0.36, 0.1 or 0.02

If the hypothesis holds, W is a fair or losing game and ever reaches 1/a with probability at most a (Ville's
inequality), whenever one looks. With a = guards.false_shard_alarms / 2K for K shards and two sides (Bonferroni), a run
without unusual shards reports any with probability at most false_shard_alarms. docs/guards.md says more, also what this
cannot find.

A row counts only when both levels are known and steady (`levels`). A reported shard is no longer judged, and its rows
no longer enter a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero2all.common.progress import counted
from zero2all.train.guards.detector import MAD_TO_SIGMA, Finding, Kind
from zero2all.train.guards.rows import StepRows

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
    """The recent loss levels of N channels or sources: the last rows and their median.

    The unit of distance is a quarter of the median, or the robust standard deviation of the rows where that is more.
    There is no level with few rows, or while it moves (the medians of the older and the newer half differ by half a
    unit or more), because rows read at different times cannot be compared then. The window is counted in rows, not in
    steps.

    Cost: 2 kB for each channel and source. The levels of a step are computed together, as rows of one matrix; for 64
    rows out of 100 sources of 1,000 shards, a step takes `shards` 1.5 ms on one slow core (Neoverse-N1).
    """

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


BETS = np.array([0.36, 0.1, 0.02])
LOWEST, HIGHEST = -1.0, 6.0
NULL_UNITS = 1.5
"""A shard may lie this far from its channel, or from the rest of its source, without being called unusual."""
ALONE_UNITS = 1.0
"""What is allowed beyond that where a source has no other shard to compare with."""
TRIVIAL_SHARE = 0.25
"""Share of the usual loss; a loss below it is called trivial."""
EXAMPLES = 8
"""Most extreme rows that are kept for each shard."""
SIDES: tuple[Kind, Kind] = ("hard_shard", "easy_shard")
STATE_FORMAT = 2


@dataclass(frozen=True)
class _Rows:
    """Rows of a step that can be judged, with the levels for each. N rows."""

    keys: np.ndarray
    numbers: np.ndarray  # which rows of the step they are
    losses: np.ndarray
    is_alone: np.ndarray  # whether the source has no other shard
    channel: Levels
    source: Levels  # level of the other shards; without meaning where there are none

    def sides(self) -> np.ndarray:
        """(2, N) units by which each row stands out on the hard and on the easy side: y of the module's text."""
        beyond_channel = self.channel.distances(self.losses)
        beyond_source = np.where(self.is_alone, beyond_channel, self.source.distances(self.losses))
        hard, easy = np.minimum(beyond_channel, beyond_source), np.minimum(-beyond_channel, -beyond_source)
        return np.asarray(np.stack((hard, easy)) - ALONE_UNITS * self.is_alone)


class ShardWatch:
    """Running statistics of every shard of a run."""

    def __init__(
        self, shards: Mapping[str, int], channels: Sequence[str], false_alarms: float = 0.01, min_rows: int = 16
    ) -> None:
        """`shards`: how many shards each source has, in the order of the run's sources."""
        self.channels = list(channels)
        self._sources = list(shards)
        self._counts = np.array([shards[name] for name in self._sources], np.int64)
        self._first = np.concatenate(([0], np.cumsum(self._counts))).astype(np.int64)
        self._min_rows = min_rows
        self._log_threshold = math.log(2 * max(1, int(self._first[-1])) / false_alarms)
        # Keeps enough rows of the other shards, however large one shard of a source is.
        most_of_a_shard = [WINDOW_ROWS - MIN_WINDOW_ROWS] * len(self._sources)
        self._windows = Windows([*most_of_a_shard, *([NO_LIMIT] * len(self.channels))])  # of sources, then of channels
        self.forget()

    def forget(self) -> None:
        """Clear all statistics."""
        total = int(self._first[-1])
        self._rows = np.zeros(total, np.int64)
        self._loss = np.zeros(total)
        self._usual = np.zeros(total)
        self._rows_beside = np.zeros(total, np.int64)  # of them, those that were compared with other shards
        self._usual_beside = np.zeros(total)
        self._wealth = np.zeros((2, total, len(BETS)))  # logarithms
        self._named: dict[int, str] = {}
        self._is_named = np.zeros(total, bool)
        self._unnamed = self._counts.copy()  # of each source
        self._examples: dict[int, list[list[float]]] = {}  # [y, loss, first token of its step, row]
        self.restart()

    def observe(
        self, step: int, rows: StepRows, nats: np.ndarray, counts: np.ndarray, tokens: tuple[int, int]
    ) -> list[Finding]:
        """Add the rows of a step: sums of nats and of token weights, (B,) each. Rows with weight 0 (padding,
        quarantined shards), rows that are not finite and rows of reported shards are ignored."""
        nats, counts = np.asarray(nats, np.float64), np.asarray(counts, np.float64)
        keys = self._first[rows.sources] + rows.shards
        numbers = np.flatnonzero(np.isfinite(nats) & (counts > 0) & ~self._is_named[keys])
        if not len(numbers):
            return []
        losses, keys = nats[numbers] / counts[numbers], keys[numbers]
        groups = np.concatenate((rows.sources[numbers], len(self._sources) + rows.channels[numbers]))
        shards = np.concatenate((keys, np.full_like(keys, NO_SHARD)))
        levels = self._windows.levels(groups, left_out=shards)
        self._windows.add(groups, np.tile(losses, 2), shards)
        beside, of_channel = levels.of(np.arange(len(keys))), levels.of(len(keys) + np.arange(len(keys)))
        is_alone = self._unnamed[rows.sources[numbers]] == 1
        known = np.flatnonzero(of_channel.are_steady & (is_alone | beside.are_steady))
        judged = _Rows(
            keys[known], numbers[known], losses[known], is_alone[known], of_channel.of(known), beside.of(known)
        )
        self._bet(judged, rows.first_token)
        return self._verdicts(step, tokens, judged.keys)

    def _bet(self, rows: _Rows, first_token: int) -> None:
        keys, is_beside = rows.keys, ~rows.is_alone
        sides = rows.sides()
        np.add.at(self._rows, keys, 1)
        np.add.at(self._loss, keys, rows.losses)
        np.add.at(self._usual, keys, rows.channel.medians)
        np.add.at(self._rows_beside, keys[is_beside], 1)
        np.add.at(self._usual_beside, keys[is_beside], rows.source.medians[is_beside])
        stakes = np.clip(sides, LOWEST, HIGHEST) - NULL_UNITS
        for wealth, gains in zip(self._wealth, np.log1p(stakes[:, :, None] * BETS), strict=True):
            np.add.at(wealth, keys, gains)
        for row in np.flatnonzero((sides > NULL_UNITS).any(axis=0)).tolist():
            hard, easy = sides[:, row].tolist()
            key, y = int(keys[row]), hard if hard > 0 else -easy
            best = [*self._examples.get(key, []), [y, float(rows.losses[row]), first_token, int(rows.numbers[row])]]
            self._examples[key] = sorted(best, key=lambda one: -abs(one[0]))[:EXAMPLES]

    def _verdicts(self, step: int, tokens: tuple[int, int], touched: np.ndarray) -> list[Finding]:
        findings = []
        keys = np.unique(touched)
        keys = keys[self._rows[keys] >= self._min_rows]
        # The three bets together are never worth more than the best of them, and most shards are far from it.
        promising = self._wealth[:, keys].max(axis=2, initial=-np.inf) >= self._log_threshold
        for place in np.flatnonzero(promising.any(axis=0)).tolist():
            key = int(keys[place])
            for side, kind in enumerate(SIDES):
                wealth = float(np.logaddexp.reduce(self._wealth[side, key])) - math.log(len(BETS))
                if key not in self._named and wealth >= self._log_threshold:
                    self._name(key, kind)
                    findings.append(self._finding(kind, key, step, tokens))
        return findings

    def set_aside(self, source: str, shard: int, kind: str) -> None:
        """Stop judging a shard that was reported before, and comparing others with it."""
        if source not in self._sources or shard >= self._counts[self._sources.index(source)]:
            return  # not of this run, or packed again
        key = int(self._first[self._sources.index(source)]) + shard
        if key not in self._named:
            self._name(key, kind)

    def _name(self, key: int, kind: str) -> None:
        source = self._source_of(key)
        self._named[key], self._is_named[key] = kind, True
        self._unnamed[source] -= 1
        self._windows.drop(source, key)

    def _finding(self, kind: Kind, key: int, step: int, tokens: tuple[int, int]) -> Finding:
        source, shard = self._source_and_shard(key)
        known = self._known(key)
        count, loss, usual, beside = known["rows"], known["loss"], known["usual"], known["usual_beside"]
        sign = 1.0 if kind == "hard_shard" else -1.0
        examples = [one for one in self._examples.get(key, []) if one[0] * sign > 0]
        is_trivial = loss < TRIVIAL_SHARE * (usual if beside is None else min(usual, beside))
        words = "far harder" if kind == "hard_shard" else "trivially easy" if is_trivial else "far easier"
        text = f"shard {shard} of {source} is {words}: mean loss {loss:.4g} over {counted(count, 'sample')}"
        if beside is None:
            text = f"{text}, its channel {usual:.4g}; {source} has no other shard to compare with"
        else:
            text = f"{text}, its channel {usual:.4g}, the other shards of {source} {beside:.4g}"
        details = {
            "source": source,
            "shard": shard,
            "rows": count,
            "usual_beside": beside,
            "examples": [
                {"first_token": int(token), "row": int(row), "loss": one_loss} for _, one_loss, token, row in examples
            ],
        }
        return Finding(kind, step, tokens, text, value=loss, usual=usual, details=details)

    def _known(self, number: int) -> dict[str, Any]:
        """Means over the rows of a shard that were judged."""
        rows, beside = int(self._rows[number]), int(self._rows_beside[number])
        return {
            "rows": rows,
            "loss": float(self._loss[number] / rows),
            "usual": float(self._usual[number] / rows),
            "usual_beside": float(self._usual_beside[number] / beside) if beside else None,
        }

    def _source_of(self, number: int) -> int:
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def _source_and_shard(self, number: int) -> tuple[str, int]:
        source = self._source_of(number)
        return self._sources[source], number - int(self._first[source])

    def table(self) -> list[dict[str, Any]]:
        """The statistics of each shard that had rows; `usual` is its channel's level, `usual_beside` its source's."""
        rows = []
        for number in np.flatnonzero(self._rows).tolist():
            source, shard = self._source_and_shard(number)
            rows.append({"source": source, "shard": shard, "named": self._named.get(number), **self._known(number)})
        return rows

    def restart(self) -> None:
        """Clear the levels of channels and sources (another stage); the statistics of the shards stay."""
        self._windows.clear()

    def state(self) -> dict[str, Any]:
        """As plain values; shards without a row, and sources without a window, are left out."""
        seen = np.flatnonzero(self._rows).tolist()
        return {
            "format": STATE_FORMAT,
            "sources": dict(zip(self._sources, self._counts.tolist(), strict=True)),
            "channels": self.channels,
            "shards": [
                [
                    number,
                    int(self._rows[number]),
                    float(self._loss[number]),
                    float(self._usual[number]),
                    int(self._rows_beside[number]),
                    float(self._usual_beside[number]),
                    self._wealth[:, number].tolist(),
                    self._named.get(number),
                    self._examples.get(number, []),
                ]
                for number in seen
            ],
            "channel_windows": [
                self._windows.rows(len(self._sources) + channel)[0] for channel in range(len(self.channels))
            ],
            "source_windows": {
                name: [losses, [key - int(self._first[source]) for key in keys]]
                for source, name in enumerate(self._sources)
                for losses, keys in [self._windows.rows(source)]
                if losses
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `state`. New sources start without statistics."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the shards' state has format {state.get('format')}, expected {STATE_FORMAT}")
        self.forget()
        here = {name: number for number, name in enumerate(self._sources)}
        old_names = list(state["sources"])
        old_first = np.concatenate(([0], np.cumsum([state["sources"][name] for name in old_names])))
        for old, rows, loss, usual, rows_beside, usual_beside, wealth, named, examples in state["shards"]:
            place = int(np.searchsorted(old_first, old, side="right")) - 1
            shard = old - int(old_first[place])
            source = here.get(old_names[place])
            if source is None or shard >= self._counts[source]:
                continue  # the source is no longer read, or was packed again with fewer shards
            number = int(self._first[source]) + shard
            self._rows[number], self._loss[number], self._usual[number] = rows, loss, usual
            self._rows_beside[number], self._usual_beside[number] = rows_beside, usual_beside
            self._wealth[:, number] = wealth
            if named is not None:
                self._name(number, named)
            if examples:
                self._examples[number] = [list(one) for one in examples]
        windows = dict(zip(state["channels"], state["channel_windows"], strict=True))
        for number, channel in enumerate(self.channels):
            losses = windows.get(channel, [])
            self._windows.set_rows(len(self._sources) + number, losses, [NO_SHARD] * len(losses))
        for name, (losses, shards) in state["source_windows"].items():
            source = here.get(name)
            if source is not None and state["sources"][name] == self._counts[source]:
                first = int(self._first[source])
                self._windows.set_rows(source, losses, [first + shard for shard in shards])
