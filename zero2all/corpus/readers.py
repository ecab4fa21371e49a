"""Readers: any mix of raw files -> rows, or damaged items with their place and reason.

The format is found by content first; the name only settles what the content leaves open (a Python file that starts
with `[` is still a Python file). Memory does not grow with the file: JSON lines and arrays are streamed, parquet is
decoded some hundred rows at a time, a long text is cut into documents while it is read, and an item above
`max_record_bytes` is passed over into quarantine.

A reader never raises for bad content. It yields `Damaged` and goes on; where it cannot go on (a JSON array is
unreadable behind its first error), `ends_file` is set and `raw_bytes` says how much was given up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

from zero2all.common import jsonio
from zero2all.corpus.listing import CODE_SUFFIXES, UNREADABLE, InputFile

HEAD_BYTES = 1 << 16
READ_BYTES = 1 << 16
PARQUET_BATCH_ROWS = 256
DOCUMENT_BYTES = 8_000
"""A long text is cut at the first blank line after this many bytes …"""
DOCUMENT_BYTES_MAX = 32_000
"""… or at a line end, or inside an endless line, before this many."""
EXCERPT_CHARS = 200

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
COMPRESSED_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"7z\xbc\xaf", b"Rar!")
JSON_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson", ".jsonlines"})
ARRAY_START = re.compile(rb'\[\s*(\{\s*["}]|"(?:[^"\\]|\\.)*"\s*[,\]]|\]\s*$)')


class Format(StrEnum):
    """What a file holds. The last four are not read; their names are the reasons in the report."""

    JSON_LINES = "json lines"
    JSON_ARRAY = "json array"
    JSON_OBJECT = "json object"
    PARQUET = "parquet"
    TEXT = "text"
    UTF16 = "utf-16 text"
    EMPTY = "empty"
    COMPRESSED = "compressed"
    BINARY = "binary"
    UNREADABLE = UNREADABLE


NOT_READ = frozenset({Format.EMPTY, Format.COMPRESSED, Format.BINARY, Format.UNREADABLE})


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the readers must respect."""

    max_record_bytes: int
    split_text_above_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One item as the file gave it."""

    fields: dict[str, Any]
    place: str
    is_document: bool = False
    """True when the reader made the document itself (plain text): fields are then `content`, `title`, `others`."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """One item that could not be read."""

    place: str
    reason: str
    detail: str
    raw_bytes: int
    excerpt: str = ""
    ends_file: bool = False
    """True when nothing behind this place could be read; `raw_bytes` then reaches to the end of the file."""


OnBytes = Callable[[int], None]
Items = Iterator[Row | Damaged]


def detect_format(file: InputFile) -> Format:
    """The format of a file by its first 64 KB and the ending of its name."""
    try:
        with open(file.path, "rb") as handle:
            return sniff(handle.read(HEAD_BYTES), file.path.suffix.lower())
    except OSError:
        return Format.UNREADABLE


def sniff(head: bytes, suffix: str) -> Format:
    """The format of a file that starts with `head` (up to 64 KB) and whose name ends in `suffix`."""
    if not head:
        return Format.EMPTY
    if head.startswith(b"PAR1"):
        return Format.PARQUET
    if head.startswith(COMPRESSED_MAGIC):
        return Format.COMPRESSED
    if head.startswith(UTF16_BOMS):
        return Format.UTF16
    if b"\0" in head:
        return Format.BINARY
    if suffix in CODE_SUFFIXES:
        return Format.TEXT
    body = head.removeprefix(UTF8_BOM).lstrip()
    named_json = suffix in JSON_SUFFIXES
    if body.startswith(b"["):
        return Format.JSON_ARRAY if named_json or ARRAY_START.match(body) else Format.TEXT
    if body.startswith(b"{"):
        return _sniff_objects(body, named_json, whole=len(head) < HEAD_BYTES)
    return Format.JSON_LINES if named_json else Format.TEXT


def _sniff_objects(body: bytes, named_json: bool, whole: bool) -> Format:
    """One object a line, one object over many lines, or a text that happens to start with a brace."""
    lines = body.split(b"\n")
    if len(lines) == 1 and not whole:  # the first line is longer than the head
        return Format.JSON_LINES if named_json or re.match(rb'\{\s*"', body) else Format.TEXT
    if _is_object(lines[0]):
        return Format.JSON_LINES
    if whole and _is_object(body):
        return Format.JSON_OBJECT
    if named_json and lines[0].rstrip().endswith((b"{", b"[", b",")):
        return Format.JSON_OBJECT
    if named_json or any(_is_object(line) for line in lines[1:] if line.startswith(b"{")):
        return Format.JSON_LINES
    return Format.TEXT


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(jsonio.loads(data), dict)
    except ValueError:
        return False


def read_file(file: InputFile, found: Format, limits: Limits, on_bytes: OnBytes) -> Items:
    """Everything in one file. `on_bytes` is told how many raw bytes were consumed, for the progress bar."""
    readers: dict[Format, Callable[[InputFile, Limits, OnBytes], Items]] = {
        Format.JSON_LINES: _read_json_lines,
        Format.JSON_ARRAY: _read_json_array,
        Format.JSON_OBJECT: _read_json_object,
        Format.PARQUET: _read_parquet,
        Format.TEXT: _read_text,
        Format.UTF16: _read_utf16,
    }
    consumed = 0

    def count(amount: int) -> None:
        nonlocal consumed
        consumed += amount
        on_bytes(amount)

    try:
        yield from readers[found](file, limits, count)
    except OSError as error:  # the disk or the network share failed while reading
        rest = max(file.size_bytes - consumed, 0)
        yield Damaged(f"byte {consumed}", "read_error", str(error), rest, ends_file=True)


# ---- one JSON value a line ------------------------------------------------------------------------------------


def _read_json_lines(file: InputFile, limits: Limits, on_bytes: OnBytes) -> Items:
    limit = limits.max_record_bytes
    with open(file.path, "rb", buffering=READ_BYTES) as handle:
        offset = _skip_bom(handle)
        number = 0
        while line := handle.readline(limit + 1):
            number += 1
            length = len(line)
            place = f"line {number}, byte {offset}"
            if length > limit:
                length += _pass_over_line(handle, line)
                yield _too_large(place, length, limit, line)
            elif not line.isspace():
                yield _parse_row(line, place)
            offset += length
            on_bytes(length)


def _pass_over_line(handle: BinaryIO, start: bytes) -> int:
    """Skip what is left of a line in constant memory; returns how many bytes that was."""
    passed = 0
    piece = start
    while piece and not piece.endswith(b"\n"):
        piece = handle.readline(READ_BYTES)
        passed += len(piece)
    return passed


def _parse_row(data: bytes, place: str) -> Row | Damaged:
    try:
        value = jsonio.loads(data)
    except ValueError as strict_error:
        try:
            value = _lenient_loads(data)
        except UnicodeDecodeError as error:
            return _invalid_utf8(place, data, error)
        except (ValueError, RecursionError):
            return Damaged(place, "invalid_json", str(strict_error), len(data), excerpt_of(data))
    return _as_row(value, place, len(data))


def _lenient_loads(data: bytes) -> Any:
    """For lone surrogates, NaN and huge integers, which orjson refuses and real data sets contain."""
    import json

    return json.loads(data.decode("utf-8"))


def _as_row(value: Any, place: str, raw_bytes: int) -> Row | Damaged:
    if isinstance(value, dict):
        return Row(value, place)
    if isinstance(value, str):
        return Row({"text": value}, place)
    return Damaged(place, "not_an_object", f"expected an object, found {type(value).__name__}", raw_bytes, repr(value))


# ---- one big JSON array ---------------------------------------------------------------------------------------


def _read_json_array(file: InputFile, _: Limits, on_bytes: OnBytes) -> Items:
    import ijson

    with open(file.path, "rb") as handle:
        _skip_bom(handle)
        counted = _CountedReads(handle, on_bytes)
        number = 0
        try:
            for value in ijson.items(counted, "item", buf_size=READ_BYTES):
                number += 1
                yield _as_row(value, f"item {number}", len(repr(value)) if type(value) is not dict else 0)
        except ijson.JSONError as error:
            good_end, error_at = _locate_array_error(file, counted.last_chunk_at)
            handle.seek(good_end)
            excerpt = excerpt_of(handle.read(EXCERPT_CHARS * 4).lstrip(b", \r\n\t"))
            first_line = str(error).removeprefix("b'").splitlines()[0]
            reason = "cut_off" if error_at >= file.size_bytes else "invalid_json"
            place = f"item {number + 1}, byte {error_at}"
            yield Damaged(place, reason, first_line[:100], file.size_bytes - good_end, excerpt, ends_file=True)


class _CountedReads:
    """A file that reports what is read from it and remembers where the last piece began."""

    def __init__(self, handle: BinaryIO, on_bytes: OnBytes) -> None:
        self.handle, self.on_bytes = handle, on_bytes
        self.last_chunk_at = handle.tell()

    def read(self, size: int = -1) -> bytes:
        at = self.handle.tell()
        piece = self.handle.read(size)
        if piece:
            self.last_chunk_at = at
        self.on_bytes(len(piece))
        return piece


def _locate_array_error(file: InputFile, last_chunk_at: int) -> tuple[int, int]:
    """Where the last good item ended and where the error stands, by feeding the last piece byte by byte.

    ijson names no offset. Reading a damaged file twice is cheap (about 150 MB/s) and happens once a file.
    """
    import ijson

    items = ijson.sendable_list()
    parser = ijson.items_coro(items, "item")
    with open(file.path, "rb") as handle:
        at = good_end = _skip_bom(handle)
        try:
            while piece := handle.read(min(READ_BYTES, last_chunk_at - at) if at < last_chunk_at else 1):
                parser.send(piece)
                at += len(piece)
                if items:
                    good_end = at
                    items.clear()
        except (ijson.JSONError, StopIteration):
            return good_end, at
    return good_end, file.size_bytes


# ---- one JSON object a file -----------------------------------------------------------------------------------


def _read_json_object(file: InputFile, limits: Limits, on_bytes: OnBytes) -> Items:
    data = _read_whole(file, limits, on_bytes)
    yield data if isinstance(data, Damaged) else _parse_row(data, "whole file")


# ---- parquet --------------------------------------------------------------------------------------------------


def _read_parquet(file: InputFile, _: Limits, on_bytes: OnBytes) -> Items:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer size a whole column chunk of the row group is held in memory.
        table = pyarrow.parquet.ParquetFile(file.path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        on_bytes(file.size_bytes)
        yield Damaged("whole file", "damaged_parquet", _first_line(error), file.size_bytes, ends_file=True)
        return
    with table:
        total_rows = max(table.metadata.num_rows, 1)
        row_number = told = 0
        for group in range(table.num_row_groups):
            group_end = row_number + table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], use_threads=False):
                    yield from _batch_rows(batch, row_number)
                    row_number += batch.num_rows
                    reached = file.size_bytes * row_number // total_rows
                    on_bytes(reached - told)
                    told = reached
            except (pyarrow.ArrowException, OSError) as error:
                lost = file.size_bytes * (group_end - row_number) // total_rows
                place = f"row group {group}, from row {row_number + 1} to {group_end}"
                yield Damaged(place, "damaged_parquet", _first_line(error), lost, ends_file=True)
                row_number = group_end


def _batch_rows(batch: Any, rows_before: int) -> Items:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # find the rows to blame one by one
        for index in range(batch.num_rows):
            place = f"row {rows_before + index + 1}"
            try:
                yield Row(batch.slice(index, 1).to_pylist()[0], place)
            except UnicodeDecodeError as error:
                yield _invalid_utf8(place, error.object, error)
        return
    for index, row in enumerate(rows):
        yield Row(row, f"row {rows_before + index + 1}")


# ---- plain text -----------------------------------------------------------------------------------------------


def _read_text(file: InputFile, limits: Limits, on_bytes: OnBytes) -> Items:
    if file.size_bytes > limits.split_text_above_bytes and not file.is_code:
        yield from _read_long_text(file, on_bytes)
        return
    data = _read_whole(file, limits, on_bytes)
    if isinstance(data, Damaged):
        yield data
    else:
        yield _text_row(data, "whole file", 0, _text_fields(file))


def _text_fields(file: InputFile, part: int | None = None) -> dict[str, Any]:
    """What is known of a plain text beside its text. The path of a program belongs to what a model should read; the
    name of a text file is only where it came from."""
    others: dict[str, Any] = {"file": file.name} if part is None else {"file": file.name, "part": part}
    return {"content": "", "title": file.name if file.is_code else "", "others": others}


def _read_long_text(file: InputFile, on_bytes: OnBytes) -> Items:
    """Cut a long text into documents of 8 to 32 KB, at blank lines where there are any."""
    with open(file.path, "rb", buffering=READ_BYTES) as handle:
        start = _skip_bom(handle)
        document = bytearray()
        part = 0
        while True:
            line = handle.readline(DOCUMENT_BYTES_MAX)
            if len(line) == DOCUMENT_BYTES_MAX and not line.endswith(b"\n"):
                whole = _whole_characters(line)
                handle.seek(whole - len(line), os.SEEK_CUR)
                line = line[:whole]
            at_blank_line = len(document) >= DOCUMENT_BYTES and line.isspace()
            if not line or at_blank_line or len(document) + len(line) > DOCUMENT_BYTES_MAX:
                if document and not document.isspace():
                    part += 1
                    yield _text_row(bytes(document), f"part {part}", start, _text_fields(file, part))
                start += len(document)
                on_bytes(len(document))
                document.clear()
            if not line:
                return
            document += line


def _whole_characters(data: bytes) -> int:
    """How many bytes of `data` remain when a UTF-8 character cut in two at its end is left for later."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character of 2, 3 or 4 bytes
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= length else len(data) - back
        if byte < 0x80:
            break
    return len(data)


