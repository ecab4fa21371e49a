"""Lines in batches, and the formats that have one item a line: JSON lines and plain text by line.

A chunk of 1 MB is split at once, which costs 0.1 us a line; a line longer than the limit is skipped chunk by chunk.
Positions are those in the encoding of the file, so a GB18030 file is split and resumed like a UTF-8 one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from zero2all.common import jsonio
from zero2all.corpus.readers.items import (
    Damaged,
    ItemOrigin,
    Items,
    RawRow,
    ReaderLimits,
    first_line_of,
    suffix_of,
    too_large,
    wrong_encoding,
)
from zero2all.corpus.readers.streams import Stream

READ_BYTES = 1 << 20
LARGE_BYTES = 4_000_000
"""A JSON record above this size is checked before it is parsed …"""
MAX_VALUES = 2_500_000
"""… and refused when it may hold more values than this: at about 70 bytes each they would fill the memory."""
LENIENT_BYTES = 8_000_000
"""The standard parser, which takes what orjson refuses, needs several times the memory: only up to this size."""
HEAD_KEPT = 1000
MARKDOWN_SUFFIXES = frozenset({".md", ".mdx", ".markdown", ".qmd", ".rmd"})
MAX_REPLACED_SHARE = 0.002
"""A plain text with a larger share of undecodable characters is damaged; as in the rule `replacement_characters`."""


class LineBatch(NamedTuple):
    """Lines without their line ends, in the encoding of the file, whose line end is one byte."""

    lines: list[bytes]
    newline_bytes: int
    """Length of the line end behind each; 0 for the last line of a file without one."""


class LongLine(NamedTuple):
    """A line above the limit, which was skipped."""

    size: int
    """With its line end."""
    head: bytes


def line_batches(stream: Stream, limit: int) -> Iterator[LineBatch | LongLine]:
    """All lines from here to the end."""
    held: list[bytes] = []
    held_bytes = 0
    while chunk := stream.read(READ_BYTES):
        lines = chunk.split(b"\n")
        if len(lines) == 1:
            if held_bytes <= limit:
                held.append(chunk)
            held_bytes += len(chunk)
            continue
        rest = lines.pop()
        if held_bytes + len(lines[0]) > limit:
            head = held[0] if held else lines[0]
            yield LongLine(held_bytes + len(lines[0]) + 1, head[:HEAD_KEPT])
            del lines[0]
        elif held:
            held.append(lines[0])
            lines[0] = b"".join(held)
        held, held_bytes = [rest], len(rest)
        if lines and max(map(len, lines)) > limit:
            yield from _with_long_lines(lines, limit)
        elif lines:
            yield LineBatch(lines, 1)
    if held_bytes > limit:
        yield LongLine(held_bytes, held[0][:HEAD_KEPT])
    elif held_bytes:
        yield LineBatch([b"".join(held)], 0)


def _with_long_lines(lines: list[bytes], limit: int) -> Iterator[LineBatch | LongLine]:
    for line in lines:
        yield LineBatch([line], 1) if len(line) <= limit else LongLine(len(line) + 1, line[:HEAD_KEPT])


def read_json_lines(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int) -> Items:
    """JSON lines from position `at`, where the stream stands."""
    loads = jsonio.loads
    encoding = origin.data
    for batch in _whole_lines(stream, origin, limits, at):
        if isinstance(batch, Damaged):
            yield batch
            continue
        lines, newline_bytes, at = batch
        for line in lines:
            end = at + len(line) + newline_bytes
            value: Any = None
            if len(line) < LARGE_BYTES:
                try:
                    value = loads(line if encoding == "utf-8" else line.decode(encoding))
                except ValueError:
                    value = None
            if type(value) is dict:
                yield RawRow(value, origin, at, end)
            elif line and not line.isspace():
                item = parse_record(line, encoding, origin, at, end)
                if item is not None:
                    yield item
            at = end


def _whole_lines(
    stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int
) -> Iterator[tuple[list[bytes], int, int] | Damaged]:
    """Lines, the length of their line ends, and the position of the first of them; and what cannot be read."""
    for batch in line_batches(stream, limits.max_record_bytes):
        if isinstance(batch, LongLine):
            yield too_large(origin, at, batch.size, limits.max_record_bytes, batch.head)
            at += batch.size
        elif not batch.newline_bytes and stream.broken is not None:
            yield broken_item(stream, origin, at, batch.lines[0])
            return
        else:
            yield batch.lines, batch.newline_bytes, at
            at += sum(map(len, batch.lines)) + batch.newline_bytes * len(batch.lines)
    if stream.broken is not None:
        yield broken_item(stream, origin, at, b"")


def parse_record(
    data: bytes, encoding: str, origin: ItemOrigin, at: int, end: int, strings: bool = False
) -> RawRow | Damaged | None:
    """A JSON value that is not the usual small object: anything but an object is damage, blank is nothing.

    `strings`: a string is a text, as in an array of them; among lines it is what is left of a broken object.
    Lone surrogates, NaN, huge integers and control characters, which orjson refuses, are in real data sets: taken.
    """
    if len(data) >= LARGE_BYTES and has_too_many_values(data, 0, len(data)):
        detail = f"the record may hold more than {MAX_VALUES:,} values, too many for a reader's memory"
        return origin.damaged(at, end, "too_many_values", detail, end - at, data)
    try:
        text = data.decode(encoding) if encoding != "utf-8" else data
        if not text.strip():
            return None
        value = jsonio.loads(text)
    except UnicodeDecodeError as error:
        return wrong_encoding(origin, at, end, data, error)
    except ValueError as strict_error:
        try:
            value = _lenient_loads(data, encoding)
        except UnicodeDecodeError as error:
            return wrong_encoding(origin, at, end, data, error)
        except (ValueError, RecursionError):
            return origin.damaged(at, end, "invalid_json", first_line_of(strict_error), end - at, data)
    if isinstance(value, dict):
        return RawRow(value, origin, at, end)
    if strings and isinstance(value, str):
        return RawRow({"text": value}, origin, at, end)
    detail = f"expected an object, found {type(value).__name__}"
    return origin.damaged(at, end, "not_an_object", detail, end - at, data)


def has_too_many_values(data: bytes | bytearray, start: int, end: int) -> bool:
    """Whether the JSON text at data[start:end] might need too much memory when it is parsed."""
    return sum(data.count(mark, start, end) for mark in (b",", b"[", b"{")) > MAX_VALUES


def _lenient_loads(data: bytes, encoding: str) -> Any:
    if len(data) > LENIENT_BYTES or b"\0" in data:  # zero bytes are what a bad disk leaves
        raise ValueError("not for the lenient parser")
    import json

    return json.loads(data.decode(encoding), strict=False)


def read_text_lines(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int) -> Items:
    """Every line that is not blank, from position `at`, where the stream stands."""
    for batch in _whole_lines(stream, origin, limits, at):
        if isinstance(batch, Damaged):
            yield batch
            continue
        lines, newline_bytes, at = batch
        for line in lines:
            end = at + len(line) + newline_bytes
            item = text_row(line, origin, at, end, whole=False)
            if item is not None:
                yield item
            at = end


def text_row(data: bytes, origin: ItemOrigin, at: int, end: int, whole: bool) -> RawRow | Damaged | None:
    """A document of plain text; nothing when it is blank. `whole`: it is all of its file.

    The path of a program belongs to what a model should read; the name of a text file is only where it came from.
    A few bytes that the encoding does not have become U+FFFD each; a text with more of them is damaged.
    """
    replaced = 0
    try:
        text = data.decode(origin.data)
    except UnicodeDecodeError as error:
        text = data.decode(origin.data, "replace")
        replaced = text.count("\ufffd") - data.decode(origin.data, "ignore").count("\ufffd")
        if replaced > MAX_REPLACED_SHARE * len(text):
            return wrong_encoding(origin, at, end, data, error, f"; {replaced:,} of {len(text):,} characters are bad")
    text = text.removesuffix("\r")
    if not whole and not text.strip():
        return None
    others: dict[str, Any] = {"file": origin.name} if whole else {"file": origin.name, "offset": at}
    title = (origin.member or origin.file) if origin.is_code else ""
    if whole and suffix_of(origin.name) in MARKDOWN_SUFFIXES:
        from zero2all.corpus.readers.markup import without_front_matter

        title, text, _ = without_front_matter(text)
    fields = {"content": text, "title": title, "others": others}
    return RawRow(fields, origin, at, end, is_document=True, replaced=replaced)


def broken_item(stream: Stream, origin: ItemOrigin, at: int, rest: bytes) -> Damaged:
    """What stands at the place where a stream broke."""
    if stream.broken is None:
        raise AssertionError("asked for the damage of a stream that is whole")
    error = stream.broken
    return origin.damaged(at, at, error.reason, error.detail, len(rest), rest).to_the_end()
