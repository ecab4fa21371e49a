"""A picture of two thousand points must not hide what one of a million did."""

from __future__ import annotations

import numpy as np
import pytest

from zero2all.track.buckets import bucket


def test_a_one_step_spike_in_a_million_is_in_the_maximum_of_its_bucket():
    values = np.random.default_rng(0).normal(2.0, 0.1, 1_000_000)
    values[654_321] = 50.0
    values[654_322] = -50.0
    found = bucket(np.arange(1_000_000.0), values)
    assert len(found) == 2000
    place = int(np.nanargmax(found.maximum))
    assert found.maximum[place] == 50
    assert found.minimum[place] == -50
    assert abs(found.x[place] - 654_321) < 1_000_000 / 2000
    assert found.count.sum() == 1_000_000
    assert found.mean.mean() == pytest.approx(values.mean(), abs=1e-4)


def test_every_point_is_in_exactly_one_bucket_for_any_range():
    rng = np.random.default_rng(1)
    x = np.sort(rng.normal(0, 1e9, 5_000))
    values = rng.normal(size=5_000)
    for low, high in ((None, None), (-1e8, 1e8), (float(x[17]), float(x[-17])), (2e12, None)):
        found = bucket(x, values, low=low, high=high, count=100)
        inside = (x >= (-np.inf if low is None else low)) & (x <= (np.inf if high is None else high))
        assert found.count.sum() == inside.sum()
        if inside.any():
            assert np.nanmax(found.maximum) == np.float32(values[inside].max())
            assert np.nanmin(found.minimum) == np.float32(values[inside].min())


def test_few_points_are_returned_as_they_are():
    x, values = np.array([1.0, 5.0, 6.0]), np.array([3.0, np.nan, 2.0])
    found = bucket(x, values, smooth=np.array([3.0, 2.5, 2.0]))
    assert found.x.tolist() == [1, 5, 6]
    assert found.minimum.tolist()[::2] == found.maximum.tolist()[::2] == [3, 2]
    assert found.count.tolist() == [1, 0, 1]
    assert found.nonfinite == 1
    assert found.smooth is not None
    assert found.smooth.tolist() == [3, 2.5, 2]


def test_buckets_without_values_are_nan_and_values_that_are_not_finite_are_counted():
    x = np.concatenate([np.arange(500.0), np.arange(1500.0, 2000.0)])
    values = np.ones(1000)
    values[[3, 4]] = [np.nan, np.inf]
    found = bucket(x, values, count=20)
    assert np.isnan(found.mean[5:15]).all()
    assert (found.count[5:15] == 0).all()
    assert found.nonfinite == 2
    assert found.mean[0] == 1


def test_an_axis_that_jumps_back_is_put_in_order():
    x = np.concatenate([np.arange(100.0, 200.0), np.arange(50.0, 150.0), [np.nan]])
    found = bucket(x, np.arange(201.0), count=10)
    assert found.count.sum() == 200
    assert (np.diff(found.x) > 0).all()


def test_numbers_too_large_for_the_screen_stay_the_largest():
    found = bucket(np.arange(2.0), np.array([1e300, -1e300]))
    assert found.maximum.tolist() == [float(np.finfo(np.float32).max), -float(np.finfo(np.float32).max)]


def test_nothing_gives_nothing():
    assert len(bucket(np.empty(0), np.empty(0))) == 0
    assert len(bucket(np.arange(3.0), np.ones(3), low=10.0)) == 0
