"""TensorBoard's event files, read and written with the messages of the `tensorboard` package (extra `tensorboard`).

A file is a chain of records: the length (8 bytes), its checksum, the data, its checksum; both are masked crc32c. We
walk the records ourselves, because TensorBoard's reader stops at the first damaged one. A damaged record is skipped and
counted; behind a damaged length nothing can be found again, so the bytes that are left are counted.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import google_crc32c
import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import staged_folder
from zero2all.common.progress import counted
from zero2all.common.workspace import FOLDER_NAME_WORDS, is_folder_name
from zero2all.track.listing import TRAIN_WRITER
from zero2all.track.values import json_number
from zero2all.track.writer import END_KIND, METRICS_FOLDER, SEGMENT_KIND

FILE_MARK = "tfevents"
MAX_RECORD_BYTES = 256 << 20
FILE_VERSION = "brain.Event:2"

TENSOR_TYPES = {
    **{"DT_FLOAT": "<f4", "DT_DOUBLE": "<f8", "DT_HALF": "<f2", "DT_INT8": "<i1", "DT_INT16": "<i2"},
    **{"DT_INT32": "<i4", "DT_INT64": "<i8", "DT_UINT8": "<u1", "DT_UINT16": "<u2", "DT_UINT32": "<u4"},
    **{"DT_UINT64": "<u8", "DT_BOOL": "?", "DT_BFLOAT16": "<u2"},
}
"""How one element lies in `tensor_content`. numpy has no bfloat16: it is the upper half of a float32."""
TENSOR_FIELDS = ("float_val", "double_val", "int_val", "int64_val", "bool_val", "uint32_val", "uint64_val")
"""Where a tensor without `tensor_content` has its numbers, but for the two kinds of 16-bit floats."""


Value = tuple[str, float | str]  # a tag, and its number or text


@dataclass(frozen=True)
class TensorboardEvent:
    """What one record says."""

    time: float
    step: int
    values: tuple[Value, ...] = ()
    is_restart: bool = False


@dataclass
class Damage:
    """What of a file could not be used."""

    records: int = 0  # records whose checksum or content was wrong
    tail_bytes: int = 0  # bytes behind the last readable record
    values: dict[str, int] = field(default_factory=dict)  # values of kinds we do not keep


def messages() -> Any:
    """What we need of TensorBoard's messages; a UsageError where the package is missing."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.types_pb2 import DataType
    except ImportError as error:
        raise UsageError(
            f"TensorBoard's files need the package tensorboard, which cannot be imported ({error}). Install it: pip "
            f"install 'zero2all[tensorboard]'"
        ) from error
    return SimpleNamespace(DecodeError=DecodeError, Event=Event, DataType=DataType, START=SessionLog.START)


# ---- reading ----


def read_events(path: Path, damage: Damage) -> Iterator[TensorboardEvent]:
    """The events of one file in their order; what cannot be read is added to `damage`."""
    tb = messages()
    plugins: dict[str, str] = {}
    with open(path, "rb") as file:
        for data in _records(file, damage):
            try:
                event = tb.Event.FromString(data)
            except tb.DecodeError:
                damage.records += 1
                continue
            values = [found for value in event.summary.value for found in _value(value, plugins, damage, tb)]
            is_restart = event.session_log.status == tb.START
            if values or is_restart:
                yield TensorboardEvent(event.wall_time, event.step, tuple(values), is_restart)


def _records(file: IO[bytes], damage: Damage) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    while True:
        start = file.tell()
        head = file.read(12)
        if not head:
            return
        length, checksum = struct.unpack("<QI", head) if len(head) == 12 else (0, 0)
        is_whole = len(head) == 12 and masked_crc(head[:8]) == checksum
        if not is_whole or length > min(MAX_RECORD_BYTES, size - start - 16):
            damage.tail_bytes += size - start
            return
        data, checksum = file.read(length), struct.unpack("<I", file.read(4))[0]
        if masked_crc(data) == checksum:
            yield data
        else:
            damage.records += 1


