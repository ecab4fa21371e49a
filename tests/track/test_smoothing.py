"""Smoothing must not bend the start, spread a NaN, or let one spike spoil what lies far from it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from zero2all.track.smoothing import KINDS, LARGEST_WIDTH, Smoothing, smooth, smoothing_of

EVERY = [Smoothing(kind, width) for kind in KINDS for width in (1.5, 4, 9, 60, 500)]


def plain(values: np.ndarray, how: Smoothing) -> np.ndarray:
    """What the docstring promises, one point after the other."""
    count = len(values)
    result = np.full(count, np.nan)
    places = np.arange(count)
    for place in range(count):
        if how.kind == "ema":
            is_near = (places <= 2 * place) & np.isfinite(values)
            weights = (1 - 1 / how.width) ** np.abs(places - place)[is_near]
            result[place] = weights @ values[is_near] / weights.sum() if weights.sum() else np.nan
        elif how.kind == "window":
            half = min(round((how.width - 1) / 2), place, count - 1 - place)
            part = values[place - half : place + half + 1]
            result[place] = np.mean(part[np.isfinite(part)]) if np.isfinite(part).any() else np.nan
    return result


@pytest.mark.parametrize("kind", ["ema", "window"])
@pytest.mark.parametrize("width", [1.0, 1.5, 2, 7, 40, 1000])
def test_the_fast_way_is_the_plain_way(kind, width):
    values = np.random.default_rng(1).normal(3.0, 1.0, 700)
    values[[0, 5, 6, 300]] = np.nan
    values[100] = np.inf
    exactness = 1e-3 if kind == "ema" else 1e-9  # neighbours ahead count by themselves after eight widths
    how = Smoothing(kind, width)
    np.testing.assert_allclose(smooth(values, how), plain(values, how), rtol=exactness)


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_a_constant_stays_a_constant_from_the_first_point_on(how):
    np.testing.assert_allclose(smooth(np.full(1000, 2.5), how), 2.5, rtol=1e-12)


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_nan_and_infinity_weigh_nothing(how):
    values = np.full(1000, 2.5)
    values[[0, 17, 400, 999]] = [np.nan, np.inf, -np.inf, np.nan]
    smoothed = smooth(values, how)
    finite = np.isfinite(smoothed)
    np.testing.assert_allclose(smoothed[finite], 2.5, rtol=1e-12)
    assert finite[500]
    assert finite.sum() >= 996  # only a window of nothing but such a value has no mean


@pytest.mark.parametrize("how", [each for each in EVERY if each.kind != "ema"], ids=str)
def test_a_spike_of_1e30_leaves_no_noise_on_values_out_of_its_reach(how):
    values = np.full(20_000, 1.0)
    values[100] = 1e30
    np.testing.assert_allclose(smooth(values, how)[10_000:], 1.0, rtol=1e-12)


@pytest.mark.parametrize("kind", ["window", "median"])
def test_a_slope_is_not_bent_at_the_ends(kind):
    slope = np.linspace(5.0, 1.0, 400)
    np.testing.assert_allclose(smooth(slope, Smoothing(kind, 101)), slope, rtol=1e-9)


def test_the_median_ignores_a_single_spike_and_the_wide_gaussian_is_one():
    values = np.zeros(5_000)
    values[2_500] = 100.0
    assert smooth(values, Smoothing("median", 9)).max() == 0
    sigma = 100.0
    bell = 100.0 * np.exp(-0.5 * ((np.arange(5_000) - 2_500) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(smooth(values, Smoothing("gaussian", sigma)), bell, atol=0.04 * bell.max())


@pytest.mark.parametrize("how", EVERY, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_short_and_empty_curves_are_smoothed_too(how, count):
    assert len(smooth(np.ones(count), how)) == count
    assert np.isnan(smooth(np.full(count, np.nan), how)).all()


@pytest.mark.parametrize("count", [50, 60, 120, 400])
def test_the_exponential_mean_of_a_falling_run_does_not_lie_above_its_points(count):
    values = 2 + 3 * 0.97 ** np.arange(count) + 0.02 * np.random.default_rng(2).normal(size=count)
    how = smoothing_of(values, Smoothing("ema", 10))
    assert how is not None
    smoothed = smooth(values, how)
    assert smoothed[0] == values[0]
    assert (smoothed < values).mean() > 0.2
    assert np.abs(smoothed - values).max() < 0.11
    assert abs(smoothed[-1] - values[-1]) < 0.05, "the newest figure, which is read most"


def test_fewer_than_fifty_points_are_not_smoothed():
    how = Smoothing("ema", 10)
    assert smoothing_of(np.ones(200), how) == how
    assert smoothing_of(np.ones(50), how) == Smoothing("ema", 2.5), "at most a twentieth of the points"
    assert smoothing_of(np.ones(49), how) is None
    assert smoothing_of(np.append(np.ones(49), [np.nan] * 30), how) is None, "only what can be drawn counts"
    assert smoothing_of(np.ones(500), None) is None


def test_unusable_widths_and_kinds_are_refused():
    for kind, width in (("ema", 0), ("ema", float("nan")), ("mean", 3), ("gaussian", 1e300), ("gaussian", 1.1e6)):
        with pytest.raises(ValueError, match=r"width|kind"):
            Smoothing(kind, width)


@pytest.mark.parametrize("kind", KINDS)
def test_the_widest_smoothing_of_a_short_curve_takes_no_more_memory_than_the_curve(kind):
    tracemalloc.start()
    smoothed = smooth(np.arange(100.0), Smoothing(kind, LARGEST_WIDTH))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert np.isfinite(smoothed).all()
    if kind == "gaussian":
        np.testing.assert_allclose(smoothed, 49.5, atol=2.0)  # nearly flat: the mean of all
