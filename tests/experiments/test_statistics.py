"""What a few seeds say: Student's t as in tables, pairs before lone runs, and no winner where all are equal."""

import math
import random
from statistics import fmean

import numpy as np
import pytest

from zero2all.experiments.statistics import (
    compare,
    compare_with_best,
    incomplete_beta,
    mean_interval,
    refit_scale,
    seeds_needed,
    t_quantile,
    two_sided_p,
)


def test_t_and_the_beta_function_are_those_of_tables():
    for degrees, quantile in ((1, 12.706204736432), (2, 4.302652729749), (10, 2.228138851965), (30, 2.042272456301)):
        assert t_quantile(degrees) == pytest.approx(quantile, rel=1e-9)
        assert two_sided_p(quantile, degrees) == pytest.approx(0.05, rel=1e-9)
    x = np.linspace(-3.0, 3.0, 60_001)  # half a degree, as Welch's may have, summed up
    shape = (1 + x**2 / 4.5) ** (-2.75) * math.gamma(2.75) / math.gamma(2.25) / math.sqrt(4.5 * math.pi)
    assert two_sided_p(3.0, 4.5) == pytest.approx(1 - np.diff(x) @ (shape[1:] + shape[:-1]) / 2, rel=1e-6)
    for t in (0.01, 1.0, 7.0, 50.0):
        assert two_sided_p(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9)
        assert two_sided_p(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-9)
    assert two_sided_p(1.9599639845, 1e5) == pytest.approx(0.05, rel=1e-4)
    assert incomplete_beta(2, 3, 0.3) == pytest.approx(1 - 0.7**4 - 4 * 0.3 * 0.7**3, rel=1e-12)
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says_and_one_value_has_none():
    draw = random.Random(0)
    intervals = [mean_interval([draw.gauss(3.0, 0.01) for _ in range(4)]) for _ in range(400)]
    assert 0.92 < fmean(interval.low <= 3.0 <= interval.high for interval in intervals) < 0.98
    assert mean_interval([1.5]).high == math.inf


def test_common_seeds_are_compared_as_pairs_and_others_by_welch():
    narrow = {1: 3.010, 2: 3.051, 3: 3.101}
    wide = {seed: loss - 0.005 - 0.001 * (seed == 2) for seed, loss in narrow.items()}
    paired = compare(narrow, wide)
    assert paired.is_paired
    assert paired.is_significant
    assert paired.difference.low < 0.0053 < paired.difference.high
    alone = compare(narrow, {seed + 10: loss for seed, loss in wide.items()})
    assert (alone.is_paired, alone.is_significant) == (False, False)
    assert alone.p == pytest.approx(0.8936, abs=1e-3)


def test_a_person_hears_what_was_found_and_how_many_seeds_would_show_it():
    base = {1: 3.000, 2: 3.004, 3: 2.996}
    assert compare(base, {seed: loss + 0.1 + 0.001 * seed for seed, loss in base.items()}).words("a", "b") == (
        "a is better than b by 0.102 (p 3.2e-05, seeds: 3)."
    )
    said = compare(base, {1: 3.001, 2: 3.001, 3: 3.003}).words("a", "b")
    assert "a difference of 0.001667 is not significant (p 0.62, seeds: 3)" in said
    assert "about 72 seeds each would show it" in said
    assert "one seed says nothing" in compare({1: 3.0}, {1: 3.1}).words("a", "b")
    assert compare(base, base).words("a", "b") == ("a against b: a difference of 0 is not significant (p 1, seeds: 3).")


def test_seeds_needed_are_those_of_the_reference():
    assert [seeds_needed(0.0019, d, is_paired=False) for d in (0.002, 0.005)] == [15, 3]
    assert seeds_needed(0.01, 0.005, is_paired=False) == 63
    assert seeds_needed(0.01, 0.005) == 32
    assert seeds_needed(0.01, 0.0) == 10_000


def test_the_best_of_twenty_equal_settings_is_no_winner_and_a_real_one_is():
    draw, winners = random.Random(1), 0
    for _ in range(60):
        losses = {str(n): {seed: draw.gauss(3.0, 0.01) for seed in range(3)} for n in range(20)}
        winners += any(found.is_significant for found in compare_with_best(losses)[1].values())
    assert winners <= 4
    losses["good"] = {seed: 2.5 + 0.0001 * seed for seed in range(3)}
    best, found = compare_with_best({"good": losses["good"], "0": {seed: 3.0 + 0.0003 * seed for seed in range(3)}})
    assert (best, found["0"].is_significant) == ("good", True)
    assert compare_with_best(losses)[0] == "good"


def test_few_residuals_are_scaled_more():
    assert refit_scale(1000, 5) == pytest.approx(1.0, abs=0.01)
    assert refit_scale(9, 5) > 1.7
