"""TensorBoard's event files, read and written without TensorBoard.

A file is a chain of records: the length (8 bytes), its checksum, the data, its checksum; both are masked crc32c. The
data is a protocol buffer, of which we need few fields: when, which step, and the values of a summary. A record whose
data is damaged is skipped and counted; where a length is damaged or cut off, nothing behind it can be found again, so
reading ends there and the bytes that are left are counted.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal

import google_crc32c

FILE_MARK = "tfevents"
MAX_RECORD_BYTES = 256 << 20
FILE_VERSION = b"brain.Event:2"

# Wire types of protocol buffers.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

# Fields of Event, Summary.Value, TensorProto: the numbers their definitions give them.
EVENT_TIME, EVENT_STEP, EVENT_VERSION, EVENT_SUMMARY, EVENT_SESSION = 1, 2, 3, 5, 7
SUMMARY_VALUE = 1
VALUE_TAG, VALUE_SIMPLE, VALUE_IMAGE, VALUE_HISTOGRAM, VALUE_AUDIO, VALUE_TENSOR, VALUE_METADATA = 1, 2, 4, 5, 6, 8, 9
TENSOR_TYPE, TENSOR_SHAPE, TENSOR_CONTENT, TENSOR_STRINGS = 1, 2, 4, 8
SESSION_START = 1

TENSOR_FORMATS = {
    **{1: "<f", 2: "<d", 3: "<i", 4: "<B", 5: "<h", 6: "<b", 9: "<q", 10: "<?"},
    **{17: "<H", 19: "<e", 22: "<I", 23: "<Q"},
}
"""How one element lies in `tensor_content`, by the number of its type. bfloat16 (14) has no format of its own."""
BFLOAT16, STRING = 14, 7
TENSOR_FIELDS = {5: "<f", 6: "<d"}
TENSOR_INTEGER_FIELDS = frozenset({7, 10, 11, 16, 17})
HALF_FIELD = 13


@dataclass(frozen=True)
class Value:
    """One value of one tag: a number for `scalar`, a text for `text`."""

    tag: str
    kind: Literal["scalar", "text"]
    content: float | str


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

    records: int = 0
    """Records whose checksum or content was wrong."""
    tail_bytes: int = 0
    """Bytes behind the last readable record."""
    values: dict[str, int] = field(default_factory=dict)
    """Good values of kinds that have no place in a run of ours, by kind."""


# ---- reading ----


def read_events(path: Path, damage: Damage) -> Iterator[TensorboardEvent]:
    """The events of one file in their order; what cannot be read is added to `damage`."""
    plugins: dict[str, str] = {}
    with open(path, "rb") as file:
        for data in _records(file, damage):
            try:
                event = _event(data, plugins, damage)
            except (ValueError, struct.error, IndexError):
                damage.records += 1
                continue
            if event is not None:
                yield event


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


def _event(data: bytes, plugins: dict[str, str], damage: Damage) -> TensorboardEvent | None:
    when, step, is_restart = 0.0, 0, False
    values: list[Value] = []
    for number, content in _fields(data):
        if number == EVENT_TIME:
            when = struct.unpack("<d", _bytes(content))[0]
        elif number == EVENT_STEP:
            step = _signed(content)
        elif number == EVENT_SESSION:
            is_restart = any(inner == 1 and status == SESSION_START for inner, status in _fields(_bytes(content)))
        elif number == EVENT_SUMMARY:
            for inner, value in _fields(_bytes(content)):
                if inner == SUMMARY_VALUE:
                    values += _value(_bytes(value), plugins, damage)
    return TensorboardEvent(when, step, tuple(values), is_restart) if values or is_restart else None


def _value(data: bytes, plugins: dict[str, str], damage: Damage) -> list[Value]:
    fields = dict(_fields(data))
    tag = _bytes(fields.get(VALUE_TAG, b"")).decode("utf-8", "backslashreplace")
    if VALUE_METADATA in fields:  # writers send it with the first value of a tag only
        plugins[tag] = _plugin(_bytes(fields[VALUE_METADATA]))
    plugin = plugins.get(tag, "")
    if VALUE_SIMPLE in fields:
        return [Value(tag, "scalar", struct.unpack("<f", _bytes(fields[VALUE_SIMPLE]))[0])]
    if VALUE_TENSOR in fields and plugin in ("scalars", "text", ""):
        content = _tensor(_bytes(fields[VALUE_TENSOR]))
        if isinstance(content, float):
            return [Value(tag, "scalar", content)]
        if isinstance(content, str) and plugin == "text":
            return [Value(tag, "text", content)]
    kinds = {VALUE_IMAGE: "image", VALUE_HISTOGRAM: "histogram", VALUE_AUDIO: "audio"}
    kind = plugin or next((name for number, name in kinds.items() if number in fields), "other")
    damage.values[kind] = damage.values.get(kind, 0) + 1
    return []


def _plugin(metadata: bytes) -> str:
    for number, content in _fields(metadata):
        if number == 1:
            return _bytes(dict(_fields(_bytes(content))).get(1, b"")).decode("utf-8", "replace")
    return ""


def _tensor(data: bytes) -> float | str | None:
    """The one element of a tensor; None when it has several, or none of a kind we know."""
    kind, raw, numbers, strings = 0, b"", [], []
    for number, content in _fields(data):
        if number == TENSOR_TYPE:
            kind = _signed(content)
        elif number == TENSOR_CONTENT:
            raw = _bytes(content)
        elif number == TENSOR_STRINGS:
            strings.append(_bytes(content))
        elif number in TENSOR_FIELDS:
            packed, form = _bytes(content), TENSOR_FIELDS[number]
            numbers += [one for (one,) in struct.iter_unpack(form, packed)]
        elif number in TENSOR_INTEGER_FIELDS:
            numbers += [float(one) for one in _integers(content)]
        elif number == HALF_FIELD:
            numbers += [_half(one, kind) for one in _integers(content)]
    if kind == STRING:
        return b"\n".join(strings).decode("utf-8", "backslashreplace") if strings else None
    if raw and kind == BFLOAT16 and len(raw) == 2:
        return _half(int.from_bytes(raw, "little"), kind)
    if raw and kind in TENSOR_FORMATS and len(raw) == struct.calcsize(TENSOR_FORMATS[kind]):
        return float(struct.unpack(TENSOR_FORMATS[kind], raw)[0])
    return float(numbers[0]) if len(numbers) == 1 else None


def _half(bits: int, kind: int) -> float:
    raw = struct.pack("<H", bits & 0xFFFF)
    return float(struct.unpack("<f", b"\0\0" + raw)[0] if kind == BFLOAT16 else struct.unpack("<e", raw)[0])


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of each field of a message: an integer for varints, bytes for everything else."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        content: int | bytes
        if wire == VARINT:
            content, position = _varint(data, position)
        else:
            if wire == BYTES:
                length, position = _varint(data, position)
            elif wire in (FIXED64, FIXED32):
                length = 8 if wire == FIXED64 else 4
            else:
                raise ValueError(f"wire type {wire}")
            if position + length > len(data):
                raise ValueError("a field is longer than its message")
            content = data[position : position + length]
            position += length
        yield number, content


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
        if shift > 63:
            raise ValueError("a number without end")


def _integers(content: int | bytes) -> list[int]:
    """A repeated integer field: packed into bytes, or one at a time."""
    if isinstance(content, int):
        return [_signed(content)]
    numbers, position = [], 0
    while position < len(content):
        value, position = _varint(content, position)
        numbers.append(_signed(value))
    return numbers


def _signed(content: int | bytes) -> int:
    if not isinstance(content, int):
        raise ValueError("bytes where a number was expected")
    content &= (1 << 64) - 1
    return content - (1 << 64) if content >= 1 << 63 else content


def _bytes(content: int | bytes) -> bytes:
    if not isinstance(content, bytes):
        raise ValueError("a number where bytes were expected")
    return content


# ---- writing ----


class EventFile:
    """A new event file in `folder`. Each call appends one record; `flush` makes them visible to a reader."""

    def __init__(self, folder: Path, suffix: str = "z2a") -> None:
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
        self._write(_double(EVENT_TIME, time.time()) + _block(EVENT_VERSION, FILE_VERSION))

    def scalars(self, when: float, step: int, values: dict[str, float]) -> None:
        """Numbers of one step."""
        self._event(when, step, (_value_head(tag) + _float(VALUE_SIMPLE, number) for tag, number in values.items()))

    def text(self, when: float, step: int, tag: str, text: str) -> None:
        """One text, shown as Markdown by TensorBoard."""
        shape = _block(2, _integer(1, 1))
        tensor = _integer(TENSOR_TYPE, STRING) + _block(TENSOR_SHAPE, shape) + _block(TENSOR_STRINGS, text.encode())
        self._event(when, step, [self._head(tag, b"text") + _block(VALUE_TENSOR, tensor)])

    def histogram(self, when: float, step: int, tag: str, edges: list[float], counts: list[float]) -> None:
        """Counts between edges; the sums are those of the middles."""
        middles = [(low + high) / 2 for low, high in pairwise(edges)]
        total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
        squares = sum(count * middle * middle for count, middle in zip(counts, middles, strict=True))
        numbers = (edges[0], edges[-1], float(sum(counts)), total, squares)
        content = b"".join(_double(number, value) for number, value in enumerate(numbers, start=1))
        content += _block(6, struct.pack(f"<{len(counts)}d", *edges[1:]))
        content += _block(7, struct.pack(f"<{len(counts)}d", *counts))
        self._event(when, step, [_value_head(tag) + _block(VALUE_HISTOGRAM, content)])

    def image(self, when: float, step: int, tag: str, encoded: bytes, width: int, height: int) -> None:
        """A picture as PNG or JPEG bytes."""
        content = _integer(1, height) + _integer(2, width) + _integer(3, 3) + _block(4, encoded)
        self._event(when, step, [_value_head(tag) + _block(VALUE_IMAGE, content)])

    def restart(self, when: float, step: int) -> None:
        """Training goes on at `step`: a reader forgets what this folder said about it and the steps behind it."""
        self._write(
            _double(EVENT_TIME, when) + _integer(EVENT_STEP, step) + _block(EVENT_SESSION, _integer(1, SESSION_START))
        )

    def flush(self) -> None:
        """Hand everything to the kernel."""
        self._file.flush()

    def close(self) -> None:
        """Flush and end."""
        self._file.close()

    def _head(self, tag: str, plugin: bytes) -> bytes:
        if tag in self._described:
            return _value_head(tag)
        self._described.add(tag)
        return _value_head(tag) + _block(VALUE_METADATA, _block(1, _block(1, plugin)))

    def _event(self, when: float, step: int, values: Iterable[bytes]) -> None:
        summary = b"".join(_block(SUMMARY_VALUE, value) for value in values)
        self._write(_double(EVENT_TIME, when) + _integer(EVENT_STEP, step) + _block(EVENT_SUMMARY, summary))

    def _write(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data)))


def _value_head(tag: str) -> bytes:
    return _block(VALUE_TAG, tag.encode("utf-8", "backslashreplace"))


def _number(value: int) -> bytes:
    """A varint."""
    value &= (1 << 64) - 1
    encoded = io.BytesIO()
    while value > 0x7F:
        encoded.write(bytes([value & 0x7F | 0x80]))
        value >>= 7
    return encoded.getvalue() + bytes([value])


def _integer(number: int, value: int) -> bytes:
    return _number(number << 3 | VARINT) + _number(value)


def _double(number: int, value: float) -> bytes:
    return _number(number << 3 | FIXED64) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:  # beyond single precision
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _number(number << 3 | FIXED32) + packed


def _block(number: int, content: bytes) -> bytes:
    return _number(number << 3 | BYTES) + _number(len(content)) + content


def event_files(folder: Path) -> list[Path]:
    """The event files of one folder, by name, which begins with the time they were opened."""
    return sorted(path for path in folder.iterdir() if FILE_MARK in path.name and path.is_file())


def describe(damage: Damage) -> list[str]:
    """One sentence for each thing that was left out."""
    said: list[str] = []
    counts: list[tuple[Any, str]] = [(damage.records, "damaged records"), (damage.tail_bytes, "bytes of a torn end")]
    counts += [(count, f"values of kind {kind}") for kind, count in sorted(damage.values.items())]
    said += [f"{count:,} {what}" for count, what in counts if count]
    return said
