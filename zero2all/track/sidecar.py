"""The columns of a metrics file as a binary copy, so that opening a long run again takes milliseconds.

One file per metrics file, in the user's cache folder and never in the run: a magic word, the length of a JSON
header, the header (where reading stopped, marks to recognise the metrics file by, events, where each column lies),
the columns, the magic word again. It is mapped into memory, so a column that nobody asks for is never read.

A sidecar is only a copy. It is written under another name and renamed; one that is damaged, of another format, or
of a file that has changed otherwise than by growing is ignored, and the metrics file is read instead. The format is our
own because Arrow's takes 120 ms more to open, all of it its import, and is not on a machine that only trains.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.track.columns import Column, FileColumns, GrowingArray, MetricColumn

MAGIC = b"z2acols1"
ALIGNMENT = 64
MAX_CACHE_BYTES = 4 << 30
"""When all sidecars together are larger, those not opened for longest are removed."""
SUFFIX = ".columns"


@dataclass(frozen=True)
class Sidecar:
    """What was read of a metrics file."""

    offset: int
    """Bytes of whole lines that are in the columns."""
    size: int
    modified_ns: int
    """Size and time of the metrics file when it was read."""
    head: bytes
    tail: bytes
    """The first bytes of the file, and the last ones before `offset`."""
    events: list[dict[str, Any]]
    last_event: dict[str, Any] | None
    """The event in the last line, or None when that is a metric row."""
    skipped_lines: int
    skipped_values: int
    left_out_events: int
    columns: FileColumns


def default_cache() -> Path:
    """Where sidecars live unless the caller says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "zero2all" / "track"


def sidecar_path(cache: Path, metrics_file: Path) -> Path:
    """The sidecar of a metrics file: named after its place, so two runs never share one."""
    return cache / (hashlib.sha256(os.fsencode(metrics_file.absolute())).hexdigest()[:32] + SUFFIX)


def save(path: Path, sidecar: Sidecar) -> None:
    """Write a sidecar whole, or raise OSError and leave what was there."""
    arrays: list[Column] = []
    entries = []
    position = 0
    for name, first_row, array in _named_arrays(sidecar.columns):
        array = np.ascontiguousarray(array)
        entries.append(
            {"name": name, "first_row": first_row, "dtype": array.dtype.str, "at": position, "n": len(array)}
        )
        arrays.append(array)
        position += _padded(array.nbytes)
    facts = {**vars(sidecar), "head": sidecar.head.hex(), "tail": sidecar.tail.hex(), "arrays": entries}
    del facts["columns"]
    header = jsonio.dumps_line(facts | {"bytes": position})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(partial, "wb") as file:
            file.write((MAGIC + len(header).to_bytes(8, "little") + header).ljust(_padded(16 + len(header)), b"\0"))
            for array in arrays:
                file.write(array.data)
                file.write(bytes(_padded(array.nbytes) - array.nbytes))
            file.write(MAGIC)
        partial.replace(path)  # no fsync: after a power cut the end mark is missing, and the sidecar is ignored
    finally:
        partial.unlink(missing_ok=True)
    _prune(path.parent, keep=path)


def load(path: Path) -> Sidecar | None:
    """Map a sidecar; None when there is none or it is not whole."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with suppress(OSError):
            os.utime(path)  # the time of the last use, for pruning
        if mapped[:8] != MAGIC or mapped[-8:] != MAGIC:
            return None
        header_bytes = int.from_bytes(mapped[8:16], "little")
        header = jsonio.loads(mapped[16 : 16 + header_bytes])
        base = _padded(16 + header_bytes)
        if len(mapped) != base + header.pop("bytes") + len(MAGIC):
            return None
        arrays: dict[str, tuple[int | None, Column]] = {}
        for entry in header.pop("arrays"):
            array = np.frombuffer(mapped, entry["dtype"], entry["n"], base + entry["at"])
            arrays[entry["name"]] = (entry["first_row"], array)
        header["head"], header["tail"] = bytes.fromhex(header["head"]), bytes.fromhex(header["tail"])
        return Sidecar(**header, columns=_columns(arrays))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _named_arrays(columns: FileColumns) -> Iterator[tuple[str, int | None, Column]]:
    """Every array to be stored. The letter in front keeps the rows of a metric apart from its values."""
    yield "s", None, columns.step.view
    yield "t", None, columns.time.view
    yield "n", None, columns.tokens.view
    for name, metric in columns.metrics.items():
        yield "v" + name, metric.first_row, metric.values.view
        if metric.row_list is not None:
            yield "r" + name, None, metric.row_list.view


def _columns(arrays: dict[str, tuple[int | None, Column]]) -> FileColumns:
    columns = FileColumns()
    columns.step, columns.time, columns.tokens = (GrowingArray(arrays[name][1]) for name in "stn")
    for key, (first_row, values) in arrays.items():
        if key[0] == "v" and first_row is not None:
            rows = arrays.get("r" + key[1:])
            row_list = None if rows is None else GrowingArray(rows[1])
            columns.metrics[key[1:]] = MetricColumn(GrowingArray(values), first_row, row_list)
    return columns


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _prune(cache: Path, keep: Path) -> None:
    """Remove the sidecars not used for longest until the rest is within MAX_CACHE_BYTES."""
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
