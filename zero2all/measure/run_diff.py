"""Two runs side by side: what differs in config, code and machine, and in speed, memory and loss at equal tokens.

A difference is judged beside the noise inside each run (standard errors from blocks of rows). Noise between runs that
differ in nothing but their seed is larger for the loss, and only a repeated run shows it.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero2all.config import flat_values
from zero2all.measure.run_record import Figure, RunRecord, figure_of
from zero2all.track.reader import Series

SIGNIFICANT = 3.0
"""Standard errors of the difference."""
GIB = 2**30
WINDOW = 0.1
"""The loss is compared over the last part of the tokens that both runs saw."""
LEAST_POINTS = 8
OPERATORS = re.compile(r"^ops: (.*)$")
NOT_CONFIG = ("train.name",)


@dataclass(frozen=True)
class Compared:
    """One figure of both runs."""

    name: str
    first: float
    second: float
    error: float  # standard error of second - first; NaN where nothing tells
    is_lower_better: bool

    @property
    def change(self) -> float:
        """Of the second run, relative to the first; NaN beside a first of 0."""
        if self.first == self.second:
            return 0.0
        return (self.second - self.first) / abs(self.first) if self.first else math.nan

    @property
    def verdict(self) -> str:
        """Better, worse, within noise, or that the noise is unknown."""
        if self.second == self.first:
            return "equal"
        if math.isnan(self.error):
            return "noise unknown"
        if abs(self.second - self.first) <= SIGNIFICANT * self.error:
            return "within noise"
        return "better" if (self.second < self.first) == self.is_lower_better else "worse"


@dataclass(frozen=True)
class RunDiff:
    """Everything that differs."""

    first: RunRecord
    second: RunRecord
    config: list[tuple[str, Any, Any]]
    machine: list[tuple[str, Any, Any]]  # also versions and operators
    figures: list[Compared]
    loss_tokens: tuple[int, int] | None  # the window in which losses are compared


def diff_runs(first: RunRecord, second: RunRecord) -> RunDiff:
    """Compare two runs."""
    pair = (first, second)
    settings = [{k: v for k, v in flat_values(each.values).items() if k not in NOT_CONFIG} for each in pair]
    machines = [{**each.environment, **_version(each), **_operators(each)} for each in pair]
    window, losses = _losses(first, second)
    return RunDiff(
        first,
        second,
        _differences(settings[0], settings[1]) if first.values and second.values else [],
        _differences(machines[0], machines[1]),
        [*_speeds(first, second), *_memory(first, second), *losses],
        window,
    )


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _version(record: RunRecord) -> dict[str, Any]:
    """The version of the program, from the newest checkpoint."""
    for path in sorted((record.reader.folder / "checkpoints").glob("step-*/manifest.json"), reverse=True):
        try:
            return {"zero2all": json.loads(path.read_bytes())["zero2all"]}
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return {}


def _operators(record: RunRecord) -> dict[str, str]:
    """Operator -> the implementation that ran, from what the run said at its start."""
    found = next((match[1] for note in record.notes if (match := OPERATORS.match(note))), "")
    pairs = (each.partition("=") for each in found.split(", ") if "=" in each)
    return {f"ops.{name}": chosen for name, _, chosen in pairs}


def _speeds(first: RunRecord, second: RunRecord) -> list[Compared]:
    found = []
    if first.speed is not None and second.speed is not None:
        found.append(_compared("tokens/s", first.speed, second.speed, is_lower_better=False))
        mfus = first.mfu(), second.mfu()
        if mfus[0] is not None and mfus[1] is not None:
            errors = [
                m * speed.error / speed.value for m, speed in zip(mfus, (first.speed, second.speed), strict=True) if m
            ]
            found.append(Compared("MFU, % (palm)", 100 * mfus[0], 100 * mfus[1], 100 * math.hypot(*errors), False))
    for part in ("step", *(part for part in first.parts if part in second.parts)):
        values = [each.steady_values(f"time/{part}") for each in (first, second)]
        if all(len(each) for each in values):
            mine, yours = (figure_of(1e3 * each) for each in values)
            if max(mine.value, yours.value) >= 0.1:  # ms: shorter ones are of no interest
                found.append(_compared(f"{part}, ms (median)", mine, yours, is_lower_better=True))
    return found


def _compared(name: str, first: Figure, second: Figure, is_lower_better: bool) -> Compared:
    return Compared(name, first.value, second.value, math.hypot(first.error, second.error), is_lower_better)


def _memory(first: RunRecord, second: RunRecord) -> list[Compared]:
    found = []
    for name in ("peak", "reserved"):
        sizes = first.memory(name), second.memory(name)
        if sizes[0] is not None and sizes[1] is not None:
            # The allocator counts bytes: one run repeats them exactly, so any difference is one.
            found.append(Compared(f"{name} memory, GiB", sizes[0] / GIB, sizes[1] / GIB, 0.0, True))
    return found


def _losses(first: RunRecord, second: RunRecord) -> tuple[tuple[int, int] | None, list[Compared]]:
    """Losses at equal tokens: means over a window for what every step logs, single values for evaluations."""
    pair = (first.reader.series("loss"), second.reader.series("loss"))
    if not all(len(each) for each in pair):
        return None, []
    end = int(min(each.tokens[-1] for each in pair))
    window = (int((1 - WINDOW) * end), end)
    shared = [name for name in first.reader.metrics() if name in second.reader.metrics()]
    found = []
    for name in shared:
        points = first.reader.series(name), second.reader.series(name)
        if name == "loss" or name.startswith("loss/"):
            found.append(_mean_loss(name, *points, window))
        elif name.startswith("eval/"):
            found.append(_single(name, *points))
    return window, [each for each in found if each is not None]


def _mean_loss(name: str, first: Series, second: Series, window: tuple[int, int]) -> Compared | None:
    """Paired where both logged the same tokens, so that what the data does to both drops out."""
    inside = [each.take((each.tokens > window[0]) & (each.tokens <= window[1])) for each in (first, second)]
    inside = [each.take(np.isfinite(each.value)) for each in inside]
    if not all(len(each) for each in inside):
        return None
    _, mine, yours = np.intersect1d(inside[0].tokens, inside[1].tokens, return_indices=True)
    if len(mine) >= LEAST_POINTS:
        values = inside[0].value[mine], inside[1].value[yours]
        error = _error_of_mean(values[1] - values[0])
    else:
        values = inside[0].value, inside[1].value
        error = math.hypot(*(_error_of_mean(each) for each in values))
    return Compared(f"{name} (mean of the window)", float(values[0].mean()), float(values[1].mean()), error, True)


def _error_of_mean(values: Any) -> float:
    if len(values) < LEAST_POINTS:
        return math.nan
    means = [block.mean() for block in np.array_split(values, min(10, len(values) // 2))]
    return float(np.std(means, ddof=1) / math.sqrt(len(means)))


def _single(name: str, first: Series, second: Series) -> Compared | None:
    """The last value that both have at the same number of tokens."""
    tokens, mine, yours = np.intersect1d(first.tokens, second.tokens, return_indices=True)
    if not len(tokens):
        return None
    words = f"{name} at {int(tokens[-1]):,} tokens"
    is_lower_better = any(word in name for word in ("loss", "bpb", "perplexity"))
    return Compared(words, float(first.value[mine[-1]]), float(second.value[yours[-1]]), math.nan, is_lower_better)


def as_json(diff: RunDiff) -> dict[str, Any]:
    """Everything of the comparison, for programs."""
    figures = [{**vars(each), "change": each.change, "verdict": each.verdict} for each in diff.figures]
    return {
        "runs": [diff.first.name, diff.second.name],
        "config": diff.config,
        "machine": diff.machine,
        "figures": figures,
        "loss_tokens": diff.loss_tokens,
        "missing": [diff.first.missing, diff.second.missing],
    }
