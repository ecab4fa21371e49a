"""A copy of a run for other programs: TensorBoard's event files, or one CSV table.

The export is a process of its own that only reads the metrics files, so training never notices it. How far each file
was sent is kept in the target, so an export that is started again goes on there; rows are sent at least once.

    export(Path("runs/small"), EventFolder(Path("tb")), follow=True)
"""

from __future__ import annotations

import csv
import io
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import write_atomic, write_json
from zero2all.common.progress import say
from zero2all.common.schema import nearest_hint
from zero2all.track.listing import find_runs, metrics_files
from zero2all.track.metrics_file import read_number, read_row
from zero2all.track.reader import RunReader
from zero2all.track.writer import END_KIND, METRICS_FOLDER, SEGMENT_KIND, utf8_text

STATE_NAME = "z2a-export.json"
CHUNK_BYTES = 4 << 20
LOOK_SECONDS = 1.0
ENDED = ("finished", "crashed")
RETRY_SECONDS = (1.0, 60.0)

Row = dict[str, Any]


@dataclass
class Sent:
    """What an export did."""

    rows: int = 0
    skipped_lines: int = 0


def export(folder: Path, sink: EventFolder, follow: bool = False, wait: Callable[[float], object] = time.sleep) -> Sent:
    """Send all rows of a run; with `follow`, go on until it has ended, and try again when the sink fails."""
    if not (folder / METRICS_FOLDER).is_dir():
        raise BadInputError(f"There are no metrics in {folder}. Give a run's folder, for example work/runs/NAME.")
    tail = RowTail(folder, sink.state)
    sent = Sent()
    pause = RETRY_SECONDS[0]
    try:
        while True:
            # Asked before the last look, so that nothing is missed.
            is_over = not follow or all(run.status.state in ENDED for run in find_runs([folder]))
            try:
                for rows in tail.new_rows():
                    sink.send(rows)
                    tail.commit()
                    sent.rows += len(rows)
                pause = RETRY_SECONDS[0]
            except Exception as error:
                if not follow:
                    raise
                say(f"export: {type(error).__name__}: {str(error)[:300]}; trying again in {pause:.0f} s")
                wait(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                tail.rewind()
                continue
            sent.skipped_lines = tail.skipped_lines
            if is_over:
                return sent
            wait(LOOK_SECONDS)
    finally:
        sink.close()


class RowTail:
    """The rows of all metrics files of a run, as they come, each once; `commit` notes the last batch as sent."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.skipped_lines = 0
        self._folder = folder / METRICS_FOLDER
        self._state = state
        self._sent: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            kept = jsonio.loads(state.read_bytes())
            if kept.get("run") == str(folder.resolve()):
                self._sent = {str(name): int(offset) for name, offset in kept["sent_bytes"].items()}
        self._read = dict(self._sent)
        self._run = str(folder.resolve())

    def new_rows(self) -> Iterator[list[Row]]:
        """Batches of rows that were not sent yet, file by file, at most a few MB each."""
        for path, _, _ in sorted(metrics_files(self._folder), key=lambda file: (file[2], file[1])):
            while True:
                offset = self._read.get(path.name, 0)
                try:
                    with open(path, "rb") as file:
                        file.seek(offset)
                        chunk = file.read(CHUNK_BYTES)
                except OSError:
                    break
                whole = chunk[: chunk.rfind(b"\n") + 1]
                if not whole and len(chunk) == CHUNK_BYTES:
                    whole = chunk  # longer than any row: leave it out
                if not whole:
                    break
                self._read[path.name] = offset + len(whole)
                lines = [line for line in whole.split(b"\n") if line.strip()]
                rows = [row for line in lines if (row := read_row(line)) is not None]
                self.skipped_lines += len(lines) - len(rows)
                yield rows

    def commit(self) -> None:
        """Remember that everything handed out so far was taken."""
        self._sent = dict(self._read)
        write_json(self._state, {"run": self._run, "sent_bytes": self._sent})

    def rewind(self) -> None:
        """Hand out again what was not committed."""
        self._read = dict(self._sent)


def numbers(row: Row) -> dict[str, float]:
    """The values of a metric row, as floats, without values that are not numbers."""
    return {name: number for name, value in row["values"].items() if (number := read_number(value)) is not None}


class EventFolder:
    """TensorBoard's event files in a folder, with the messages of the `tensorboard` package: numbers as scalars, events
    as texts."""

    def __init__(self, folder: Path) -> None:
        self._event = _event_message()  # a missing package is reported now, not retried for ever
        self.state = folder / STATE_NAME
        self._folder = folder
        self._file: io.BufferedWriter | None = None
        self._described: set[str] = set()

    def send(self, rows: list[Row]) -> None:
        """Append the rows, metric and event rows mixed, and flush: they are safe when this returns."""
        if self._file is None:
            self._file = _new_event_file(self._folder)
            self._write(wall_time=time.time(), file_version="brain.Event:2")
        for row in rows:
            self._send_row(row)
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()

    def _send_row(self, row: Row) -> None:
        when: dict[str, Any] = {"wall_time": row["time"], "step": row["step"]}
        if "values" in row:
            scalars = [{"tag": utf8_text(tag), "simple_value": value} for tag, value in numbers(row).items()]
            self._write(**when, summary={"value": scalars})
        elif row["kind"] not in (SEGMENT_KIND, END_KIND):
            text = f"```\n{jsonio.dumps_pretty(row['data']).decode()}```"
            self._write(**when, summary={"value": [self._text(utf8_text(f"events/{row['kind']}"), text)]})
        elif isinstance(resumed_from := row["data"].get("resumed_from"), int):
            # A reader forgets what this folder said about that step and the steps behind it.
            self._write(wall_time=row["time"], step=resumed_from + 1, session_log={"status": "START"})

    def _text(self, tag: str, text: str) -> dict[str, Any]:
        tensor = {"dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [text.encode()]}
        value: dict[str, Any] = {"tag": tag, "tensor": tensor}
        if tag not in self._described:  # the first value of a tag names its plugin
            self._described.add(tag)
            value["metadata"] = {"plugin_data": {"plugin_name": "text"}}
        return value

    def _write(self, **event: Any) -> None:
        """Append a record: the length, its checksum, the data, its checksum."""
        assert self._file is not None, "`send` opens the file"
        data = self._event(**event).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _event_message() -> Any:
    """TensorBoard's message for one record; a UsageError where the package is missing."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise UsageError(
            f"TensorBoard's files need the package tensorboard, which cannot be imported ({error}). Install it: pip "
            f"install 'zero2all[tensorboard]'"
        ) from error
    return Event


