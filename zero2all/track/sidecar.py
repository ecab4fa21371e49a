"""The columns of a metrics file as a binary copy, so that opening a long run again takes milliseconds.

One file per metrics file, in the user's cache folder and never in the run: a line of JSON (where reading stopped, marks
to recognise the metrics file by, events, the names and lengths of the columns), the columns, an end mark. It is mapped
into memory, so a column that nobody asks for is never read.

A sidecar is only a copy. It is written under another name and renamed; one that is damaged, of another format, or of a
file that has changed otherwise than by growing is ignored, and the metrics file is read instead. The format is our own
because Arrow's takes 120 ms more to open, all of it its import, and is not on a machine that only trains.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.track.columns import Column, FileColumns, GrowingArray, MetricColumn

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


def save(path: Path, facts: dict[str, Any], columns: FileColumns) -> None:
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


def load(path: Path) -> tuple[dict[str, Any], FileColumns] | None:
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
