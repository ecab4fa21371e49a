"""The rows of one metrics file as numpy columns that grow.

Every row has a step, a time and a token count; a metric has values for some of the rows and knows which ones. A
metric that is in every row needs no list of rows, which is the usual case and makes its columns plain slices.
"""

import hashlib
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common import jsonio
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
class ParsedRows:
    """Some rows of a file, parsed: what `parse_rows` returns."""

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

    def append(self, block: ParsedRows) -> None:
        """Add the rows of a block behind those there are."""
        first = len(self)
        self.step.extend(block.step)
        self.time.extend(block.time)
        self.tokens.extend(block.tokens)
        for name, (rows, values) in block.metrics.items():
            if name not in self.metrics:
                self.metrics[name] = MetricColumn(GrowingArray(np.empty(0)), first + int(rows[0]), None)
            self.metrics[name].extend(first + rows, values)

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


# The columns of a metrics file as a binary copy, so that opening a long run again takes milliseconds.
#
# One file per metrics file, in the user's cache folder and never in the run: a line of JSON (where reading stopped,
# marks to recognise the metrics file by, events, the names and lengths of the columns), the columns, an end mark. It is
# mapped into memory, so a column that nobody asks for is never read.
#
# A sidecar is only a copy. It is written under another name and renamed; one that is damaged, of another format, or of
# a file that has changed otherwise than by growing is ignored, and the metrics file is read instead. The format is our
# own because Arrow's takes 120 ms more to open, all of it its import, and is not on a machine that only trains.


END = b"\nz2a end"
ITEM_BYTES = 8  # of every column; the first line is filled up to a multiple of it, so that all columns are aligned
MAX_CACHE_BYTES = 4 << 30  # when all sidecars together are larger, the least recently used are removed
SUFFIX = ".columns"
COUNTS = ("offset", "skipped_lines", "skipped_values", "left_out_events")
FACTS = (*COUNTS, "size", "modified_ns", "head", "tail", "events")
"""What a sidecar says of the metrics file beside its columns."""


def user_cache(name: str) -> Path:
    """The folder `name` for derived files in the user's cache: `~/.cache/zero2all/NAME`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "zero2all" / name


def sidecar_path(cache: Path, metrics_file: Path) -> Path:
    """The sidecar of a metrics file, named after its path, so two runs never share one."""
    return cache / (hashlib.sha256(os.fsencode(metrics_file.absolute())).hexdigest()[:32] + SUFFIX)


def save_sidecar(path: Path, facts: dict[str, Any], columns: FileColumns) -> None:
    """Write a sidecar whole, or raise OSError and leave the old one. `facts` are FACTS."""
    arrays = {"step": columns.step.view, "time": columns.time.view, "tokens": columns.tokens.view}
    for name, metric in columns.metrics.items():
        arrays[f"values {name}"] = metric.values.view
        if metric.row_list is not None:
            arrays[f"rows {name}"] = metric.row_list.view
    first_rows = {name: metric.first_row for name, metric in columns.metrics.items()}
    lengths = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    hexed = facts | {name: facts[name].hex() for name in ("head", "tail")}
    header = jsonio.dumps_line({"facts": hexed, "first_rows": first_rows, "arrays": lengths})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(partial, "wb") as file:
            file.write(b" " * (-len(header) % ITEM_BYTES) + header)
            for array in arrays.values():
                file.write(np.ascontiguousarray(array).data)
            file.write(END)
        partial.replace(path)  # no fsync: after a power cut the end mark is missing, and the sidecar is ignored
    finally:
        partial.unlink(missing_ok=True)
    _prune(path.parent, keep=path)


def load_sidecar(path: Path) -> tuple[dict[str, Any], FileColumns] | None:
    """Map a sidecar: its facts and columns; None when there is none or it is damaged."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with suppress(OSError):
            os.utime(path)  # the time of the last use, for pruning
        header = jsonio.loads(mapped.readline())
        offset = mapped.tell()
        arrays: dict[str, Column] = {}
        for name, dtype, length in header["arrays"]:
            arrays[name] = np.frombuffer(mapped, dtype, length, offset)
            offset += ITEM_BYTES * length
        if mapped[offset:] != END:
            return None
        columns = FileColumns()
        columns.step, columns.time, columns.tokens = (GrowingArray(arrays[name]) for name in ("step", "time", "tokens"))
        for name, first_row in header["first_rows"].items():
            rows = arrays.get(f"rows {name}")
            row_list = None if rows is None else GrowingArray(rows)
            columns.metrics[name] = MetricColumn(GrowingArray(arrays[f"values {name}"]), first_row, row_list)
        facts = {name: header["facts"][name] for name in FACTS}
        return facts | {name: bytes.fromhex(facts[name]) for name in ("head", "tail")}, columns
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _prune(cache: Path, keep: Path) -> None:
    """Remove the least recently used sidecars until the rest is within MAX_CACHE_BYTES."""
    found = []
    for path in cache.glob("*" + SUFFIX):
        with suppress(OSError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= MAX_CACHE_BYTES:
            break
        if path != keep:
            with suppress(OSError):
                path.unlink()
            total -= size
