"""Names shards whose samples are far harder or far easier than their channel, though scattered over the run.

The shuffle spreads a bad shard thinly over all steps: no step stands out. But the forward pass gives the loss of every
row, and rows know their shard (`rows`). For a row with loss x, in a channel whose last 256 rows had the median m and
the robust standard deviation s:

    y = (x - m) / max(s, m / 4)

one unit being a quarter of the channel's loss, or one standard deviation of its rows where that is more. Shards of
real text differ, so a shard may lie 1.5 units from its channel. Beyond, it is *hard* (poisoned: random bytes, a wrong
encoding, another tokenizer) or *easy* (newlines, tables of one value, text seen before).

The test is a bet. Against "the rows of this shard lie at most 1.5 units above, on average", one unit of money becomes

    W = product over its rows of (1 + b (y' - 1.5))        y' = y kept within -1 ... 6;  b = 0.36, 0.1 or 0.02

If that hypothesis holds (for y', whatever came before), W is a fair or losing game, and Ville's inequality says that W
ever reaches 1/a with probability at most a. Looking after every step costs nothing extra: the bound holds for all times
at once. The money is divided among the three b; a strong effect wins with the large one, a weak one with the small. For
K shards and two sides, a = alpha / 2K (Bonferroni), so

    P(a run without unusual shards names any) <= alpha          (guards.false_shard_alarms, 0.01)

A shard of random bytes wins a factor of 2.6 with each row, one of newlines 1.9; `rows_to_name` says how many rows that
takes. y' is capped so that one monstrous row decides nothing.

While a channel's own level moves (early in the run), rows read some time apart cannot be compared: a channel is judged
only when the medians of the older and the newer half of its window differ by less than half a unit. Rows of
shards that were named no longer enter a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero2all.train.guards.detector import MAD_TO_SIGMA
from zero2all.train.guards.findings import Finding, Kind
from zero2all.train.guards.rows import StepRows

WINDOW_ROWS = 256
MIN_WINDOW_ROWS = 64
BETS = np.array([0.36, 0.1, 0.02])
LOWEST, HIGHEST = -1.0, 6.0
NULL_UNITS = 1.5
"""A shard may lie this far from its channel without being called unusual."""
LEVEL_UNITS = 0.5
EXAMPLES = 8
"""Rows that are remembered for each shard: its most extreme ones."""
SIDES: tuple[Kind, Kind] = ("hard_shard", "easy_shard")
STATE_FORMAT = 1


@dataclass(frozen=True)
class ShardKey:
    """One shard of a source."""

    source: str
    shard: int


class ShardWatch:
    """Running statistics of every shard of a run."""

    def __init__(
        self, shards: Mapping[str, int], channels: Sequence[str], false_alarms: float = 0.01, min_rows: int = 16
    ) -> None:
        """`shards`: how many shards each source has, in the order of the run's sources."""
        self.channels = list(channels)
        self._sources = list(shards)
        counts = [shards[name] for name in self._sources]
        self._first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        total = int(self._first[-1])
        self._min_rows = min_rows
        self._log_threshold = math.log(2 * max(1, total) / false_alarms)
        self._rows = np.zeros(total, np.int64)
        self._loss = np.zeros(total)
        self._usual = np.zeros(total)
        self._wealth = np.zeros((2, total, len(BETS)))  # logarithms
        self._named: dict[int, Kind] = {}
        self._windows = [np.empty(0) for _ in self.channels]
        self._examples: dict[int, list[list[float]]] = {}  # [y, loss, first token of its step, row]

    @property
    def rows_to_name(self) -> dict[str, int]:
        """Rows after which a shard is named whose every row lies 6 units above its channel, or 4 below."""
        needed = {}
        for kind, units in (("hard_shard", HIGHEST), ("easy_shard", 4.0)):
            gain = math.log1p(float(BETS[0]) * (units - NULL_UNITS))
            needed[kind] = max(self._min_rows, math.ceil((self._log_threshold + math.log(len(BETS))) / gain))
        return needed

    def observe(
        self, step: int, rows: StepRows, nats: np.ndarray, counts: np.ndarray, tokens: tuple[int, int]
    ) -> list[Finding]:
        """Take in the rows of a step: sums of nats and numbers of tokens that counted, (B,) each.

        Rows that count nothing (padding, quarantined shards) are left out, and so are rows that are not finite.
        """
        nats, counts = np.asarray(nats, np.float64), np.asarray(counts, np.float64)
        good = np.isfinite(nats) & (counts > 0)
        losses = np.divide(nats, counts, out=np.zeros_like(nats), where=good)
        keys = self._first[rows.sources] + rows.shards
        touched: set[int] = set()
        for channel in range(len(self.channels)):
            here = np.flatnonzero(good & (rows.channels == channel))
            if not len(here):
                continue
            level = self._level(channel)
            if level is not None:
                self._bet(keys[here], losses[here], level, rows.first_token, here)
                touched.update(keys[here].tolist())
            if self._named:
                here = here[[key not in self._named for key in keys[here].tolist()]]
            self._windows[channel] = np.concatenate((self._windows[channel], losses[here]))[-WINDOW_ROWS:]
        return self._verdicts(step, tokens, touched)

    def _level(self, channel: int) -> tuple[float, float] | None:
        """Median and unit of a channel; None while it cannot be judged."""
        window = self._windows[channel]
        if len(window) < MIN_WINDOW_ROWS:
            return None
        median = _median(window)
        unit = max(MAD_TO_SIGMA * _median(np.abs(window - median)), median / 4, 1e-6)
        half = len(window) // 2
        moved = abs(_median(window[half:]) - _median(window[:half]))
        return (median, unit) if moved < LEVEL_UNITS * unit else None

    def _bet(
        self, keys: np.ndarray, losses: np.ndarray, level: tuple[float, float], first_token: int, numbers: np.ndarray
    ) -> None:
        median, unit = level
        units = (losses - median) / unit
        np.add.at(self._rows, keys, 1)
        np.add.at(self._loss, keys, losses)
        np.add.at(self._usual, keys, median)
        for side, sign in enumerate((1.0, -1.0)):
            stakes = np.clip(sign * units, LOWEST, HIGHEST) - NULL_UNITS
            np.add.at(self._wealth[side], keys, np.log1p(stakes[:, None] * BETS))
        for key, y, loss, number in zip(keys.tolist(), units.tolist(), losses.tolist(), numbers.tolist(), strict=True):
            if abs(y) > NULL_UNITS:
                best = [*self._examples.get(key, []), [y, loss, first_token, number]]
                self._examples[key] = sorted(best, key=lambda one: -abs(one[0]))[:EXAMPLES]

    def _verdicts(self, step: int, tokens: tuple[int, int], touched: set[int]) -> list[Finding]:
        findings = []
        keys = np.array(sorted(touched), dtype=np.int64)
        keys = keys[self._rows[keys] >= self._min_rows]
        # The three bets together are never worth more than the best of them, and most shards are far from it.
        promising = self._wealth[:, keys].max(axis=2, initial=-np.inf) >= self._log_threshold
        for place in np.flatnonzero(promising.any(axis=0)).tolist():
            key = int(keys[place])
            for side, kind in enumerate(SIDES):
                wealth = float(np.logaddexp.reduce(self._wealth[side, key])) - math.log(len(BETS))
                if key not in self._named and wealth >= self._log_threshold:
                    self._named[key] = kind
                    findings.append(self._finding(kind, key, step, tokens))
        return findings

    def _finding(self, kind: Kind, key: int, step: int, tokens: tuple[int, int]) -> Finding:
        name = self.key(key)
        count = int(self._rows[key])
        loss, usual = float(self._loss[key] / count), float(self._usual[key] / count)
        sign = 1.0 if kind == "hard_shard" else -1.0
        examples = [one for one in self._examples.get(key, []) if one[0] * sign > 0]
        words = "far harder" if kind == "hard_shard" else "trivially easy"
        text = (
            f"shard {name.shard} of {name.source} is {words}: mean loss {loss:.4g} over {count} samples, "
            f"its channel {usual:.4g}"
        )
        details = {
            "source": name.source,
            "shard": name.shard,
            "rows": count,
            "examples": [
                {"first_token": int(token), "row": int(row), "loss": one_loss} for _, one_loss, token, row in examples
            ],
        }
        return Finding(kind, step, tokens, text, value=loss, usual=usual, details=details)

    def key(self, number: int) -> ShardKey:
        """The shard behind a number."""
        source = int(np.searchsorted(self._first, number, side="right")) - 1
        return ShardKey(self._sources[source], number - int(self._first[source]))

    def table(self) -> list[dict[str, Any]]:
        """Per shard that had rows: what is known of it, for a page or a person."""
        rows = []
        for number in np.flatnonzero(self._rows).tolist():
            name, count = self.key(number), int(self._rows[number])
            loss, usual = float(self._loss[number] / count), float(self._usual[number] / count)
            named = self._named.get(number)
            rows.append(
                {
                    "source": name.source,
                    "shard": name.shard,
                    "rows": count,
                    "loss": loss,
                    "usual": usual,
                    "named": named,
                }
            )
        return rows

    def restart(self) -> None:
        """Forget the levels of the channels (another stage); what is known of the shards stays."""
        self._windows = [np.empty(0) for _ in self.channels]

    def state(self) -> dict[str, Any]:
        """As plain values; shards without a row are left out."""
        seen = np.flatnonzero(self._rows).tolist()
        return {
            "format": STATE_FORMAT,
            "sources": {name: int(n) for name, n in zip(self._sources, np.diff(self._first).tolist(), strict=True)},
            "channels": self.channels,
            "shards": [
                [
                    number,
                    int(self._rows[number]),
                    float(self._loss[number]),
                    float(self._usual[number]),
                    self._wealth[:, number].tolist(),
                    self._named.get(number),
                    self._examples.get(number, []),
                ]
                for number in seen
            ],
            "windows": [window.tolist() for window in self._windows],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. Sources that were not there then begin with nothing known."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the shards' state has format {state.get('format')}, expected {STATE_FORMAT}")
        here = {name: number for number, name in enumerate(self._sources)}
        old_names = list(state["sources"])
        old_first = np.concatenate(([0], np.cumsum([state["sources"][name] for name in old_names])))
        for array in (self._rows, self._loss, self._usual, self._wealth):
            array[...] = 0
        self._named, self._examples = {}, {}
        for old, rows, loss, usual, wealth, named, examples in state["shards"]:
            source = int(np.searchsorted(old_first, old, side="right")) - 1
            shard = old - int(old_first[source])
            known = here.get(old_names[source])
            if known is None or shard >= self._first[known + 1] - self._first[known]:
                continue  # the source is no longer read, or has fewer shards now: packed anew
            number = int(self._first[known]) + shard
            self._rows[number], self._loss[number], self._usual[number] = rows, loss, usual
            self._wealth[:, number] = wealth
            if named is not None:
                self._named[number] = named
            if examples:
                self._examples[number] = [list(one) for one in examples]
        windows = dict(zip(state["channels"], state["windows"], strict=True))
        self._windows = [np.array(windows.get(channel, []), dtype=np.float64) for channel in self.channels]


def _median(values: np.ndarray) -> float:
    """The upper median; a fraction of the cost of np.median at this size."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2])
