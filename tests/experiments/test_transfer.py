"""Rates for a large model: the minimum of a parabola at each size, and a line through the minima."""

import math

import pytest

from zero2all.common.errors import UsageError
from zero2all.config import load_config
from zero2all.experiments.study import Study
from zero2all.experiments.transfer import best_factor, place_of_factors, transfer, transferred_overrides

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def bowl(best, factor):
    return 3 + 0.1 * (math.log2(factor) - best) ** 2


@pytest.mark.parametrize("best", [-0.6, 0.0, 1.2])
def test_the_minimum_of_a_parabola_is_found_between_the_factors_and_an_end_is_none(best):
    assert best_factor({factor: bowl(best, factor) for factor in FACTORS}) == (pytest.approx(best), True)
    assert best_factor({factor: bowl(9, factor) for factor in FACTORS}) == (2.0, False)


@pytest.fixture
def measured(work, sweep_of):
    """A sweep over sizes and factors, and what was found where log2 of the best is best(doublings of the size)."""

    def make(best):
        sweep = sweep_of("size=1M,2M,4M", "optim.lr_max=x0.25,x0.5,x1,x2,x4", seeds=2)
        sweep.study = Study(work, "s")
        for trial in sweep.trials:
            size, factor = trial.settings
            loss = bowl(best(math.log2(size / 1e6)) + 0.02 * (trial.seed - 0.5), factor)
            sweep.study.results[trial.run] = {"bits_per_byte": loss, "parameters": {"matmul": int(size)}}
        return sweep

    return make


def test_a_line_through_the_minima_is_followed_to_the_large_model(measured):
    found = transfer(measured(lambda doublings: 0.5 - 0.25 * doublings), 16e6)
    assert found.factor == pytest.approx(2**-0.5)
    assert found.words[0].startswith("1.0M parameters in products: best optim.lr_max x1.41 (")
    large = load_config("z2all-100m")
    assert transferred_overrides(large, found) == [f"--optim.lr_max={large.optim.lr_max * found.factor:.4g}"]


def test_it_stays_within_the_factors_that_were_tried_and_warns_where_it_is_far(measured):
    found = transfer(measured(lambda doublings: 1.0 - doublings), 400e6)
    assert found.factor == 0.25
    assert found.words[-1].startswith("this is 100 times the largest size tried: confirm it")


def test_what_failed_is_left_out_and_sweeps_that_say_nothing_are_refused(measured, sweep_of):
    sweep = measured(lambda _: 0.5)
    failed = {trial.run: {"failed": "not finite"} for trial in sweep.trials}
    sweep.study.results |= {trial.run: failed[trial.run] for trial in sweep.trials if trial.settings[0] > 1e6}
    assert transfer(sweep, 8e6).factor == pytest.approx(2**0.5, rel=1e-3)
    sweep.study.results = failed
    with pytest.raises(UsageError, match="no size has two factors"):
        transfer(sweep, 8e6)
    for axes in (["optim.lr_max=x1,x2"], ["size=1M", "optim.lr_max=1e-3,2e-3"]):
        with pytest.raises(UsageError, match="--transfer needs a sweep over sizes and over factors"):
            place_of_factors(sweep_of(*axes).plan.axes)
