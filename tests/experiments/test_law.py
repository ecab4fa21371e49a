"""The scaling law: known constants come back, intervals hold the truth, and a design that leaves it open is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from zero2all.common.errors import UsageError
from zero2all.estimate.run_calculators import LAWS
from zero2all.experiments.law import (
    UNLIMITED,
    Point,
    at,
    best_for,
    fit,
    flops_for_tokens,
    held_out_check,
    predicted,
    scaled_to,
    table_for_budget,
    worth,
)

TRUTH = LAWS["refit"]
SIZES = (20e6, 35e6, 56e6, 86e6, 126e6, 178e6)
BUDGETS = (2e8, 4e8, 8e8, 16e8, 32e8)
LADDER = [(n, tokens) for n in SIZES for tokens in BUDGETS]
FLOPS = 1e20


def measured(design: list[tuple[float, float]], noise: float = 0.0, seed: int = 0, unique: float = 1e12) -> list[Point]:
    """What runs of these sizes and tokens would give; those of a size are branches of one run."""
    random = np.random.default_rng(seed)
    plain = [Point(f"{n:.0f}", n, tokens, unique, 1.0) for n, tokens in design]
    return [replace(each, loss=predicted(TRUTH, each) * math.exp(noise * random.standard_normal())) for each in plain]


def test_exact_losses_give_the_constants_back():
    found = fit(measured(LADDER), resamples=0).law
    assert [found.E, found.alpha, found.beta] == pytest.approx([TRUTH.E, TRUTH.alpha, TRUTH.beta], rel=2e-3)
    assert pytest.approx(TRUTH.A, rel=1e-2) == found.A
    assert pytest.approx(TRUTH.B, rel=1e-2) == found.B


def test_noise_of_a_thousandth_gives_the_ratio_and_the_loss_of_the_reference():
    ratios, losses = [], []
    for seed in range(12):
        found = best_for(fit(measured(LADDER, 0.001, seed), resamples=0).law, FLOPS)
        ratios.append(found.tokens / found.n)
        losses.append(found.loss - best_for(TRUTH, FLOPS).loss)
    assert 20 < np.percentile(ratios, 10) < np.percentile(ratios, 90) < 26
    assert np.abs(losses).max() < 0.02


def test_one_run_that_failed_does_not_move_the_law():
    points = measured(LADDER, 0.001)
    points[7] = replace(points[7], loss=1.05 * points[7].loss)
    assert best_for(fit(points, resamples=0).law, FLOPS).loss == pytest.approx(best_for(TRUTH, FLOPS).loss, rel=0.006)


def test_most_intervals_hold_the_truth_and_the_same_points_give_the_same_interval():
    design, held = [(n, n * ratio) for n in (20e6, 60e6, 178e6) for ratio in (5, 20, 80)], []
    for seed in range(6):
        points = [replace(each, run=f"{place}") for place, each in enumerate(measured(design, 0.001, seed))]
        found = fit(points, resamples=20).intervals(lambda law: best_for(law, FLOPS))
        held += [found[name].low <= value <= found[name].high for name, value in vars(best_for(TRUTH, FLOPS)).items()]
    assert 0.6 < np.mean(held) <= 0.97  # 80 % of them are meant to
    assert found == fit(points, resamples=20).intervals(lambda law: best_for(law, FLOPS))


def test_noise_of_whole_runs_widens_the_interval():
    points, random = measured(LADDER, 0.0005, 1), np.random.default_rng(2)
    shift = {n: math.exp(0.003 * random.standard_normal()) for n in SIZES}
    moved = [replace(each, loss=each.loss * shift[each.n]) for each in points]

    def width(points: list[Point]) -> float:
        found = fit(points, resamples=30).intervals(lambda law: best_for(law, FLOPS))["loss"]
        return found.high - found.low

    assert width(moved) > 2 * width(points)


@pytest.mark.parametrize(
    ("design", "said"),
    [
        ([(n, 20 * n) for n in SIZES], r"per parameter that lie 4 times apart \(now 20 to 20\)"),
        ([(n, tokens) for n in SIZES[:2] for tokens in BUDGETS], r"models of 3 sizes, .* \(now 2\)"),
        ([(n, BUDGETS[0]) for n in SIZES], "each size with 2 numbers of tokens"),
        ([(20e6, 1e8), (60e6, 3e9), (178e6, 1e9)], r"6 finished runs \(now 3\)"),
        ([], r"(?s)models of 3 sizes.*6 finished runs \(now 0\)"),
    ],
)
def test_a_design_that_leaves_the_law_open_is_refused_with_what_to_add(design, said):
    with pytest.raises(UsageError, match=said):
        fit(measured(design))


def test_repeated_text_is_worth_less_as_published():
    assert worth(4e9, 1e9) == pytest.approx(3.7e9, rel=0.01)
    assert worth(16e9, 1e9) == pytest.approx(10.6e9, rel=0.01)
    assert worth(5e8, 1e9) == 5e8
    points = measured(LADDER, unique=5e8)
    assert fit(points, resamples=0).law.beta == pytest.approx(TRUTH.beta, rel=1e-2)
    few, many = best_for(TRUTH, FLOPS, 5e8), best_for(TRUTH, FLOPS)
    assert few.n > 1.5 * many.n
    assert few.loss > many.loss
    for n in (0.9 * few.n, 1.1 * few.n):
        assert at(TRUTH, n, FLOPS / (6 * n), 5e8).loss > few.loss


def test_the_largest_size_is_predicted_by_the_others():
    points = measured(LADDER, 0.001)
    checked = held_out_check(points)
    assert [point for point, _ in checked] == points[-5:]
    assert max(abs(value / point.loss - 1) for point, value in checked) < 0.01
    with pytest.raises(UsageError, match="3 sizes"):
        held_out_check(points[:15])


@pytest.mark.parametrize("unique", [UNLIMITED, 2e9])
def test_a_budget_buys_one_best_size_and_the_table_says_what_others_cost(unique):
    rows = table_for_budget(TRUTH, FLOPS, unique)
    best = rows[2]
    assert [row.n / best.n for row in rows] == [0.25, 0.5, 1, 2, 4]
    assert all(6 * row.n * row.tokens == pytest.approx(FLOPS) for row in rows)
    assert best.loss == min(row.loss for row in rows)
    assert best.flops_for_best == pytest.approx(FLOPS)
    for row in rows:
        if math.isfinite(row.flops_for_best):
            tokens = row.flops_for_best / (6 * row.n)
            assert at(TRUTH, row.n, tokens, unique).loss == pytest.approx(best.loss)
    assert math.isinf(rows[0].flops_for_best) == (unique == 2e9)  # no number of repetitions would do
    assert flops_for_tokens(TRUTH, best.tokens, unique) == pytest.approx(FLOPS, rel=0.02)


def test_how_far_a_budget_lies_beyond_the_runs():
    found = fit(measured(LADDER, 0.001), resamples=8)
    best = found.intervals(lambda law: best_for(law, FLOPS))
    assert found.within(best) == pytest.approx(max(best["n"].value / SIZES[-1], best["tokens"].value / BUDGETS[-1]))


def test_a_law_of_another_text_needs_one_pilot():
    pilots = [replace(each, loss=1.2 * each.loss) for each in measured(LADDER[:2])]
    found = scaled_to(TRUTH, pilots)
    assert found.loss(1e9, 2e10) == pytest.approx(1.2 * TRUTH.loss(1e9, 2e10))
    assert best_for(found, FLOPS).n == pytest.approx(best_for(TRUTH, FLOPS).n)