def masked_crc(data: bytes) -> int:
    """The checksum of a record: crc32c, turned and shifted so that a checksum of checksums does not look like data."""
    crc = google_crc32c.value(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _value(value: Any, plugins: dict[str, str], damage: Damage, tb: Any) -> list[Value]:
    tag = value.tag
    if value.HasField("metadata"):  # writers send it with the first value of a tag only
        plugins[tag] = value.metadata.plugin_data.plugin_name
    plugin = plugins.get(tag, "")
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return [(tag, value.simple_value)]
    if kind == "tensor" and plugin in ("scalars", "text", ""):
        content = _tensor(value.tensor, tb)
        if isinstance(content, float) or (isinstance(content, str) and plugin == "text"):
            return [(tag, content)]
    kind = plugin or {"image": "image", "histo": "histogram", "audio": "audio"}.get(kind, "other")
    damage.values[kind] = damage.values.get(kind, 0) + 1
    return []


def _tensor(tensor: Any, tb: Any) -> float | str | None:
    """The one element of a tensor; None when it has several, or none of a kind we know."""
    kind = tb.DataType.Name(tensor.dtype) if tensor.dtype in tb.DataType.values() else ""
    if kind == "DT_STRING":
        return b"\n".join(tensor.string_val).decode("utf-8", "backslashreplace") if tensor.string_val else None
    dtype = TENSOR_TYPES.get(kind)
    if tensor.tensor_content:
        if dtype is None or len(tensor.tensor_content) != np.dtype(dtype).itemsize:
            return None
        numbers = np.frombuffer(tensor.tensor_content, dtype)
    elif tensor.half_val:
        numbers = np.array(tensor.half_val).astype("<u2").view(dtype or "<u2")
    else:
        numbers = np.array([number for name in TENSOR_FIELDS for number in getattr(tensor, name)])
    if len(numbers) != 1:
        return None
    return float((numbers.astype("<u4") << 16).view("<f4")[0] if kind == "DT_BFLOAT16" else numbers[0])


# ---- writing ----


class EventFile:
    """A new event file in `folder`. Each call appends one record; `flush` makes them visible to a reader."""

    def __init__(self, folder: Path, suffix: str = "z2a") -> None:
        self._tb = messages()
        folder.mkdir(parents=True, exist_ok=True)
        host = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in socket.gethostname())
        number = 0
        while True:  # a second export within the same second takes the next free name
            name = f"events.out.{FILE_MARK}.{int(time.time()):010d}.{host}.{os.getpid()}.{number}.{suffix}"
            try:
                self._file = open(folder / name, "xb")  # noqa: SIM115
                break
            except FileExistsError:
                number += 1
        self.path = folder / name
        self._described: set[str] = set()
        self._write(wall_time=time.time(), file_version=FILE_VERSION)

    def scalars(self, when: float, step: int, values: dict[str, float]) -> None:
        """Numbers of one step."""
        self._values(when, step, *({"tag": _utf8(tag), "simple_value": number} for tag, number in values.items()))

    def text(self, when: float, step: int, tag: str, text: str) -> None:
        """One text, shown as Markdown by TensorBoard."""
        value: dict[str, Any] = {"tag": _utf8(tag)}
        value["tensor"] = {"dtype": "DT_STRING", "tensor_shape": {"dim": [{"size": 1}]}, "string_val": [text.encode()]}
        if tag not in self._described:  # the first value of a tag names its plugin
            self._described.add(tag)
            value["metadata"] = {"plugin_data": {"plugin_name": "text"}}
        self._values(when, step, value)

    def histogram(self, when: float, step: int, tag: str, edges: list[float], counts: list[float]) -> None:
        """Counts between edges; the sums are those of the middles."""
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        histogram = {
            "min": edges[0],
            "max": edges[-1],
            "num": sum(counts),
            "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            "sum_squares": sum(count * middle * middle for count, middle in zip(counts, middles, strict=True)),
            "bucket_limit": edges[1:],
            "bucket": counts,
        }
        self._values(when, step, {"tag": _utf8(tag), "histo": histogram})

    def image(self, when: float, step: int, tag: str, encoded: bytes, width: int, height: int) -> None:
        """A picture as PNG or JPEG bytes."""
        height, width = (min(max(0, size), (1 << 31) - 1) for size in (height, width))
        image = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": encoded}
        self._values(when, step, {"tag": _utf8(tag), "image": image})

    def restart(self, when: float, step: int) -> None:
        """Training goes on at `step`: a reader forgets what this folder said about it and the steps behind it."""
        self._write(wall_time=when, step=step, session_log={"status": "START"})

    def flush(self) -> None:
        """Hand everything to the kernel."""
        self._file.flush()

    def close(self) -> None:
        """Flush and end."""
        self._file.close()

    def _values(self, when: float, step: int, *values: dict[str, Any]) -> None:
        self._write(wall_time=when, step=step, summary={"value": list(values)})

    def _write(self, **event: Any) -> None:
        data = self._tb.Event(**event).SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data)))


def _utf8(tag: str) -> str:
    """Without lone surrogates, which no protocol buffer may hold."""
    return tag.encode("utf-8", "backslashreplace").decode()


def event_files(folder: Path) -> list[Path]:
    """The event files of one folder, by name, which begins with the time they were opened."""
    return sorted(path for path in folder.iterdir() if FILE_MARK in path.name and path.is_file())


def describe(damage: Damage) -> list[str]:
    """One sentence for each thing that was left out."""
    said = [(damage.records, counted(damage.records, "damaged record"))]
    said += [(damage.tail_bytes, f"{counted(damage.tail_bytes, 'byte')} of an incomplete last record")]
    said += [(count, f"{counted(count, 'value')} of kind {kind}") for kind, count in sorted(damage.values.items())]
    return [words for count, words in said if count]


# TensorBoard event files -> run folders of ours.
#
# Each folder with event files becomes one run. A file that writes a tag an earlier one wrote is a restart of the same
# process and becomes its next attempt; one with tags of its own is another writer. Scalars and texts are taken over;
# images, histograms and what is damaged are left out and counted.


