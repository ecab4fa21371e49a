"""One metrics file, read as it grows: its lines as columns.

Every line goes through the JSON parser alone, so that a damaged one costs only itself.
`refresh` costs one stat while nothing happens, and reads only new whole lines. A file that was replaced under its name
(another inode, shorter, or other bytes where we have read already) is read again. Long files are kept as a sidecar.
"""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.track.columns import (
    COUNTS,
    FileColumns,
    MetricNames,
    ParsedRows,
    load_sidecar,
    save_sidecar,
    sidecar_path,
)
from zero2all.track.writer import SEGMENT_KIND

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def parse_rows(chunk: bytes, names: MetricNames) -> ParsedRows:
    """Parse whole lines, each with its newline. Never raises over what they hold: what cannot be used is counted."""
    rows: list[tuple[int, float, int]] = []
    metrics: dict[str, tuple[list[int], list[float]]] = {}
    events: list[dict[str, Any]] = []
    place = skipped_lines = skipped_values = 0
    for line in chunk.split(b"\n"):
        if not line.strip():
            continue
        row = read_row(line)
        if row is None:
            skipped_lines += 1
        elif "kind" in row:
            events.append(row)
        else:
            for name, value in row["values"].items():
                number = value if type(value) is float else read_number(value)
                column = metrics.get(name)
                if number is None:
                    skipped_values += 1
                elif column is not None or names.admit(name):
                    places, numbers = column or metrics.setdefault(name, ([], []))
                    places.append(place)
                    numbers.append(number)
            rows.append((row["step"], row["time"], row["tokens"]))
            place += 1
    step, time, tokens = zip(*rows, strict=True) if rows else ((), (), ())
    return ParsedRows(
        np.array(step, np.int64),
        np.array(time, np.float64),
        np.array(tokens, np.int64),
        {name: (np.array(places, np.int64), np.array(numbers)) for name, (places, numbers) in metrics.items()},
        events,
        skipped_lines,
        skipped_values,
    )


def read_row(line: bytes) -> dict[str, Any] | None:
    """One line as a metric or event row (an event has a `kind`); None for anything else."""
    try:
        row = jsonio.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _is_int64(row.get("step")) or not _is_number(row.get("time")):
        return None
    if row["step"] < 0:  # no step of a run: it must not be taken for its newest
        return None
    if "kind" in row:
        is_event = isinstance(row["kind"], str) and isinstance(row.get("data"), dict)
        return row if is_event else None
    return row if isinstance(row.get("values"), dict) and _is_int64(row.get("tokens")) else None


def read_number(value: Any) -> float | None:
    """A value of a metric row as a float; None if it is not a number."""
    if _is_number(value):
        return float(value)
    return NOT_FINITE.get(value) if isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**64)


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


CHUNK_BYTES = 512 << 10  # fits into a core's second-level cache with its numbers: 15 % faster than 2 MiB
MAX_LINE_BYTES = 64 << 20  # a longer line is no row of ours: it is skipped without being held in memory
MARK_BYTES = 256  # bytes at the start of a file, and before the place reading stopped, by which it is recognised
SIDECAR_BYTES = 1 << 20  # shorter files are parsed faster than a sidecar is worth
SIDECAR_GROWTH = 0.05  # a sidecar is written again when the file has grown by this share
MAX_EVENTS = 100_000
MAX_TEXT_CHARACTERS = 256 << 20  # events, and the text samples in them, kept per file; the rest is counted
HALF_LINE_SECONDS = 10.0  # a last line without its end for this long will never get one


EVENT_ROW = ("step", "time", "kind", "data")


@dataclass(frozen=True)
class Event:
    """Something that happened at a step."""

    step: int
    time: float
    kind: str
    data: dict[str, Any]
    writer: str
    attempt: int


