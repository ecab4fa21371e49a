"""The ledger: errors of predictions, a correction shrunk to zero, an interval that covers."""

from __future__ import annotations

import math
import random

import pytest

from zero2all.common.jsonio import append_line
from zero2all.estimate.ledger import (
    PRIOR_SPREAD,
    correction,
    features_of,
    interval_factor,
    of_machine,
    percentile,
    read_entries,
    ridge,
    scoreboard,
)

KEY = {"device": "a card", "driver": "1"}


def entry(measured: float, predicted: float = 1.0, tokens: float = 8192, **more):
    return {
        "profile": KEY,
        "features": features_of(tokens, 1e9, 1, {"recompute": False}),
        "predicted": {"step": predicted, "memory": 10.0, "GEMM": predicted / 2},
        "intervals": {"step": [0.95 * predicted, 1.05 * predicted]},
        "measured": {"step": measured, "memory": 10.5, "GEMM": measured / 2},
        **more,
    }


def test_entries_survive_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "profiles" / "predictions.jsonl"
    append_line(path, entry(1.1))
    with open(path, "ab") as file:
        file.write(b'{"features": {"constant"')
    append_line(path, entry(1.2))
    assert [one["measured"]["step"] for one in read_entries(path)] == [1.1, 1.2]
    assert read_entries(tmp_path / "none.jsonl") == []


def test_a_correction_is_shrunk_to_zero_and_approaches_a_constant_bias():
    features = entry(1.0)["features"]
    assert correction([], "step", features) == 1.0
    few, many = (correction([entry(1.1)] * count, "step", features) for count in (1, 200))
    assert 1.0 < few < 1.05
    assert many == pytest.approx(1.1, rel=0.01)


def test_a_correction_never_hides_that_the_model_is_wrong():
    assert correction([entry(10.0)] * 100, "step", entry(1.0)["features"]) <= math.exp(0.25)


def test_ridge_solves_the_normal_equations():
    generator = random.Random(1)
    rows = [[1.0, generator.gauss(0, 1), generator.gauss(0, 1)] for _ in range(40)]
    values = [0.3 * a - 0.2 * b + 0.1 * c for a, b, c in rows]
    assert ridge(rows, values, 1e-9) == pytest.approx([0.3, -0.2, 0.1], abs=1e-6)
    weights = ridge(rows, values, 5.0)
    gradient = [
        sum(row[i] * (sum(w * x for w, x in zip(weights, row, strict=True)) - value) for row, value in
            zip(rows, values, strict=True)) + 5.0 * weights[i]
        for i in range(3)
    ]  # fmt: skip
    assert gradient == pytest.approx([0.0] * 3, abs=1e-9)


def test_the_interval_begins_at_the_prior_and_follows_the_errors():
    assert interval_factor([]) == pytest.approx(math.exp(1.645 * PRIOR_SPREAD))
    assert interval_factor([entry(1.0)] * 50) < interval_factor([]) < interval_factor([entry(1.3)] * 50)


def test_the_scoreboard_counts_errors_and_what_lies_inside():
    entries = [entry(measured) for measured in (1.0, 1.02, 1.04, 1.10)]
    step, memory, gemm = scoreboard(entries)
    assert (step.component, memory.component, gemm.component) == ("step", "memory", "GEMM")
    assert step.entries == 4
    assert step.inside == 0.75
    assert step.worst == pytest.approx(1 - 1 / 1.1)
    assert step.median == pytest.approx((1 - 1 / 1.02 + 1 - 1 / 1.04) / 2)
    assert step.bias < 0  # too fast
    assert memory.median == pytest.approx(1 - 10 / 10.5)
    assert gemm.inside is None


def test_each_entry_is_corrected_by_the_others_alone():
    alone = scoreboard([entry(1.2)])[0]
    assert alone.corrected_median == alone.median
    together = scoreboard([entry(1.2)] * 20)[0]
    assert together.corrected_median < together.median / 3


def test_other_drivers_do_not_correct_this_one():
    other = entry(1.2, profile={**KEY, "driver": "2"})
    assert of_machine([entry(1.0), other], KEY) == [entry(1.0)]


def test_percentiles_are_interpolated():
    assert percentile([1.0], 0.95) == 1.0
    assert percentile([0.0, 1.0, 2.0], 0.75) == 1.5