@dataclass
class Imported:
    """One run that was made, and what of its source could not be used."""

    folder: Path
    files: int = 0
    rows: int = 0
    values: int = 0
    texts: int = 0
    damage: Damage = field(default_factory=Damage)


def import_tensorboard(
    source: Path, runs: Path, name: str, rename: Mapping[str, str] | None = None, tokens_tag: str | None = None
) -> list[Imported]:
    """Make the run `runs/name` of the event files in `source`, and `runs/name-SUB` of those in each folder below it.

    `rename` gives tags other names, for example {"train/loss": "loss"}; `tokens_tag` holds the tokens seen so far.
    """
    if not is_folder_name(name):
        raise UsageError(f"--name is {name!r}, expected {FOLDER_NAME_WORDS}.")
    if not source.is_dir():
        raise BadInputError(f"{source} is not a folder. Give the folder with TensorBoard's event files (*tfevents*).")
    folders = [folder for folder in (source, *sorted(source.rglob("*"))) if folder.is_dir() and event_files(folder)]
    if not folders:
        raise BadInputError(f"There are no TensorBoard event files (*tfevents*) in {source} or below it.")
    targets = [runs / "-".join([name, *folder.relative_to(source).parts]) for folder in folders]
    taken = [str(target) for target in targets if target.exists()]
    if taken:
        raise UsageError(f"These runs exist already: {', '.join(taken)}. Choose another name with --name.")
    messages()  # a missing package is reported before anything is written
    return [_import_folder(*pair, rename or {}, tokens_tag) for pair in zip(folders, targets, strict=True)]


def _import_folder(source: Path, target: Path, rename: Mapping[str, str], tokens_tag: str | None) -> Imported:
    done = Imported(target)
    writers: list[tuple[set[str], int]] = []  # the tags of each writer so far, and its attempts
    with staged_folder(target) as folder:
        metrics = folder / METRICS_FOLDER
        metrics.mkdir()
        for path in event_files(source):
            body = folder / "body"
            tags, last_step, last_time = _convert(path, body, done, rename, tokens_tag)
            if not tags:
                continue
            number = next((number for number, (known, _) in enumerate(writers) if known & tags), len(writers))
            known, attempts = writers[number] if number < len(writers) else (set(), 0)
            writers[number : number + 1] = [(known | tags, attempts + 1)]
            writer = TRAIN_WRITER if number == 0 else f"import{number + 1}"
            target_file = metrics / f"{writer}-{attempts + 1}.jsonl"
            _finish(target_file, body, writer, attempts + 1, last_step, last_time, path.name)
            done.files += 1
        (folder / "body").unlink(missing_ok=True)
    return done


def _convert(
    path: Path, body: Path, done: Imported, rename: Mapping[str, str], tokens_tag: str | None
) -> tuple[set[str], int, float]:
    """Write the rows of one event file; returns its tags and where it ended."""
    tags: set[str] = set()
    last_step, last_time, tokens = 0, 0.0, 0
    with open(body, "wb") as out:
        for when, step, values, texts in _rows(read_events(path, done.damage)):
            tags |= values.keys() | texts.keys()
            last_step, last_time = step, when
            seen = values.get(tokens_tag) if tokens_tag else None
            if seen is not None and math.isfinite(seen):
                tokens = int(seen)
            if values:
                named = {rename.get(tag, tag): json_number(number) for tag, number in values.items()}
                out.write(jsonio.dumps_line({"step": step, "time": when, "tokens": tokens, "values": named}))
            for tag, text in texts.items():
                out.write(_event_line(step, when, "text", {"name": rename.get(tag, tag), "text": text}))
            done.rows += bool(values)
            done.values += len(values)
            done.texts += len(texts)
    return tags, last_step, last_time


def _rows(events: Iterator[TensorboardEvent]) -> Iterator[tuple[float, int, dict[str, float], dict[str, str]]]:
    """Time, step, numbers and texts: neighbours of the same step together, as long as no tag comes twice."""
    when, step = 0.0, 0
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for event in events:
        for tag, content in event.values:
            if (values or texts) and (event.step != step or tag in values or tag in texts):
                yield when, step, values, texts
                values, texts = {}, {}
            if not values and not texts:
                when, step = event.time, event.step
            if isinstance(content, str):
                texts[tag] = content
            else:
                values[tag] = content
    if values or texts:
        yield when, step, values, texts


def _finish(path: Path, body: Path, writer: str, attempt: int, step: int, when: float, origin: str) -> None:
    with open(path, "wb") as out, open(body, "rb") as rows:
        first = jsonio.loads(rows.readline())
        header = {"writer": writer, "attempt": attempt, "host": None, "pid": None, "process_start": first["time"]}
        header |= {"resumed_from": None, "format": 1, "imported_from": origin}
        out.write(_event_line(first["step"], first["time"], SEGMENT_KIND, header))
        rows.seek(0)
        shutil.copyfileobj(rows, out)
        out.write(_event_line(step, when, END_KIND, {"reason": "done", "message": f"Imported from {origin}."}))


def _event_line(step: int, when: float, kind: str, data: dict[str, Any]) -> bytes:
    return jsonio.dumps_line({"step": step, "time": when, "kind": kind, "data": data})
