"""The rows of one metrics file as numpy columns that grow.

Every row has a step, a time and a token count; a metric has values for some of the rows and knows which ones. A
metric that is in every row needs no list of rows, which is the usual case and makes its columns plain slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.track.series import Series

MAX_METRICS = 5_000  # different metric names kept per run; the values of further ones are counted and left out

Column = NDArray[Any]


class GrowingArray:
    """A numpy array with room to grow at its end. What it is created from may be read-only (a mapped file)."""

    def __init__(self, start: Column) -> None:
        self._data = start
        self._size = len(start)

    def __len__(self) -> int:
        return self._size

    @property
    def view(self) -> Column:
        """The values so far. Growing never changes a view that was handed out."""
        return self._data[: self._size]

    def extend(self, more: Column) -> None:
        """Append `more`."""
        needed = self._size + len(more)
        if needed > len(self._data):
            grown = np.empty(max(needed, 256, self._size + self._size // 2), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : needed] = more
        self._size = needed


class MetricNames:
    """The metric names of a run, so that a million different ones cannot fill the memory."""

    def __init__(self, limit: int = MAX_METRICS) -> None:
        self._limit = limit
        self._known: set[str] = set()
        self.left_out_values = 0  # values of metrics beyond the limit

    def admit(self, name: str, values: int = 1) -> bool:
        """Whether this metric is kept; if not, its `values` are counted."""
        if name in self._known:
            return True
        if len(self._known) < self._limit:
            self._known.add(name)
            return True
        self.left_out_values += values
        return False


@dataclass
class Block:
    """Some rows of a file, parsed: what `rows.parse` returns."""

    step: NDArray[np.int64]
    time: NDArray[np.float64]
    tokens: NDArray[np.int64]
    metrics: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = field(default_factory=dict)
    """Name -> rows, ascending, and values."""
    events: list[dict[str, Any]] = field(default_factory=list)
    skipped_lines: int = 0
    """Lines that are not rows of ours: damaged, foreign."""
    skipped_values: int = 0
    """Values inside good rows that are not numbers."""


class FileColumns:
    """All rows of one metrics file."""

    def __init__(self) -> None:
        self.step = GrowingArray(np.empty(0, np.int64))
        self.time = GrowingArray(np.empty(0, np.float64))
        self.tokens = GrowingArray(np.empty(0, np.int64))
        self.metrics: dict[str, MetricColumn] = {}

    def __len__(self) -> int:
        return len(self.step)

    def append(self, block: Block) -> None:
        """Add the rows of a block behind those there are."""
        first = len(self)
        self.step.extend(block.step)
        self.time.extend(block.time)
        self.tokens.extend(block.tokens)
        for name, (rows, values) in block.metrics.items():
            column = self.metrics.get(name)
            if column is None:
                column = self.metrics[name] = MetricColumn(
                    GrowingArray(np.empty(0, np.float64)), first + int(rows[0]), None
                )
            column.extend(first + rows, values)

    def points(self, metric: str) -> Series | None:
        """What the file holds of a metric, in the order it was written."""
        column = self.metrics.get(metric)
        if column is None:
            return None
        rows = column.rows
        return Series(self.step.view[rows], column.values.view, self.tokens.view[rows], self.time.view[rows])


class MetricColumn:
    """The values of one metric and the rows they are in."""

    def __init__(self, values: GrowingArray, first_row: int, row_list: GrowingArray | None) -> None:
        self.values = values
        self.first_row = first_row
        self.row_list = row_list  # the rows, or None as long as they follow each other without a gap

    @property
    def rows(self) -> slice | NDArray[np.int64]:
        """An index into the columns of the file."""
        if self.row_list is not None:
            return self.row_list.view
        return slice(self.first_row, self.first_row + len(self.values))

    def extend(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Append values in `rows`, which are in ascending order and beyond those there are."""
        if self.row_list is None:
            expected = self.first_row + len(self.values)
            if int(rows[0]) == expected and int(rows[-1]) - int(rows[0]) + 1 == len(rows):
                self.values.extend(values)
                return
            self.row_list = GrowingArray(np.arange(self.first_row, expected, dtype=np.int64))
        self.row_list.extend(rows)
        self.values.extend(values)
