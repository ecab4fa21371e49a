"""Smoothing must not bend the start, spread a NaN, or let one value spoil what lies far from it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from zero2all.track.smoothing import LARGEST_WIDTH, parse_smoothing, smooth, width_for

WIDTHS = (1.0, 1.5, 4, 60, 500)


def plain(values: np.ndarray, width: float) -> np.ndarray:
    """What the docstring promises, one point after the other; near the start no further ahead than back."""
    count = len(values)
    result = np.full(count, np.nan)
    places = np.arange(count)
    for place in range(count):
        is_near = (places <= 2 * place) & np.isfinite(values)
        weights = (1 - 1 / width) ** np.abs(places - place)[is_near]
        result[place] = weights @ values[is_near] / weights.sum() if weights.sum() else np.nan
    return result


@pytest.mark.parametrize("width", [1.0, 1.5, 2, 7, 40, 1000])
def test_the_fast_way_is_the_plain_way(width):
    values = np.random.default_rng(1).normal(3.0, 1.0, 700)
    values[[0, 5, 6, 300]] = np.nan
    values[100] = np.inf
    # Neighbours ahead count by themselves after eight widths.
    np.testing.assert_allclose(smooth(values, width), plain(values, width), rtol=1e-3)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_constant_stays_one_and_nan_and_infinity_weigh_nothing(width):
    values = np.full(1000, 2.5)
    np.testing.assert_allclose(smooth(values, width), 2.5, rtol=1e-12)
    values[[0, 17, 400, 999]] = [np.nan, np.inf, -np.inf, np.nan]
    smoothed = smooth(values, width)
    finite = np.isfinite(smoothed)
    np.testing.assert_allclose(smoothed[finite], 2.5, rtol=1e-12)
    assert finite.sum() >= 996


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_short_and_empty_curves_are_smoothed_too(count):
    for width in WIDTHS:
        assert len(smooth(np.ones(count), width)) == count
        assert np.isnan(smooth(np.full(count, np.nan), width)).all()


@pytest.mark.parametrize("count", [50, 60, 120, 400])
def test_the_mean_of_a_falling_run_does_not_lie_above_its_points(count):
    values = 2 + 3 * 0.97 ** np.arange(count) + 0.02 * np.random.default_rng(2).normal(size=count)
    smoothed = smooth(values, width_for(values, 10.0))
    assert smoothed[0] == values[0]
    assert (smoothed < values).mean() > 0.2
    assert np.abs(smoothed - values).max() < 0.11
    assert abs(smoothed[-1] - values[-1]) < 0.05, "the newest figure, which is read most"


def test_fewer_than_fifty_points_are_not_smoothed():
    assert width_for(np.ones(200), 10.0) == 10.0
    assert width_for(np.ones(50), 10.0) == 2.5, "at most a twentieth of the points"
    assert width_for(np.ones(49), 10.0) is None
    assert width_for(np.append(np.ones(49), [np.nan] * 30), 10.0) is None, "only what can be drawn counts"
    assert width_for(np.ones(500), None) is None


def test_what_can_be_asked_for():
    assert (parse_smoothing("none"), parse_smoothing("ema:20")) == (None, 20.0)
    for text in ("ema:0", "ema:nan", "ema:1e300", "ema", "mean:3", "gaussian:5"):
        with pytest.raises(ValueError, match="ema:20"):
            parse_smoothing(text)


def test_the_widest_smoothing_of_a_short_curve_takes_no_more_memory_than_the_curve():
    tracemalloc.start()
    smoothed = smooth(np.arange(100.0), LARGEST_WIDTH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert np.isfinite(smoothed).all()
