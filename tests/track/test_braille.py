"""Curves made of braille dots."""

from __future__ import annotations

import numpy as np
import pytest

from zero2all.track.frame import Canvas


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_the_four_corners_are_the_four_corner_dots():
    canvas = Canvas(1, 1, (0, 1), (0, 1))
    canvas.curve(array(0), array(0))
    assert canvas.lines() == ["⡀"]
    for x, y, dot in ((0, 1, "⠁"), (1, 1, "⠈"), (1, 0, "⢀")):
        canvas = Canvas(1, 1, (0, 1), (0, 1))
        canvas.curve(array(x), array(y))
        assert canvas.lines() == [dot]


def test_a_straight_line_leaves_no_gap():
    canvas = Canvas(4, 2, (0, 1), (0, 1))
    canvas.curve(array(0, 1), array(0, 1))
    dots = canvas._dots[0]
    assert dots.any(axis=0).all(), "every column"
    assert canvas.lines() == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]


def test_a_one_step_spike_reaches_from_the_curve_to_its_top():
    low, high = np.zeros(40), np.zeros(40)
    high[20] = 1.0
    canvas = Canvas(20, 5, (0, 39), (0, 1))
    canvas.curve(np.arange(40.0), low, high)
    assert canvas._dots[0][:, 20].all()
    assert canvas._dots[0][:10].sum() < 20


def test_what_lies_outside_is_drawn_at_the_edge_and_what_is_not_finite_is_left_out():
    canvas = Canvas(3, 1, (0, 2), (0, 1))
    canvas.curve(array(0, 1, 2), array(1e300, np.nan, -np.inf))
    assert canvas.lines() == ["⠁⠀⠀"]
    canvas.curve(array(-5, 99), array(0, 0))
    assert canvas.lines() == ["⠁⠀⠀"], "no place on the canvas"


def test_the_topmost_layer_gives_the_color():
    canvas = Canvas(2, 1, (0, 1), (0, 1), layers=2)
    canvas.curve(array(0, 1), array(0, 0), layer=0)
    canvas.curve(array(1), array(1), layer=1)
    assert canvas.top_layers().tolist() == [[0, 1]]


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (300, 90)])
def test_any_size_and_a_flat_world_work(size):
    canvas = Canvas(*size, (5, 5), (2, 2))
    canvas.curve(array(5, 5), array(2, 2))
    assert len(canvas.lines()) == max(size[1], 1)
    assert all(len(line) == max(size[0], 1) for line in canvas.lines())
