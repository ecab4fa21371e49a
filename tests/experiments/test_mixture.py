"""Mixtures: proposals within their caps, a choice near the best there is, and honest words about it."""

import numpy as np
import pytest

from zero2all.common.errors import UsageError
from zero2all.experiments.mixture import Trial, caps_for, choose, propose

NATURAL = {"en": 0.7, "zh": 0.2, "code": 0.1}
FLOORS = np.array([0.8, 0.9, 0.5])
SLOPES = np.array([[-2.5, 0.1, -0.3], [0.1, -3.0, 0.2], [-0.4, 0.1, -2.0]])  # own text helps


def truth(mixture: dict[str, float]) -> np.ndarray:
    shares = np.array(list(mixture.values()))
    return FLOORS[: len(shares)] + np.exp(SLOPES[: len(shares), : len(shares)] @ shares - 0.9)


def tried(mixtures: list[dict[str, float]], noise: float, seed: int = 0) -> list[Trial]:
    random = np.random.default_rng(seed)
    scores = (truth(each) * np.exp(noise * random.standard_normal(len(each))) for each in mixtures)
    return [Trial(each, dict(zip(each, values, strict=True))) for each, values in zip(mixtures, scores, strict=True)]


def best_of(count: int, caps: dict[str, float], seed: int = 5) -> float:
    drawn = np.random.default_rng(seed).dirichlet(np.ones(3), 40 * count)
    allowed = [row for row in drawn if all(row <= [caps.get(name, 1.0) for name in NATURAL])][:count]
    return min(truth(dict(zip(NATURAL, row, strict=True))).mean() for row in allowed)


def objective(found: dict) -> float:
    return truth({name: each.value for name, each in found.items()}).mean()


def test_proposals_are_spread_reach_one_keep_to_the_caps_and_repeat():
    caps = {"zh": 0.3}
    mixtures = propose(NATURAL, caps=caps)
    assert len(mixtures) == 3 * 3 + 3
    assert mixtures == propose(NATURAL, caps=caps) != propose(NATURAL, caps=caps, seed=1)
    assert mixtures[0] == pytest.approx(NATURAL, abs=1e-5)
    for each in mixtures:
        assert sum(each.values()) == pytest.approx(1)
        assert min(each.values()) >= 0.01 - 1e-12
        assert each["zh"] <= 0.3 + 1e-12
    assert max(each["code"] for each in mixtures) > 0.6
    assert len(propose(NATURAL, count=2)) == 2


def test_a_source_may_be_read_four_times_and_sources_must_fill_the_run():
    caps = caps_for({"en": 1e9, "zh": 1e8, "code": 5e7}, 2e9)
    assert caps == pytest.approx({"en": 1.0, "zh": 0.2, "code": 0.1})
    with pytest.raises(UsageError, match="at most en 20%, zh 2%, code 1%, not a whole run"):
        propose(NATURAL, caps=caps_for({"en": 1e9, "zh": 1e8, "code": 5e7}, 2e10))


@pytest.mark.parametrize("caps", [{}, {"zh": 0.3, "code": 0.25}])
@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_the_choice_is_as_good_as_the_best_of_200_mixtures_within_the_caps(noise, caps):
    for seed in range(3):
        found = choose(tried(propose(NATURAL, seed=seed, caps=caps), noise, seed), caps)
        assert objective(found.mixture) < 1.005 * best_of(200, caps)
        assert all(found.mixture[name].value <= cap + 1e-9 for name, cap in caps.items())
        assert sum(each.value for each in found.mixture.values()) == pytest.approx(1)
        assert all(each.low - 1e-3 <= each.value <= each.high + 1e-3 for each in found.mixture.values())


def test_the_surrogate_says_how_well_it_orders_runs_it_did_not_see():
    found = choose(tried(propose(NATURAL), 0.002))
    assert found.rank_correlation > 0.9
    assert 0.0005 < found.error < 0.006
    names, random = list(NATURAL), np.random.default_rng(0)
    noise = [
        Trial(each, dict(zip(names, 1 + 0.01 * random.standard_normal(3), strict=True))) for each in propose(NATURAL)
    ]
    said = " ".join(choose(noise).words())
    assert "less than the surrogate's own error" in said
    assert "orders the runs badly" in said


def test_most_predicted_intervals_hold_what_the_choice_is_worth():
    found = [choose(tried(propose(NATURAL, seed=seed), 0.004, seed)) for seed in range(8)]
    assert sum(each.objective.low <= objective(each.mixture) <= each.objective.high for each in found) >= 5


def test_weights_of_channels_move_the_choice_to_what_counts():
    trials = tried(propose(NATURAL), 0.001)
    equal, coded = choose(trials), choose(trials, weights={"en": 0.1, "zh": 0.1, "code": 1.0})
    assert coded.mixture["code"].value > equal.mixture["code"].value + 0.1


def test_two_channels_and_one_that_no_mixture_changes():
    two = choose(tried(propose({"en": 0.9, "zh": 0.1}), 0.002))
    grid = [truth({"en": share, "zh": 1 - share}).mean() for share in np.linspace(0.01, 0.99, 99)]
    assert objective(two.mixture) < 1.003 * min(grid)
    flat = [Trial(each.mixture, {**each.bits_per_byte, "code": 0.7}) for each in tried(propose(NATURAL), 0.001)]
    assert choose(flat).mixture["code"].value < 0.2  # nothing is gained by it


def test_too_few_runs_are_refused_with_how_many_to_try():
    with pytest.raises(UsageError, match="4 runs are too few for 3 sources: try 12 mixtures"):
        choose(tried(propose(NATURAL), 0.0)[:4])
