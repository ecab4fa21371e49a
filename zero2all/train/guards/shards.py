"""Finds shards whose samples are far harder or far easier than the rest, although they are scattered over the run.

Each row of a step is compared with the last rows of its channel, and with the last rows of the other shards of its
source (`levels`), by its distance in units of their spread. Of the two distances the smaller counts:

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
from zero2all.train.guards.findings import Finding, Kind
from zero2all.train.guards.levels import MIN_WINDOW_ROWS, NO_LIMIT, NO_SHARD, WINDOW_ROWS, Levels, Windows
from zero2all.train.guards.rows import StepRows

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
        """Stop judging a shard that was reported elsewhere, and comparing others with it."""
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
