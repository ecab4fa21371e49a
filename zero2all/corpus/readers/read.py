"""Reading one unit: through compression and archives down to rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, cast

from zero2all.corpus.listing import CODE_SUFFIXES, open_input
from zero2all.corpus.readers import archives
from zero2all.corpus.readers.archives import ArchiveMember
from zero2all.corpus.readers.chats import conversations
from zero2all.corpus.readers.encodings import Transcoded, is_wide
from zero2all.corpus.readers.items import (
    DOCUMENTS,
    FINISHED,
    NOT_READ,
    Cursor,
    Damaged,
    Format,
    ItemOrigin,
    Items,
    OnBytes,
    OnSkip,
    RawRow,
    ReaderLimits,
    TextBy,
    Unit,
    first_line_of,
    suffix_of,
    too_large,
)
from zero2all.corpus.readers.lines import (
    LongLine,
    broken_item,
    line_batches,
    parse_record,
    read_json_lines,
    read_text_lines,
    text_row,
)
from zero2all.corpus.readers.sniff import (
    ARCHIVES,
    HEAD_BYTES,
    JSON_SUFFIXES,
    STREAMS,
    TEXT_OF_BOOK,
    SniffedFormat,
    container_of,
    inner_name,
    sniff,
)
from zero2all.corpus.readers.streams import FileSlice, Guard, Stream, StreamError, UnitProgress, decompress, spooled


def read_unit(
    unit: Unit, limits: ReaderLimits, on_bytes: OnBytes, resume_at: Cursor | None = None, on_skip: OnSkip | None = None
) -> Items:
    """Everything in one unit, in order, or what follows the item whose cursor is `resume_at`.

    `on_bytes` is told how many bytes of the file were consumed: `unit.raw_bytes` in all. `on_skip` is told of archive
    members that hold nothing to read, between the items they stand between. A reader never raises for bad content: it
    yields `Damaged` and goes on.
    """
    if limits.chats:
        yield from _chats(unit, limits, on_bytes, resume_at, on_skip)
        return
    progress = UnitProgress(on_bytes, unit.raw_bytes)
    if unit.format not in NOT_READ and resume_at != [FINISHED]:
        try:
            with closing(open_input(unit.file)) as file:
                skip = on_skip or (lambda _reason, _name: None)
                yield from _UnitReader(unit, limits, file, progress, skip).items(resume_at)
        except OSError as error:
            origin = ItemOrigin(unit.file.name, "", unit.format)
            yield origin.damaged(0, 0, "read_error", first_line_of(error), unit.raw_bytes).to_the_end()
    progress.finish()


def _chats(
    unit: Unit, limits: ReaderLimits, on_bytes: OnBytes, resume_at: Cursor | None, on_skip: OnSkip | None
) -> Items:
    """The unit with messages joined; always read from its beginning, since a conversation may begin anywhere."""
    is_new = resume_at is None

    def skip(reason: str, name: str) -> None:
        if is_new and on_skip is not None:
            on_skip(reason, name)

    for item in conversations(read_unit(unit, replace(limits, chats=False), on_bytes, None, skip)):
        if is_new:
            yield item
        is_new = is_new or item.cursor == resume_at


class _UnitReader:
    """One unit while it is read."""

    def __init__(
        self, unit: Unit, limits: ReaderLimits, file: BinaryIO, progress: UnitProgress, on_skip: OnSkip
    ) -> None:
        self.unit, self.limits, self.file, self.progress, self.on_skip = unit, limits, file, progress, on_skip
        self.name = unit.file.name
        self.guard = Guard(unit.file.size_bytes, limits)

    def items(self, resume: Cursor | None) -> Items:
        """The items behind `resume`, or all."""
        unit = self.unit
        if not unit.compression:
            return self._plain(resume)
        part = FileSlice(self.file, 0, unit.file.size_bytes, self.progress)
        return self._stream(Stream(part.read, cast(BinaryIO, part)), self.name, "", (), 0, resume)

    # ---- what files are split into -----------------------------------------------------------------------------

    def _plain(self, resume: Cursor | None) -> Items:
        unit = self.unit
        found = _found_of(unit)
        origin = self._origin(found, self.name, "", ())
        size = unit.file.size_bytes
        if found.format is Format.PARQUET:
            file: Path | BinaryIO = unit.file.path if unit.file.url is None else self.file
            return self._parquet(file, origin, resume)
        start = unit.start
        if resume and not self._is_whole(origin, size) and not self._is_converted(origin, size):
            start = resume[0]
        end = size if unit.end is None else unit.end
        stream = Stream(FileSlice(self.file, start, end - start, self.progress).read)
        return self._leaf(stream, found, origin, size, resume, start)

    # ---- layers ------------------------------------------------------------------------------------------------

    def _stream(
        self, stream: Stream, name: str, member: str, path: tuple[int, ...], depth: int, resume: Cursor | None
    ) -> Items:
        """What a stream holds. `name` helps to find its format, `member` is its label within the archive."""
        head = stream.peek(HEAD_BYTES)
        container = container_of(head, name)
        if container and depth >= self.limits.max_nesting:
            origin = self._origin(SniffedFormat(Format.ARCHIVE), name, member, path)
            detail = f"more than {self.limits.max_nesting} nested archives and compressions (max_nesting)"
            yield origin.damaged(0, FINISHED, "nested_too_deep", detail, 0, head)
        elif container in STREAMS:
            inner = Stream(decompress(stream.read_or_raise, container, self.guard))
            yield from self._stream(inner, inner_name(name, container), member, path, depth + 1, resume)
        elif container in ARCHIVES:
            yield from self._archive(container, stream, member, path, depth, resume)
        elif not head and stream.broken is None:
            self.on_skip(Format.EMPTY, self._label(member))
        else:
            whole = len(head) < HEAD_BYTES and stream.broken is None
            found = sniff(head, name, whole, named=self.limits.encoding)
            if not head:
                found = SniffedFormat(Format.TEXT)
            if found.format in NOT_READ:
                self.on_skip(found.format, self._label(member))
                return
            origin = self._origin(found, name, member, path)
            yield from self._leaf(stream, found, origin, self._size_of(stream, found), resume)

    def _size_of(self, stream: Stream, found: SniffedFormat) -> int:
        """How long a stream is, as far as it matters: whether a text is long enough to be cut."""
        if found.format is not Format.TEXT or self.limits.text_by is not TextBy.AUTO:
            return 0
        return len(stream.peek(min(self.limits.split_text_above_bytes, self.limits.max_record_bytes) + 1))

    def _archive(
        self, kind: str, stream: Stream, member: str, path: tuple[int, ...], depth: int, resume: Cursor | None
    ) -> Items:
        first = resume[0] if resume else 0
        if first == FINISHED:
            return
        book = suffix_of(member or self.name) if kind == "zip" else ""
        book = book if book in TEXT_OF_BOOK else ""
        if kind in ("7z", "rar") and not archives.has_libarchive():
            self.on_skip(Format.NEEDS_LIBARCHIVE, self._label(member))
            return
        try:
            with self._seekable(stream, kind != "tar") as file:
                start, end = (self.unit.start, self.unit.end) if depth == 0 else (0, None)
                for entry in self._entries(kind, stream, file, max(first, start), end):
                    if entry.number < first:
                        continue
                    inner = resume[1:] if resume and entry.number == first else None
                    if inner != [FINISHED]:
                        yield from self._member(entry, member, path, depth, inner, book)
        except StreamError as error:
            origin = self._origin(SniffedFormat(Format.ARCHIVE), self.name, member, path)
            words = f"{kind}: {error.detail}"
            place = f"{member}, {kind} archive" if member else f"{kind} archive"
            cursor = [*path, FINISHED]
            yield Damaged(place, error.reason, words[:400], error.lost_bytes, "", True, origin, cursor)

    @contextmanager
    def _seekable(self, stream: Stream, is_needed: bool = True) -> Iterator[BinaryIO | None]:
        """The bytes of a stream with random access, copied to a temporary file if there is no other way."""
        if stream.file is not None or not is_needed:
            yield stream.file
            return
        with spooled(stream, self.limits) as file:
            yield file

    def _entries(
        self, kind: str, stream: Stream, file: BinaryIO | None, first: int, end: int | None
    ) -> Iterator[ArchiveMember]:
        if kind == "tar":
            yield from archives.TarReader(stream).members()
            return
        assert file is not None, "only a tar is read from a stream"
        if kind != "zip":
            yield from archives.libarchive_members(file, self.guard, "7zip" if kind == "7z" else kind)
            return
        try:
            reader = archives.ZipReader(file, self.guard)
        except StreamError as error:
            if not archives.has_libarchive():
                raise StreamError(error.reason, f"{error.detail}; {archives.INSTALL_LIBARCHIVE}") from error
            yield from archives.libarchive_members(file, self.guard, "zip_streamable")
            return
        yield from reader.members(first, end)

    def _member(
        self,
        entry: archives.ArchiveMember,
        outer: str,
        path: tuple[int, ...],
        depth: int,
        resume: Cursor | None,
        book: str,
    ) -> Items:
        name = entry.name.removeprefix("./")
        member = f"{outer}/{name}" if outer else name
        inner_path = (*path, entry.number)
        if entry.skip == "folder":
            return
        problem = entry.error
        if problem is None and not archives.is_safe_name(name):
            problem = StreamError(
                "unsafe_name", f"the archive member {name!r} points outside of the archive, so it is not read"
            )
        if problem is not None:
            origin = self._origin(SniffedFormat(Format.ARCHIVE), name, member, inner_path)
            place = member or f"entry {entry.number + 1}"
            cursor = [*inner_path, FINISHED]
            yield Damaged(place, problem.reason, problem.detail, entry.size, "", False, origin, cursor)
        elif entry.skip or archives.is_hidden(name):
            self.on_skip(entry.skip or "hidden", self._label(member))
        elif book and not re.fullmatch(TEXT_OF_BOOK[book], name, re.IGNORECASE):
            return  # pictures, styles
        elif entry.open is not None:
            yield from self._stream(entry.open(), name, member, inner_path, depth + 1, resume)

    def _label(self, member: str) -> str:
        return f"{self.name}/{member}" if member else self.name

    # ---- formats -----------------------------------------------------------------------------------------------

    def _origin(self, found: SniffedFormat, name: str, member: str, path: tuple[int, ...]) -> ItemOrigin:
        counts = "row" if found.format is Format.PARQUET else "byte"
        is_code = suffix_of(name) in CODE_SUFFIXES
        is_misnamed = found.format is Format.TEXT and suffix_of(name) in JSON_SUFFIXES
        encoding = found.encoding
        return ItemOrigin(self.name, member, found.format, encoding, encoding, path, is_code, is_misnamed, counts)

    def _leaf(
        self, stream: Stream, found: SniffedFormat, origin: ItemOrigin, size: int, resume: Cursor | None, start: int = 0
    ) -> Items:
        """The items of a file or member of `size` bytes, of which the stream has those from position `start` on."""
        if resume and (resume[0] == FINISHED or self._is_whole(origin, size)):
            return
        if found.format is Format.PARQUET:
            yield from self._nested_parquet(stream, origin, resume)
            return
        at = start
        if start == 0:
            at = stream.skip(found.bom_bytes)
        if self._is_converted(origin, size):
            stream = Stream(Transcoded(stream.read_or_raise, origin.encoding).read)
            origin.data = "utf-8"
            at = 0
        is_beginning = start == 0 and not resume
        line_start = None
        if resume:
            stream.skip(resume[0] - at)
            at = resume[0]
            line_start = resume[1] if len(resume) > 1 else None
        limits = self.limits
        if found.format is Format.JSON_LINES:
            yield from read_json_lines(stream, origin, limits, at)
        elif found.format is Format.JSON_ARRAY:
            from zero2all.corpus.readers.arrays import ArrayPart, read_json_array

            part = ArrayPart(found.first_key, is_last=self.unit.end is None, is_inside=not is_beginning)
            yield from read_json_array(stream, origin, limits, at, part)
        elif found.format is Format.CSV:
            from zero2all.corpus.readers.tables import read_csv

            skip_header = found.has_header and is_beginning
            yield from read_csv(stream, origin, limits, at, found, skip_header)
        elif found.format in (Format.WARC, Format.MEDIAWIKI):
            from zero2all.corpus.readers.dumps import DUMPS

            yield from DUMPS[found.format](stream, origin, limits, at, self.on_skip)
        elif self._is_whole(origin, size):
            yield from read_whole(stream, origin, limits)
        elif limits.text_by is TextBy.LINE:
            yield from read_text_lines(stream, origin, limits, at)
        elif limits.text_by is TextBy.BLANK_LINE:
            yield from read_paragraphs(stream, origin, limits, at)
        else:
            yield from read_long_text(stream, origin, limits, at, line_start)

    def _parquet(self, file: Path | BinaryIO, origin: ItemOrigin, resume: Cursor | None) -> Items:
        from zero2all.corpus.readers.tables import read_parquet

        yield from read_parquet(file, origin, self.limits, self.unit, resume[0] if resume else 0, self.progress)

    def _nested_parquet(self, stream: Stream, origin: ItemOrigin, resume: Cursor | None) -> Items:
        try:
            with self._seekable(stream) as file:
                assert file is not None, "parquet is not read from a stream"
                file.seek(0)
                yield from self._parquet(file, origin, resume)
        except StreamError as error:
            yield origin.damaged(0, 0, error.reason, error.detail, 0).to_the_end()

    def _is_whole(self, origin: ItemOrigin, size: int) -> bool:
        """Whether all of a file or member is one item."""
        if origin.format is not Format.TEXT:
            return origin.format in DOCUMENTS or origin.format is Format.JSON_OBJECT
        if origin.is_code or self.limits.text_by is TextBy.FILE:
            return True
        return self.limits.text_by is TextBy.AUTO and size <= self.limits.split_text_above_bytes

    def _is_converted(self, origin: ItemOrigin, size: int) -> bool:
        """Whether the data must be brought to UTF-8 before it is cut into items."""
        if origin.encoding == "utf-8" or self._is_whole(origin, size):
            return False
        by_characters = origin.format is Format.TEXT and self.limits.text_by is TextBy.AUTO
        return by_characters or is_wide(origin.encoding) or origin.format in (Format.JSON_ARRAY, Format.CSV)


def _found_of(unit: Unit) -> SniffedFormat:
    return SniffedFormat(*(getattr(unit, name) for name in SniffedFormat._fields))


# Plain text by file, by blank line, and long texts cut into documents.
#
# A long text is cut at the first blank line behind `text_piece_bytes` (8 KB), else at the last line end before four
# times as many, else between two characters. It is also cut at the first line end behind every multiple of
# `text_block_bytes`: units begin at such places, so that splitting a file among workers does not change its documents.


LONGEST = 4
"""Times `text_piece_bytes`: the longest document cut from a long text."""
READ_BYTES = 1 << 18

_BLANK_LINE = re.compile(rb"\n(?=[^\S\n]*\n)")


def read_whole(stream: Stream, origin: ItemOrigin, limits: ReaderLimits) -> Items:
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
    elif origin.format in DOCUMENTS:
        from zero2all.corpus.readers.documents import document_row

        item = document_row(whole, origin, 0, size)
    else:
        item = text_row(whole, origin, 0, size, whole=True)
    if item is not None:
        yield item


def read_paragraphs(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int) -> Items:
    """Blocks of lines with blank lines between them, from position `at`, where the stream stands."""
    limit = limits.max_record_bytes
    encoding = origin.data
    blank = {b"", b" ", b"\r"}
    block: list[bytes] = []
    start = end = at
    size = 0
    for batch in line_batches(stream, limit):
        if isinstance(batch, LongLine):
            block = block or [batch.head]
            end += batch.size
            size += batch.size + limit
            continue
        for line in batch.lines:
            line_end = end + len(line) + batch.newline_bytes
            is_blank = line in blank or (len(line) < 1000 and not line.decode(encoding, "replace").strip())
            if not is_blank:
                size += len(line) + 1
                if size <= limit + 1:
                    block.append(line)
                end = line_end
                continue
            if block:
                yield from _paragraph(block, size, origin, limits, start, line_end)
            block, size = [], 0
            start = end = line_end
    if stream.broken is not None:
        yield broken_item(stream, origin, start, b"\n".join(block))
    elif block:
        yield from _paragraph(block, size, origin, limits, start, end)


def _paragraph(block: list[bytes], size: int, origin: ItemOrigin, limits: ReaderLimits, start: int, end: int) -> Items:
    if size > limits.max_record_bytes + 1:
        yield too_large(origin, start, end - start, limits.max_record_bytes, block[0])
        return
    item = text_row(b"\n".join(block), origin, start, end, whole=False)
    if item is not None:
        yield item


def read_long_text(stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int, line_start: int | None) -> Items:
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


def _document_end(data: bytes, at_end: bool, at: int, line_start: int, limits: ReaderLimits) -> int:
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