class MetricsFile:
    """The rows and events of one file: one start of one writer."""

    def __init__(self, path: Path, writer: str, attempt: int, names: MetricNames, cache: Path) -> None:
        self.path = path
        self.writer = writer
        self.attempt = attempt
        self.replaced = 0  # how often another file took the place of this one
        self.modified = 0.0  # when the file was last written, by the clock of the file system
        self._names = names
        self._sidecar_path = sidecar_path(cache, path)
        self._seen: os.stat_result | None = None
        self._forget()

    def _forget(self) -> None:
        self.columns = FileColumns()
        self.events: list[Event] = []
        self.header: dict[str, Any] = {}  # the data of the `segment` event the file begins with, if any
        self.skipped_lines = 0
        self.skipped_values = 0
        self.left_out_events = 0
        self.offset = 0  # bytes read: all whole lines
        self._text_characters = 0
        self._half_line_bytes = 0
        self._saved_offset = 0
        self._head = b""
        self._tail = b""
        self._skipping = False

    @property
    def has_torn_line(self) -> bool:
        """The file ends with half a line that nobody is writing any more."""
        return self._half_line_bytes > 0 and time.time() - self.modified > HALF_LINE_SECONDS

    def refresh(self) -> bool:
        """Read what was appended; whether there was anything new. OSError when the file cannot be read."""
        stat = self.path.stat()
        before = self._seen
        if before is not None and _identity(stat) == _identity(before):
            return False
        with open(self.path, "rb", buffering=0) as file:
            was_replaced = self.offset > 0 and not self._is_same(file.fileno(), stat)
            if was_replaced:
                self.replaced += 1
                self._forget()
            progress = (self.offset, self._half_line_bytes)
            if self.offset == 0:
                self._load(file.fileno(), stat)
            self._read(file.fileno())
        self._seen = stat
        self.modified = stat.st_mtime
        if self.offset - self._saved_offset >= max(SIDECAR_BYTES, SIDECAR_GROWTH * self.offset):
            self._save()
        return was_replaced or progress != (self.offset, self._half_line_bytes)

    def _is_same(self, fd: int, stat: os.stat_result) -> bool:
        if stat.st_size < self.offset or (self._seen is not None and self._seen.st_ino != stat.st_ino):
            return False
        return _has_marks(fd, self._head, self._tail, self.offset)

    def _read(self, fd: int) -> None:
        wanted = CHUNK_BYTES
        while chunk := os.pread(fd, wanted, self.offset):
            end = chunk.rfind(b"\n") + 1
            if end == 0:
                if len(chunk) < wanted:  # half a line: its end is not written yet
                    break
                if wanted < MAX_LINE_BYTES:
                    wanted *= 2
                    continue
                self._skipping = True
                self._advance(chunk)
                continue
            whole = chunk[:end]
            self._advance(whole)
            if self._skipping:
                whole = whole[whole.index(b"\n") + 1 :]
                self._skipping = False
                self.skipped_lines += 1
            self._take(whole)
            wanted = CHUNK_BYTES
        self._half_line_bytes = len(chunk)

    def _advance(self, done: bytes) -> None:
        if len(self._head) < MARK_BYTES:
            self._head += done[: MARK_BYTES - len(self._head)]
        self._tail = done[-MARK_BYTES:]
        self.offset += len(done)

    def _take(self, lines: bytes) -> None:
        block = parse_rows(lines, self._names)
        self.skipped_lines += block.skipped_lines
        self.skipped_values += block.skipped_values
        if block.events:
            self._take_events(block.events)
        if len(block.step):
            self.columns.append(block)

    def _take_events(self, events: list[dict[str, Any]]) -> None:
        if events and not self.events and not len(self.columns) and events[0]["kind"] == SEGMENT_KIND:
            self.header = events[0]["data"]
        for row in events:
            event = Event(row["step"], float(row["time"]), row["kind"], row["data"], self.writer, self.attempt)
            text = event.data.get("text")
            size = len(text) if isinstance(text, str) else 0
            if len(self.events) < MAX_EVENTS and self._text_characters + size <= MAX_TEXT_CHARACTERS:
                self.events.append(event)
                self._text_characters += size
            else:
                self.left_out_events += 1

    def _load(self, fd: int, stat: os.stat_result) -> None:
        """Start from the sidecar if there is one of this very file."""
        if stat.st_size < SIDECAR_BYTES or (known := load_sidecar(self._sidecar_path)) is None:
            return
        facts, columns = known
        is_untouched = (stat.st_size, stat.st_mtime_ns) == (facts["size"], facts["modified_ns"])
        has_grown = stat.st_size > facts["size"] and _has_marks(fd, facts["head"], facts["tail"], facts["offset"])
        if not (is_untouched or has_grown):
            return
        self._take_events(facts["events"])
        self.columns = columns
        for name in list(columns.metrics):
            if not self._names.admit(name, len(columns.metrics[name].values)):
                del columns.metrics[name]
        for name in COUNTS:
            setattr(self, name, facts[name])
        self._saved_offset, self._head, self._tail = self.offset, facts["head"], facts["tail"]

    def _save(self) -> None:
        assert self._seen is not None, "a file is looked at before it is read"
        facts = {name: getattr(self, name) for name in COUNTS} | {
            "size": self._seen.st_size,
            "modified_ns": self._seen.st_mtime_ns,
            "head": self._head,
            "tail": self._tail,
            "events": [{name: getattr(event, name) for name in EVENT_ROW} for event in self.events],
        }
        self._saved_offset = self.offset
        with suppress(OSError, TypeError, ValueError):  # without a sidecar the next opening only takes longer
            save_sidecar(self._sidecar_path, facts, self.columns)


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _has_marks(fd: int, head: bytes, tail: bytes, offset: int) -> bool:
    return os.pread(fd, len(head), 0) == head and os.pread(fd, len(tail), offset - len(tail)) == tail
