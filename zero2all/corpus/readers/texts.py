"""Plain text by file, by blank line, and long texts cut into documents.

A long text is cut at the first blank line behind `text_piece_bytes` (8 KB), else at the last line end before four times
as many, else between two characters. It is also cut at the first line end behind every multiple of `text_block_bytes`:
units begin at such places, so that splitting a file among workers does not change its documents.
"""

from __future__ import annotations

import re
from dataclasses import replace

from zero2all.corpus.readers.encodings import newline_of
from zero2all.corpus.readers.items import Damaged, Format, Items, Limits, Origin, RawRow, too_large
from zero2all.corpus.readers.lines import LongLine, broken_item, line_batches, parse_record, text_row
from zero2all.corpus.readers.streams import Stream

LONGEST = 4
"""Times `text_piece_bytes`: the longest document cut from a long text."""
READ_BYTES = 1 << 18

_BLANK_LINE = re.compile(rb"\n(?=[^\S\n]*\n)")


def read_whole(stream: Stream, origin: Origin, limits: Limits) -> Items:
    """The whole file as one document, or as one JSON value."""
    chunks: list[bytes] = []
    size = 0
    while data := stream.read():
        size += len(data)
        if size <= limits.max_record_bytes:
            chunks.append(data)
    whole = b"".join(chunks)
    item: RawRow | Damaged | None
    if size > limits.max_record_bytes:
        item = too_large(origin, 0, size, limits.max_record_bytes, chunks[0] if chunks else b"")
    elif stream.broken is not None:
        item = broken_item(stream, origin, size, whole)
    elif origin.format is Format.JSON_OBJECT:
        item = parse_record(whole, origin.data, origin, 0, size)
    else:
        item = text_row(whole, origin, 0, size, whole=True)
    if item is not None:
        yield item


def read_paragraphs(stream: Stream, origin: Origin, limits: Limits, at: int) -> Items:
    """Blocks of lines with blank lines between them, from position `at`, where the stream stands."""
    limit = limits.max_record_bytes
    encoding = origin.data
    newline = newline_of(encoding)
    blank = {newline[:0], " ".encode(encoding), "\r".encode(encoding)}
    block: list[bytes] = []
    start = end = at
    size = 0
    for batch in line_batches(stream, encoding, limit):
        if isinstance(batch, LongLine):
            block = block or [batch.head]
            end += batch.size
            size += batch.size + limit
            continue
        for line in batch.lines:
            line_end = end + len(line) + batch.newline_bytes
            is_blank = line in blank or (len(line) < 1000 and not line.decode(encoding, "replace").strip())
            if not is_blank:
                size += len(line) + len(newline)
                if size <= limit + len(newline):
                    block.append(line)
                end = line_end
                continue
            if block:
                yield from _paragraph(block, size, newline, origin, limits, start, line_end)
            block, size = [], 0
            start = end = line_end
    if stream.broken is not None:
        yield broken_item(stream, origin, start, newline.join(block))
    elif block:
        yield from _paragraph(block, size, newline, origin, limits, start, end)


def _paragraph(
    block: list[bytes], size: int, newline: bytes, origin: Origin, limits: Limits, start: int, end: int
) -> Items:
    if size > limits.max_record_bytes + len(newline):
        yield too_large(origin, start, end - start, limits.max_record_bytes, block[0])
        return
    item = text_row(newline.join(block), origin, start, end, whole=False)
    if item is not None:
        yield item


def read_long_text(stream: Stream, origin: Origin, limits: Limits, at: int, line_start: int | None) -> Items:
    """Documents of 1 to 4 `text_piece_bytes` of UTF-8 text, from position `at`, where the stream stands.

    `line_start`: where the line began that `at` lies in, if it is not its beginning.
    """
    most = limits.text_piece_bytes * LONGEST
    data = b""
    at_end = False
    line_start = at if line_start is None else line_start
    while True:
        while not at_end and len(data) <= most + 4:
            more = stream.read(READ_BYTES)
            at_end = not more
            data += more
        if not data or (at_end and stream.broken is not None and len(data) <= most):
            break
        size = _document_end(data, at_end, at, line_start, limits)
        document, data = data[:size], data[size:]
        end = at + size
        inside_line = not document.endswith(b"\n")
        last_line = document.rfind(b"\n") + 1
        if last_line:
            line_start = at + last_line
        item = text_row(document, origin, at, end, whole=False)
        if isinstance(item, RawRow) and inside_line:
            item.line_start = line_start
        elif isinstance(item, Damaged) and inside_line:
            item = replace(item, cursor=[*origin.path, end, line_start])
        if item is not None:
            yield item
        at = end
    if stream.broken is not None:
        yield broken_item(stream, origin, at, data)


def _document_end(data: bytes, at_end: bool, at: int, line_start: int, limits: Limits) -> int:
    """How long the document at the beginning of `data` is."""
    most = limits.text_piece_bytes * LONGEST
    if len(data) <= most and at_end:
        size = len(data)
    else:
        size = data.rfind(b"\n", 0, most) + 1 or _whole_characters(data[:most])
    blank = _BLANK_LINE.search(data, limits.text_piece_bytes - 1, size)
    if blank:
        size = blank.end()
    border = (line_start // limits.text_block_bytes + 1) * limits.text_block_bytes
    line_end = data.find(b"\n", max(border - 1 - at, 0), size)
    return line_end + 1 if line_end >= 0 else size


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
