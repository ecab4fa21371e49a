"""Verdicts on planted curves: which score over checkpoints is to be believed."""

import math

import numpy as np
import pytest

from zero2all.common.language import in_chinese
from zero2all.evals.judge import wilson
from zero2all.evals.signal import (
    CHANCE,
    LEAST_CHECKPOINTS,
    NOISE,
    SIGNAL,
    TOO_FEW,
    Point,
    ScoreCurve,
    curves_of,
    judge_curve,
)

STEPS = [100 * number for number in range(1, 13)]


def curve(values, name="tasks/quiz/accuracy", chance=None, half_width=None) -> ScoreCurve:
    intervals = [None if half_width is None else (value - half_width, value + half_width) for value in values]
    points = (Point(step, float(v), interval) for step, v, interval in zip(STEPS, values, intervals, strict=False))
    return ScoreCurve(name, tuple(points), chance)


def wobble(seed: int, size: float, count: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, count)


RISING = 0.3 + 0.4 * np.arange(12) / 11


def test_a_rising_curve_carries_signal_and_noise_and_chance_do_not():
    found = judge_curve(curve(RISING + wobble(0, 0.02), chance=0.25, half_width=0.03))
    assert found.verdict == SIGNAL, found
    assert found.spearman > 0.9
    assert found.signal_to_noise > 5
    assert "rises with the step" in found.reason
    assert "上升" in in_chinese(found.reason)
    assert judge_curve(curve(0.5 + wobble(0, 0.05), chance=0.25, half_width=0.02)).verdict == NOISE
    for half_width in (0.03, None):
        found = judge_curve(curve(0.25 + wobble(0, 0.01), chance=0.25, half_width=half_width))
        assert found.verdict == CHANCE
        assert "guessing gives 0.25" in found.reason


def test_a_falling_accuracy_gets_worse_and_falling_bits_per_byte_get_better():
    found = judge_curve(curve(RISING[::-1] + wobble(1, 0.01), chance=0.25))
    assert found.verdict == SIGNAL
    assert found.reason.endswith("the model gets worse at it")
    found = judge_curve(curve(2 * np.exp(-np.arange(12) / 4) + 1, name="held_out/en/bits_per_byte"))
    assert (found.verdict, found.spearman) == (SIGNAL, -1)
    assert "worse" not in found.reason


def test_a_constant_one_tells_no_checkpoint_from_another_and_uneven_steps_are_no_noise():
    found = judge_curve(curve([1.0] * 12, chance=0.25))
    assert (found.verdict, found.signal_to_noise) == (NOISE, 0.0)
    assert "the value is the same at every checkpoint" in found.reason
    assert judge_curve(curve([0.25] * 12, chance=0.25)).verdict == CHANCE
    assert judge_curve(curve([0.0] * 12)).verdict == NOISE
    uneven = tuple(Point(step, step / 1000) for step in (10, 20, 40, 500, 600, 900, 1000))
    found = judge_curve(ScoreCurve("x", uneven))
    assert found.verdict == SIGNAL
    assert found.noise < 1e-12


def test_too_few_checkpoints_allow_no_verdict_and_values_that_are_no_numbers_are_left_out():
    for count in range(LEAST_CHECKPOINTS):
        found = judge_curve(curve(RISING[:count]))
        assert (found.verdict, found.spearman) == (TOO_FEW, None)
    values = RISING.copy()
    values[3], values[7] = math.nan, math.inf
    found = judge_curve(curve(values))
    assert (found.verdict, found.checkpoints, found.left_out) == (SIGNAL, 10, 2)
    assert judge_curve(curve([math.nan] * 12)).verdict == TOO_FEW


def test_a_change_within_the_confidence_interval_is_said_and_one_of_fewer_than_four_items_is_luck():
    rising = 0.5 + 0.08 * np.arange(12) / 11
    found = judge_curve(curve(rising, half_width=0.1))
    assert found.verdict == SIGNAL
    assert "less than its confidence interval" in found.reason
    few = judge_curve(curve(rising, half_width=0.2))  # of about 24 items two changed
    assert few.verdict == NOISE
    assert "could be luck" in few.reason


ITEMS, DRAWS = 500, 60
PLACES = np.arange(10)
PLANTED = {
    "early plateau": [0.25, 0.80, 0.81, 0.79, 0.80, 0.80, 0.81, 0.79, 0.80, 0.80],
    "rise at the end": 0.25 + 0.18 * np.maximum(0, PLACES - 6),
    "jump at the end": np.where(PLACES < 8, 0.25, 0.6),
    "rise and collapse": np.where(PLACES < 8, np.minimum(0.25 + 0.1 * PLACES, 0.8), 0.25),
    "rise and fall": 0.25 + 0.55 * np.sin(np.pi * PLACES / 9),
    "steady rise": 0.3 + 0.4 * PLACES / 9,
}


def verdicts(abilities):
    """Of one curve for each row of abilities: each checkpoint answers the items anew."""
    right = np.random.default_rng(0).binomial(ITEMS, np.clip(abilities, 0, 1))
    found = []
    for row in right:
        points = (Point(step, count / ITEMS, wilson(count, ITEMS)) for step, count in zip(STEPS, row, strict=False))
        found.append(judge_curve(ScoreCurve("tasks/quiz/accuracy", tuple(points), 0.25)).verdict)
    return found


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_shape_is_found_in_nine_of_ten_draws(name):
    assert verdicts(np.tile(PLANTED[name], (DRAWS, 1))).count(SIGNAL) >= 0.9 * DRAWS


@pytest.mark.parametrize(("step", "is_sampled"), [(0.0, True), (0.05, False)], ids=str)
def test_flat_noise_and_random_walks_carry_no_signal_in_nine_of_ten_draws(step, is_sampled):
    walks = 0.5 + np.cumsum(np.random.default_rng(1).normal(0, step or 1e-9, (DRAWS, 10)), axis=1)
    exact = (judge_curve(curve(walk, half_width=0.044)).verdict for walk in walks)
    found = verdicts(walks) if is_sampled else list(exact)
    assert found.count(SIGNAL) <= 0.1 * DRAWS


def test_the_scores_of_reports_are_found_by_their_path_with_interval_and_chance():
    def report(step, accuracy):
        return {
            "step": step,
            "held_out": {"en": {"bits_per_byte": 2.0 - step / 100, "nats": 900.0}},
            "probes": {"accuracy": 0.5, "channels": {"zh": {"groups": {"capital": {"accuracy": accuracy}}}}},
            "pairs": {"channels": {"en": {"accuracy": 0.75, "interval": [0.7, 0.8], "kinds": {}}}},
            "tasks": [{"task": "quiz", "form": "cloze", "shots": 5, "chance": 0.25, "accuracy": accuracy}],
        }

    found = {curve.name: curve for curve in curves_of([report(10, 0.3), report(20, 0.4)])}
    chances = dict.fromkeys(("held_out/en/bits_per_byte", "probes/accuracy", "probes/zh/capital/accuracy"))
    chances |= {"pairs/en/accuracy": 0.5, "tasks/quiz/cloze/5-shot/accuracy": 0.25}
    assert {name: curve.chance for name, curve in found.items()} == chances
    assert found["pairs/en/accuracy"].points[0] == Point(10, 0.75, (0.7, 0.8))
    assert [point.value for point in found["tasks/quiz/cloze/5-shot/accuracy"].points] == [0.3, 0.4]