def _text_row(data: bytes, place: str, offset: int, fields: dict[str, Any]) -> Row | Damaged:
    try:
        fields["content"] = data.removeprefix(UTF8_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        return _invalid_utf8(f"byte {offset + error.start}", data, error)
    return Row(fields, place, is_document=True)


def _read_utf16(file: InputFile, _: Limits, on_bytes: OnBytes) -> Items:
    on_bytes(file.size_bytes)
    detail = "the file is UTF-16; convert it with: iconv -f UTF-16 -t UTF-8"
    yield Damaged("whole file", "not_utf8", detail, file.size_bytes, ends_file=True)


# ---- shared ---------------------------------------------------------------------------------------------------


def _skip_bom(handle: BinaryIO) -> int:
    if handle.read(len(UTF8_BOM)) == UTF8_BOM:
        return len(UTF8_BOM)
    handle.seek(0)
    return 0


def _read_whole(file: InputFile, limits: Limits, on_bytes: OnBytes) -> bytes | Damaged:
    on_bytes(file.size_bytes)
    with open(file.path, "rb") as handle:
        data = handle.read(limits.max_record_bytes + 1)
    if len(data) > limits.max_record_bytes:
        return _too_large("whole file", file.size_bytes, limits.max_record_bytes, data)
    return data.removeprefix(UTF8_BOM)


def _too_large(place: str, length: int, limit: int, data: bytes) -> Damaged:
    return Damaged(place, "too_large", f"{length:,} bytes; max_record_bytes is {limit:,}", length, excerpt_of(data))


def _invalid_utf8(place: str, data: bytes, error: UnicodeDecodeError) -> Damaged:
    detail = f"byte 0x{error.object[error.start]:02x} at {error.start} of {len(data)} is not UTF-8"
    near = max(0, error.start - EXCERPT_CHARS // 2)
    return Damaged(place, "not_utf8", detail, len(data), excerpt_of(data[near:]))


def excerpt_of(data: bytes) -> str:
    """The first characters of raw data, readable whatever it holds."""
    return data[: EXCERPT_CHARS * 4].decode("utf-8", errors="backslashreplace")[:EXCERPT_CHARS]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:EXCERPT_CHARS]
