"""The ledger of predictions: what was predicted, what was measured, and how wrong predictions are on this machine.

Every verified prediction is one JSON line. Two things are learned from them:

    correction   for each component a ridge regression of log(measured / predicted) on a few features of the run. It is
                 shrunk to zero: with few entries it changes little. Raw and corrected always stand side by side.
    interval     the estimate times exp(±1.645 s): s² is the mean squared log error of the ledger, to which a spread of
                 5 % is added as if it had been seen eight times. It is meant to cover 90 % of all runs.

The scoreboard judges a correction only on entries that it was not fitted on: each is corrected by all others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.jsonio import whole_lines

Entry = dict[str, Any]
STEP, MEMORY = "step", "memory"
SHRINKAGE = 4.0  # as many entries as are needed to halve what the features explain
PRIOR_SPREAD, PRIOR_ENTRIES = 0.05, 8
NORMAL_90 = 1.645
MOST_CORRECTION = 0.25  # in logarithms: a correction beyond it would hide that the model of time is wrong


def read_entries(path: Path) -> list[Entry]:
    """All entries."""
    return [entry for entry in whole_lines(path) if {"features", "predicted", "measured"} <= entry.keys()]


def of_machine(entries: Sequence[Entry], key: Mapping[str, str]) -> list[Entry]:
    """The entries of the same device; other drivers and versions are left out of corrections, not of the ledger."""
    return [entry for entry in entries if entry.get("profile") == dict(key)]


# ---- correction ------------------------------------------------------------------------------------------------------


def features_of(tokens: float, parameters: float, passes: float, flags: Mapping[str, bool]) -> dict[str, float]:
    """What a residual may depend on, scaled so that one is a large step."""
    return {
        "constant": 1.0,
        "tokens": math.log2(max(1.0, tokens) / 8192) / 4,
        "parameters": math.log2(max(1.0, parameters) / 1e9) / 4,
        "passes": math.log2(max(1.0, passes)) / 4,
        **{name: float(value) for name, value in sorted(flags.items())},
    }


def residual(entry: Entry, component: str) -> float | None:
    """log(measured / predicted) of a component; None where one of them is missing or zero."""
    predicted, measured = entry["predicted"].get(component), entry["measured"].get(component)
    if not predicted or not measured or predicted <= 0 or measured <= 0:
        return None
    return math.log(measured / predicted)


def correction(entries: Sequence[Entry], component: str, features: Mapping[str, float]) -> float:
    """The factor on a prediction with these features, learned from the entries; 1.0 from none."""
    rows = [(entry["features"], found) for entry in entries if (found := residual(entry, component)) is not None]
    if not rows:
        return 1.0
    names = sorted(features)
    weights = ridge([[row.get(name, 0.0) for name in names] for row, _ in rows], [found for _, found in rows])
    shift = sum(weight * features[name] for weight, name in zip(weights, names, strict=True))
    return math.exp(max(-MOST_CORRECTION, min(MOST_CORRECTION, shift)))


def ridge(rows: Sequence[Sequence[float]], values: Sequence[float], shrinkage: float = SHRINKAGE) -> list[float]:
    """Weights w that minimise |rows w - values|² + shrinkage |w|²."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) + (shrinkage if i == j else 0.0) for j in range(size)]
              for i in range(size)]  # fmt: skip
    right = [sum(row[i] * value for row, value in zip(rows, values, strict=True)) for i in range(size)]
    for i in range(size):  # elimination; the matrix is positive definite, so no row has to be exchanged
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            right[j] -= factor * right[i]
            for k in range(i, size):
                matrix[j][k] -= factor * matrix[i][k]
    weights = [0.0] * size
    for i in reversed(range(size)):
        weights[i] = (right[i] - sum(matrix[i][j] * weights[j] for j in range(i + 1, size))) / matrix[i][i]
    return weights


def interval_factor(entries: Sequence[Entry], component: str = STEP) -> float:
    """exp(1.645 s): the estimate divided and multiplied by it is the 90 % interval."""
    squares = [found**2 for entry in entries if (found := residual(entry, component)) is not None]
    mean = (PRIOR_ENTRIES * PRIOR_SPREAD**2 + sum(squares)) / (PRIOR_ENTRIES + len(squares))
    return math.exp(NORMAL_90 * math.sqrt(mean))


# ---- scoreboard ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The errors of one component over the ledger; error = predicted / measured - 1."""

    component: str
    entries: int
    median: float  # of the absolute errors
    worst: float
    percentile_95: float
    bias: float  # median of the signed errors
    corrected_median: float  # each entry corrected by all others
    corrected_percentile_95: float
    inside: float | None  # share of measurements inside the interval that was printed for them


def scoreboard(entries: Sequence[Entry]) -> list[Score]:
    """One score for each component that was ever measured: step and memory first, then in alphabetical order."""
    names = {name for entry in entries for name in entry["measured"]}
    found = []
    for name in sorted(names, key=lambda one: (one not in (STEP, MEMORY), one != STEP, one)):
        rows = [(number, error) for number, entry in enumerate(entries) if (error := residual(entry, name)) is not None]
        if rows:
            found.append(_score(name, entries, rows))
    return found


def _score(name: str, entries: Sequence[Entry], rows: Sequence[tuple[int, float]]) -> Score:
    raw = [math.exp(-error) - 1.0 for _, error in rows]
    corrected = []
    for number, error in rows:
        others = [entry for other, entry in enumerate(entries) if other != number]
        of_same = of_machine(others, entries[number].get("profile", {}))
        corrected.append(math.exp(-error) * correction(of_same, name, entries[number]["features"]) - 1.0)
    asked = [entries[number] for number, _ in rows if name in entries[number].get("intervals", {})]
    inside = [low <= entry["measured"][name] <= high for entry in asked for low, high in [entry["intervals"][name]]]
    absolute, better = sorted(map(abs, raw)), sorted(map(abs, corrected))
    return Score(
        component=name,
        entries=len(rows),
        median=statistics.median(absolute),
        worst=absolute[-1],
        percentile_95=percentile(absolute, 0.95),
        bias=statistics.median(raw),
        corrected_median=statistics.median(better),
        corrected_percentile_95=percentile(better, 0.95),
        inside=sum(inside) / len(inside) if inside else None,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, interpolated between neighbours."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