def _new_event_file(folder: Path) -> io.BufferedWriter:
    folder.mkdir(parents=True, exist_ok=True)
    host = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in socket.gethostname())
    number = 0
    while True:  # a second export within the same second takes the next free name
        try:
            return open(folder / f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{number}.z2a", "xb")
        except FileExistsError:
            number += 1


def _masked_crc(data: bytes) -> bytes:
    """crc32c, turned and shifted so that a checksum of checksums does not look like data."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


# A run as one CSV table: a row per step, a column per metric, steps that were taken back left out.


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export_csv(folder: Path, target: Path, metrics: Sequence[str] | None = None) -> int:
    """Write a CSV of step, tokens, time (seconds since 1970) and the metrics (None: all); returns its rows."""
    reader = RunReader(folder)
    known = reader.metrics()
    if not known:
        raise BadInputError(f"There are no metrics in {folder}. Give a run's folder, for example work/runs/NAME.")
    for metric in metrics or ():
        if metric not in known:
            raise UsageError(f"The run {reader.name} has no metric `{metric}`. {nearest_hint(metric, known)}")
    names = list(metrics) if metrics else known
    lines = list(csv_lines(reader, names))
    write_atomic(target, "".join(lines).encode())
    return len(lines) - 1


def csv_lines(reader: RunReader, metrics: Sequence[str]) -> Iterator[str]:
    """Every point of some metrics, line by line: the head, then a line per step."""
    series = [reader.series(name) for name in metrics]
    steps = np.unique(np.concatenate([one.step for one in series])) if series else np.empty(0, np.int64)
    tokens, times = np.zeros(len(steps), np.int64), np.zeros(len(steps))
    columns: list[list[float | str]] = []
    for one in series:
        places = np.searchsorted(steps, one.step)
        tokens[places], times[places] = one.tokens, one.time
        column: list[float | str] = [""] * len(steps)
        for place, value in zip(places.tolist(), one.value.tolist(), strict=True):
            column[place] = value
        columns.append(column)
    yield _line(["step", "tokens", "time", *map(_harmless, metrics)])
    for cells in zip(steps.tolist(), tokens.tolist(), times.tolist(), *columns, strict=True):
        yield _line(cells)


def _line(cells: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _harmless(name: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(FORMULA_STARTS) else name
