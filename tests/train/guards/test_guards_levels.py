"""Windows of the last rows: what they keep, what level they give, and when they give none."""

from __future__ import annotations

import numpy as np
import pytest

from zero2all.train.guards.detector import MAD_TO_SIGMA
from zero2all.train.guards.shards import NO_LIMIT, NO_SHARD, WINDOW_ROWS, Windows


def add(windows, losses, shards, group=0):
    losses = np.asarray(losses, dtype=float)
    windows.add(np.full(len(losses), group), losses, np.broadcast_to(shards, losses.shape))


def level(windows, group=0, left_out=NO_SHARD):
    levels = windows.levels(np.array([group]), np.array([left_out]))
    return float(levels.medians[0]), float(levels.units[0]), bool(levels.are_steady[0])


def test_a_window_keeps_the_newest_rows_of_each_group_in_the_order_in_which_they_came():
    windows = Windows([NO_LIMIT, NO_LIMIT])
    for step in range(100):
        windows.add(np.array([1, 0, 1, 1]), step + np.array([0.0, 0.1, 0.2, 0.3]), np.array([0, 1, 2, 3]))
    losses, shards = windows.rows(1)
    expected = [step + part for step in range(100) for part in (0.0, 0.2, 0.3)]
    assert losses == pytest.approx(expected[-WINDOW_ROWS:], abs=1e-5)
    assert shards == ([0, 2, 3] * 100)[-WINDOW_ROWS:]
    assert len(windows.rows(0)[0]) == 100


def test_a_level_is_the_median_with_a_quarter_of_it_or_the_spread_as_unit():
    rng = np.random.default_rng(0)
    for spread in (0.1, 2.0):
        windows, losses = Windows([NO_LIMIT]), 4.0 + spread * rng.standard_normal(WINDOW_ROWS)
        add(windows, losses, 0)
        median, unit, is_steady = level(windows)
        assert median == pytest.approx(np.median(losses), abs=0.05)
        sigma = MAD_TO_SIGMA * np.median(np.abs(losses - np.median(losses)))
        assert unit == pytest.approx(max(sigma, median / 4), abs=0.05)
        assert is_steady


def test_there_is_no_level_while_rows_are_few_or_while_it_moves():
    windows = Windows([NO_LIMIT])
    assert not level(windows)[2]
    add(windows, np.full(63, 4.0), 0)
    assert not level(windows)[2]
    add(windows, [4.0], 0)
    assert level(windows) == (4.0, 1.0, True)
    add(windows, np.full(64, 3.0), 0)
    assert not level(windows)[2], "the newer half lies a unit lower"
    add(windows, np.full(192, 3.0), 0)
    assert level(windows) == (3.0, 0.75, True)


def test_rows_of_a_shard_can_be_left_out_of_a_level():
    windows = Windows([NO_LIMIT])
    for _ in range(100):
        windows.add(np.zeros(2, int), np.array([3.0, 9.0]), np.array([0, 1]))
    levels = windows.levels(np.zeros(3, int), np.array([0, 1, 2]))
    assert levels.medians.tolist()[:2] == [9.0, 3.0]
    assert levels.are_steady.tolist()[:2] == [True, True]
    assert levels.of(np.array([2])).medians[0] == level(windows)[0], "a shard that is not there changes nothing"
    windows.drop(0, 1)
    assert windows.rows(0) == ([3.0] * 100, [0] * 100)


@pytest.mark.parametrize("rows_at_once", [1, 8, 2000])
def test_a_large_shard_does_not_displace_the_rows_of_the_others(rows_at_once):
    windows = Windows([192])
    shards = np.random.default_rng(1).random(6000) < 0.03
    for first in range(0, 6000, rows_at_once):
        few = shards[first : first + rows_at_once].astype(int)
        add(windows, first + np.arange(len(few)), few)
    losses, kept = windows.rows(0)
    assert (kept.count(0), kept.count(1)) == (192, 64)
    assert losses == sorted(losses)
    assert [loss for loss, shard in zip(losses, kept, strict=True) if shard] == np.flatnonzero(shards)[-64:].tolist()


def test_rows_come_back_and_can_be_forgotten():
    windows, other = Windows([NO_LIMIT, 192]), Windows([NO_LIMIT, 192])
    add(windows, np.random.default_rng(2).random(100), 5, group=1)
    other.set_rows(1, *windows.rows(1))
    assert other.rows(1) == windows.rows(1)
    assert level(other, 1) == level(windows, 1)
    other.clear()
    assert other.rows(1) == ([], [])
