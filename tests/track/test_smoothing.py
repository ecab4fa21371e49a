"""Curves: smoothing bends no start and spreads no NaN; two thousand points hide nothing of a million."""

import itertools
import tracemalloc

import numpy as np
import pytest

from zero2all.track.bins import LARGEST_WIDTH, bins_of, parse_smoothing, smooth, width_for


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


@pytest.mark.parametrize("width", [1.0, 1.5, 40, 1000])
def test_the_fast_way_is_the_plain_way(width):
    values = np.random.default_rng(1).normal(3.0, 1.0, 700)
    values[[0, 5, 6, 300]] = np.nan
    values[100] = np.inf
    # Neighbours ahead count by themselves after eight widths.
    np.testing.assert_allclose(smooth(values, width), plain(values, width), rtol=1e-3)


def test_short_and_empty_curves_are_smoothed_too_and_the_widest_takes_no_more_memory_than_the_curve():
    for count, width in itertools.product((0, 1, 2, 3, 5), (1.0, 1.5, 60)):
        assert len(smooth(np.ones(count), width)) == count
        assert np.isnan(smooth(np.full(count, np.nan), width)).all()
    tracemalloc.start()
    smoothed = smooth(np.arange(100.0), LARGEST_WIDTH)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert np.isfinite(smoothed).all()


@pytest.mark.parametrize("count", [50, 400])
def test_the_mean_of_a_falling_run_does_not_lie_above_its_points(count):
    values = 2 + 3 * 0.97 ** np.arange(count) + 0.02 * np.random.default_rng(2).normal(size=count)
    smoothed = smooth(values, width_for(values, 10.0))
    assert smoothed[0] == values[0]
    assert (smoothed < values).mean() > 0.2
    assert np.abs(smoothed - values).max() < 0.11
    assert abs(smoothed[-1] - values[-1]) < 0.05, "the newest figure, which is read most"


def test_fewer_than_fifty_points_are_not_smoothed_and_only_an_exponential_mean_can_be_asked_for():
    assert [width_for(np.ones(count), 10.0) for count in (200, 50, 49)] == [10.0, 2.5, None]  # 50: a twentieth of them
    assert width_for(np.append(np.ones(49), [np.nan] * 30), 10.0) is None, "only what can be drawn counts"
    assert width_for(np.ones(500), None) is None
    assert (parse_smoothing("none"), parse_smoothing("ema:20")) == (None, 20.0)
    for text in ("ema:0", "ema:nan", "ema:1e300", "ema", "mean:3", "gaussian:5"):
        with pytest.raises(ValueError, match="ema:20"):
            parse_smoothing(text)


def test_a_one_step_spike_in_a_million_is_in_the_maximum_of_its_bin():
    values = np.random.default_rng(0).normal(2.0, 0.1, 1_000_000)
    values[654_321] = 50.0
    values[654_322] = -50.0
    found = bins_of(np.arange(1_000_000.0), values)
    place = int(np.nanargmax(found.maximum))
    assert (found.maximum[place], found.minimum[place]) == (50, -50)
    assert abs(found.x[place] - 654_321) < 1_000_000 / 2000
    assert (len(found), found.count.sum()) == (2000, 1_000_000)
    assert found.mean.mean() == pytest.approx(values.mean(), abs=1e-4)


def test_every_point_is_in_exactly_one_bin_for_any_range():
    rng = np.random.default_rng(1)
    x = np.sort(rng.normal(0, 1e9, 5_000))
    values = rng.normal(size=5_000)
    for low, high in ((None, None), (-1e8, 1e8), (float(x[17]), float(x[-17])), (2e12, None)):
        found = bins_of(x, values, low=low, high=high, count=100)
        inside = (x >= (-np.inf if low is None else low)) & (x <= (np.inf if high is None else high))
        assert found.count.sum() == inside.sum()
        if inside.any():
            assert np.nanmax(found.maximum) == np.float32(values[inside].max())
            assert np.nanmin(found.minimum) == np.float32(values[inside].min())


def test_few_points_are_returned_as_they_are_and_numbers_too_large_for_the_screen_stay_the_largest():
    x, values = np.array([1.0, 5.0, 6.0]), np.array([3.0, np.nan, 2.0])
    found = bins_of(x, values, smooth=np.array([3.0, 2.5, 2.0]))
    assert (found.x.tolist(), found.count.tolist(), found.nonfinite) == ([1, 5, 6], [1, 0, 1], 1)
    assert found.minimum.tolist()[::2] == found.maximum.tolist()[::2] == [3, 2]
    assert found.smooth.tolist() == [3, 2.5, 2]
    assert len(bins_of(np.empty(0), np.empty(0))) == len(bins_of(x, values, low=10.0)) == 0
    largest = float(np.finfo(np.float32).max)
    assert bins_of(np.arange(2.0), np.array([1e300, -1e300])).maximum.tolist() == [largest, -largest]


def test_bins_without_values_are_nan_what_is_not_finite_is_counted_and_an_axis_that_jumps_back_put_in_order():
    values = np.ones(1000)
    values[[3, 4]] = [np.nan, np.inf]
    found = bins_of(np.append(np.arange(500.0), np.arange(1500.0, 2000.0)), values, count=20)
    assert np.isnan(found.mean[5:15]).all()
    assert (found.nonfinite, found.mean[0]) == (2, 1)
    x = np.concatenate([np.arange(100.0, 200.0), np.arange(50.0, 150.0), [np.nan]])
    found = bins_of(x, np.arange(201.0), count=10)
    assert found.count.sum() == 200
    assert (np.diff(found.x) > 0).all()
