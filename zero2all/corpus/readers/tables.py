"""CSV and parquet."""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from zero2all.corpus.readers.items import (
    Damaged,
    Format,
    ItemOrigin,
    Items,
    RawRow,
    ReaderLimits,
    Unit,
    first_line_of,
    too_large,
    wrong_encoding,
)
from zero2all.corpus.readers.lines import HEAD_KEPT, broken_item
from zero2all.corpus.readers.sniff import SniffedFormat
from zero2all.corpus.readers.streams import CHUNK_BYTES, Stream, UnitProgress

ROWS_AT_ONCE = 8192


class CsvRows(NamedTuple):
    """Rows that follow one another in `data`, which starts at byte `base`: each from the end of the one before it."""

    data: bytes
    base: int
    start: int
    ends: list[int]


class LongRow(NamedTuple):
    """A row above the limit, which was skipped."""

    start: int
    end: int
    head: bytes


class RowScan:
    """Finds rows, which may have line ends inside quotes, in constant memory."""

    def __init__(self, stream: Stream, limits: ReaderLimits, at: int, delimiter: str) -> None:
        self.stream, self.limit, self.delimiter = stream, limits.max_record_bytes, ord(delimiter)
        self.data, self.base = b"", at
        self.row_start = at
        self.in_quotes = False
        self.large_head = b""

    def rows(self) -> Iterator[CsvRows | LongRow]:
        """All rows that end with a line end. What is left then stands in `data` from `row_start` on."""
        import numpy

        from zero2all.corpus.readers.kernels import FIELD_START, QUOTED, scan_rows

        state = numpy.array([FIELD_START, self.base], dtype=numpy.int64)
        out = numpy.zeros(ROWS_AT_ONCE, dtype=numpy.int64)
        position = 0
        while True:
            while position < len(self.data):
                view = numpy.frombuffer(self.data, dtype=numpy.uint8)
                position, count = scan_rows(view, position, self.base, self.delimiter, self.limit, state, out)
                yield from self._found(out[:count].tolist())
                self.in_quotes = int(state[0]) == QUOTED
            more = self.stream.read(CHUNK_BYTES)
            if not more:
                return
            keep = self.row_start - self.base
            if not self.large_head and len(self.data) - keep > self.limit:
                self.large_head = self.data[keep : keep + HEAD_KEPT]
            if self.large_head:
                keep = len(self.data)
            self.data = self.data[keep:] + more
            self.base += keep
            position -= keep

    def _found(self, ends: list[int]) -> Iterator[CsvRows | LongRow]:
        first = self.row_start
        good: list[int] = []
        for end in ends:
            if end - self.row_start > self.limit:
                if good:
                    yield CsvRows(self.data, self.base, first, good)
                    good = []
                head = self.large_head or self.data[self.row_start - self.base : end - self.base][:HEAD_KEPT]
                self.large_head = b""
                yield LongRow(self.row_start, end, head)
                first = end
            else:
                good.append(end)
            self.row_start = end
        if good:
            yield CsvRows(self.data, self.base, first, good)


def read_csv(
    stream: Stream, origin: ItemOrigin, limits: ReaderLimits, at: int, table: SniffedFormat, skip_header: bool
) -> Items:
    """The rows from position `at`, where the stream stands. `skip_header`: the first one is the header."""
    header, delimiter = table.header, table.delimiter
    csv.field_size_limit(max(csv.field_size_limit(), limits.max_record_bytes))
    scan = RowScan(stream, limits, at, delimiter)
    width = len(header)
    for found in scan.rows():
        if isinstance(found, LongRow):
            yield too_large(origin, found.start, found.end - found.start, limits.max_record_bytes, found.head)
            skip_header = False
            continue
        data, base, start, ends = found
        rows: list[list[str]] = []  # none when there is anything odd about one of them
        with suppress(UnicodeDecodeError, csv.Error):
            rows = _parsed(data[start - base : ends[-1] - base], delimiter)
        if len(rows) != len(ends):
            rows = []
        for number, end in enumerate(ends):
            if skip_header:
                skip_header = False
            elif rows and len(rows[number]) == width:
                yield RawRow(dict(zip(header, rows[number], strict=True)), origin, start, end)
            elif not rows or rows[number]:
                yield from _odd_row(data[start - base : end - base], origin, start, end, header, delimiter)
            start = end
    start, rest = scan.row_start, scan.data[max(scan.row_start - scan.base, 0) :]
    end = scan.base + len(scan.data)
    if stream.broken is not None:
        yield broken_item(stream, origin, start, rest)
    elif end - start > limits.max_record_bytes:
        yield too_large(origin, start, end - start, limits.max_record_bytes, scan.large_head or rest)
    elif scan.in_quotes:
        yield origin.damaged(start, end, "cut_off", "the file ends inside quotes", end - start, rest)
    elif rest and not skip_header:
        yield from _odd_row(rest, origin, start, end, header, delimiter)


def _parsed(data: bytes, delimiter: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode("utf-8"), newline="\n"), delimiter=delimiter))


