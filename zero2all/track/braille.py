"""Curves in a terminal: every character is 2 x 4 dots of Unicode's braille block, so 80 columns show 160 points.

A character shows the dots of all layers, in the color of the topmost. Points are joined, and a column with several is
filled from the lowest to the highest, so a one-step spike is a line and not a gap.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BLANK = 0x2800
DOT_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
"""The bit of each dot in a character's code, by row and column."""


class Canvas:
    """A drawing of `columns` x `rows` characters; the world inside is given by the two ranges."""

    def __init__(
        self, columns: int, rows: int, x_range: tuple[float, float], y_range: tuple[float, float], layers: int = 1
    ) -> None:
        self.columns, self.rows = max(columns, 1), max(rows, 1)
        self.x_range, self.y_range = x_range, y_range
        self._dots = np.zeros((layers, 4 * self.rows, 2 * self.columns), dtype=bool)

    def curve(
        self, x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64] | None = None, layer: int = 0
    ) -> None:
        """Draw through the points; with `high`, a band. Values outside the canvas are drawn at its edge."""
        high = low if high is None else high
        known = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
        width, height = 2 * self.columns, 4 * self.rows
        across = _place(x[known], self.x_range, width)
        top, bottom = (height - 1 - _place(edge[known], self.y_range, height) for edge in (high, low))
        inside = (across >= 0) & (across < width)
        top, bottom = (np.clip(edge[inside], 0, height - 1) for edge in (top, bottom))
        across = across[inside]
        for column, first, last in zip(across, top, bottom, strict=True):
            self._dots[layer, first : last + 1, column] = True
        middle = (top + bottom) / 2
        for here, there in pairwise(range(len(across))):
            self._join(layer, int(across[here]), float(middle[here]), int(across[there]), float(middle[there]))

    def _join(self, layer: int, x0: int, y0: float, x1: int, y1: float) -> None:
        count = math.ceil(max(abs(x1 - x0), abs(y1 - y0), 1))
        columns = np.linspace(x0, x1, count + 1).round().astype(np.int64)
        rows = np.linspace(y0, y1, count + 1).round().astype(np.int64)
        self._dots[layer, rows, columns] = True

    def lines(self) -> list[str]:
        """The drawing, top row first."""
        cells = self._dots.any(axis=0).reshape(self.rows, 4, self.columns, 2)
        codes = BLANK + np.einsum("rdcs,ds->rc", cells.astype(np.int64), DOT_BITS)
        return ["".join(map(chr, row)) for row in codes.tolist()]

    def top_layers(self) -> NDArray[np.int64]:
        """For each character the highest layer with a dot in it, -1 for none: (rows, columns)."""
        filled = self._dots.reshape(len(self._dots), self.rows, 4, self.columns, 2).any(axis=(2, 4))
        numbers = np.arange(len(self._dots))[:, None, None]
        highest: NDArray[np.int64] = np.where(filled, numbers, -1).max(axis=0)
        return highest


def _place(values: NDArray[np.float64], bounds: tuple[float, float], dots: int) -> NDArray[np.int64]:
    """The dot of each value along an axis of `dots` dots; outside the bounds it is outside the dots too."""
    first, last = bounds
    span = (last - first) or 1.0
    share = np.clip((values - first) / span, -2.0, 3.0)  # far outside is far enough: no overflow
    return np.floor(share * (dots - 1) + 0.5).astype(np.int64)
