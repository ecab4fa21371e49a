"""The rules for spikes, recomputed from the curve alone."""

from __future__ import annotations

import numpy as np

from zero2all.track.series import Series
from zero2all.track.spikes import WINDOW, find_spikes


def curve(values: np.ndarray) -> Series:
    steps = np.arange(len(values))
    return Series(steps, values, steps * 10, steps.astype(float))


def noise(count: int = 20_000) -> np.ndarray:
    return 2.0 + np.random.default_rng(0).normal(0, 0.05, count)


def test_each_spike_is_found_once_with_what_it_was_compared_to():
    values = noise()
    values[[5_000, 12_345]] = [4.0, 3.0]
    found = find_spikes(curve(values))
    assert [spike.step for spike in found] == [5_000, 12_345]
    assert found[0].rules == ("sigma", "mad")
    assert (found[0].value, found[0].tokens, found[0].time) == (4.0, 50_000, 5_000.0)
    assert found[0].mean == np.mean(values[5_000 - WINDOW : 5_000])
    assert found[0].mad == np.median(np.abs(values[4872:5000] - np.median(values[4872:5000])))


def test_the_result_is_that_of_the_rules_applied_to_every_point():
    values = noise(3_000) + np.linspace(3, 0, 3_000)
    rng = np.random.default_rng(3)
    places = rng.integers(200, 3_000, 60)
    values[places] += rng.uniform(0.1, 1.0, 60)
    expected = []
    for place in range(WINDOW, len(values)):
        before = values[place - WINDOW : place]
        mad = np.median(np.abs(before - np.median(before)))
        by_sigma = values[place] > before.mean() + 6 * before.std()
        by_mad = values[place] > np.median(before) + 7 * 1.4826 * mad
        if by_sigma or by_mad:
            expected.append((place, ("sigma",) * bool(by_sigma) + ("mad",) * bool(by_mad)))
    assert 20 < len(expected) < 60
    assert [(spike.step, spike.rules) for spike in find_spikes(curve(values))] == expected


def test_the_later_spikes_of_a_burst_are_found_by_the_median():
    values = noise()
    values[1_000:1_008] = 5.0
    found = find_spikes(curve(values))
    assert [spike.step for spike in found] == list(range(1_000, 1_008))
    assert found[-1].rules == ("mad",)


def test_noise_a_falling_curve_and_a_constant_have_none():
    falling = 5 / np.sqrt(1 + np.arange(20_000) / 50) + noise()
    rising_and_constant = np.concatenate([np.linspace(0, 3e-4, 2_000), np.full(5_000, 3e-4)])
    for values in (noise(100_000), falling, rising_and_constant, np.full(1_000, 0.1), noise(WINDOW)):
        assert find_spikes(curve(values)) == []


def test_values_that_are_not_finite_are_passed_over():
    values = noise(1_000)
    values[400:420] = np.nan
    values[500] = np.inf
    values[425] = 4.0
    assert [spike.step for spike in find_spikes(curve(values))] == [425]