def _odd_row(
    data: bytes, origin: ItemOrigin, start: int, end: int, header: tuple[str, ...], delimiter: str
) -> Iterator[RawRow | Damaged]:
    """One row on its own, with what is wrong with it."""
    try:
        rows = _parsed(data, delimiter)
    except UnicodeDecodeError as error:
        yield wrong_encoding(origin, start, end, data, error)
        return
    except csv.Error as error:
        yield origin.damaged(start, end, "invalid_csv", first_line_of(error), end - start, data)
        return
    fields = rows[0] if rows else []
    if len(rows) == 1 and len(fields) == len(header):
        yield RawRow(dict(zip(header, fields, strict=True)), origin, start, end)
    elif fields:
        detail = f"{len(fields)} fields, where the header has {len(header)}"
        yield origin.damaged(start, end, "wrong_field_count", detail, end - start, data)


def csv_borders(stream: Stream, limits: ReaderLimits, at: int, delimiter: str, unit_bytes: int) -> list[int]:
    """Where units of about `unit_bytes` can begin: starts of rows, found by one pass over the file."""
    borders: list[int] = []
    target = unit_bytes
    for found in RowScan(stream, limits, at, delimiter).rows():
        ends = found.ends if isinstance(found, CsvRows) else [found.end]
        while (first := bisect_left(ends, target)) < len(ends):
            borders.append(ends[first])
            target = ends[first] + unit_bytes
    return borders


BATCH_BYTES = 4 << 20
BATCH_ROWS = 1024


def open_parquet(file: Path | BinaryIO) -> Any:
    """A parquet file. Without a buffer size a whole column of a row group is held in memory."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)


def parquet_errors() -> tuple[type[BaseException], ...]:
    """What pyarrow raises on damaged files."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def read_parquet(
    file: Path | BinaryIO, origin: ItemOrigin, limits: ReaderLimits, unit: Unit, resume_row: int, progress: UnitProgress
) -> Items:
    """The rows of the row groups of a unit, or of a whole file in an archive, from row `resume_row` on."""
    first_group, end_group = (unit.start, unit.end) if unit.format is Format.PARQUET else (0, None)
    raw_bytes = unit.raw_bytes
    errors = parquet_errors()
    try:
        table = open_parquet(file)
    except errors as error:
        yield origin.damaged(0, 0, "damaged_parquet", first_line_of(error), raw_bytes).to_the_end()
        return
    with table:
        last_group = table.num_row_groups if end_group is None else end_group
        group_rows = [table.metadata.row_group(group).num_rows for group in range(first_group, last_group)]
        total = max(sum(group_rows), 1)
        row = unit.first_row
        for group, rows in zip(range(first_group, last_group), group_rows, strict=True):
            group_end = row + rows
            if group_end <= resume_row:
                row = group_end
                continue
            try:
                for batch in table.iter_batches(_batch_rows(table, group), row_groups=[group], use_threads=False):
                    skipped = min(max(resume_row - row, 0), batch.num_rows)
                    yield from _rows(batch, origin, limits, row, skipped)
                    row += batch.num_rows
                    progress.add(raw_bytes * batch.num_rows // total)
            except errors as error:
                lost = raw_bytes * (group_end - row) // total
                detail = f"rows {row + 1} to {group_end}: {first_line_of(error)}"
                yield origin.damaged(row, group_end, "damaged_parquet", detail, lost)
                row = group_end


def _batch_rows(table: Any, group: int) -> int:
    info = table.metadata.row_group(group)
    return max(1, min(BATCH_ROWS, BATCH_BYTES * info.num_rows // max(info.total_byte_size, 1)))


def _rows(batch: Any, origin: ItemOrigin, limits: ReaderLimits, before: int, skipped: int) -> Items:
    large = _large_rows(batch, limits.max_record_bytes)
    if not large:
        try:
            rows = batch.slice(skipped).to_pylist()
        except UnicodeDecodeError:  # find the rows to blame one by one, below
            pass
        else:
            for at, row in enumerate(rows, before + skipped):
                yield RawRow(row, origin, at, at + 1)
            return
    for index in range(skipped, batch.num_rows):
        at = before + index
        if index in large:
            detail = f"{large[index]:,} bytes; max_record_bytes is {limits.max_record_bytes:,}"
            yield origin.damaged(at, at + 1, "too_large", detail, large[index])
            continue
        try:
            yield RawRow(batch.slice(index, 1).to_pylist()[0], origin, at, at + 1)
        except UnicodeDecodeError as error:
            item = wrong_encoding(origin, at, at + 1, error.object, error)
            yield origin.damaged(at, at + 1, item.reason, item.detail, len(error.object), error.object)


def _large_rows(batch: Any, limit: int) -> dict[int, int]:
    """Rows above the limit and their sizes."""
    if batch.nbytes <= limit:
        return {}
    sizes = (batch.slice(index, 1).nbytes for index in range(batch.num_rows))
    return {index: size for index, size in enumerate(sizes) if size > limit}


def rows_in_groups(file: Path | BinaryIO) -> list[tuple[int, int]]:
    """(rows, bytes on disk) of each row group."""
    with open_parquet(file) as table:
        groups = []
        for group in range(table.num_row_groups):
            info = table.metadata.row_group(group)
            size = sum(info.column(column).total_compressed_size for column in range(info.num_columns))
            groups.append((info.num_rows, size))
        return groups
