"""Files to units: what a file holds, and where it can be split among workers without changing what is read.

Plain lines and texts are split at line ends, found by looking around each border only. JSON arrays and CSV files need a
pass over the file (about 1 GB/s), parquet its footer, zip its directory. Everything else is one
unit, and its note says what that means for an interrupted build.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import BinaryIO

from zero2all.corpus.listing import CODE_SUFFIXES, InputFile, open_input
from zero2all.corpus.readers.archives import INSTALL_LIBARCHIVE, ZipReader, has_libarchive
from zero2all.corpus.readers.encodings import is_wide
from zero2all.corpus.readers.items import NOT_READ, Format, ReaderLimits, TextBy, Unit, first_line_of, suffix_of
from zero2all.corpus.readers.sniff import (
    ARCHIVES,
    HEAD_BYTES,
    STREAMS,
    SniffedFormat,
    advice,
    container_of,
    inner_name,
    sniff,
)
from zero2all.corpus.readers.streams import FileSlice, Guard, Stream, StreamError, decompress

LOOK_BYTES = 1 << 16


def plan_units(file: InputFile, limits: ReaderLimits, first_number: int = 0) -> list[Unit]:
    """The units of a file, in order. Always at least one; its format says when there is nothing to read."""
    try:
        with closing(open_input(file)) as handle:
            units = _plan(file, handle, limits)
    except OSError as error:
        units = [Unit(file, 0, Format.UNREADABLE, raw_bytes=file.size_bytes, note=first_line_of(error))]
    return [replace(unit, number=number) for number, unit in enumerate(units, first_number)]


def _plan(file: InputFile, handle: BinaryIO, limits: ReaderLimits) -> list[Unit]:
    found, layers = _look_inside(file, handle, limits)
    unit = Unit(file, 0, compression=" ".join(layers), raw_bytes=file.size_bytes, **found._asdict())
    if layers and found.format not in (Format.EMPTY, Format.NEEDS_LIBARCHIVE):
        return _plan_compressed(unit, handle, limits, layers)
    if found.format is Format.PARQUET:
        return _plan_parquet(unit, handle, limits)
    if found.format is Format.NEEDS_LIBARCHIVE:
        return [replace(unit, note=INSTALL_LIBARCHIVE)]
    if found.format in NOT_READ:
        return [replace(unit, note=advice(found.format, file.name))]
    borders = _borders(unit, handle, limits)
    return _split(unit, borders, borders, file.size_bytes)


def _look_inside(file: InputFile, handle: BinaryIO, limits: ReaderLimits) -> tuple[SniffedFormat, list[str]]:
    """What is under all compression, and the names of the layers above it."""
    part = FileSlice(handle, 0, file.size_bytes)
    stream = Stream(part.read)
    name = file.name
    layers: list[str] = []
    while True:
        head = stream.peek(HEAD_BYTES)
        container = container_of(head, name)
        if container in ARCHIVES:
            missing = container in ("7z", "rar") and not has_libarchive()
            return SniffedFormat(Format.NEEDS_LIBARCHIVE if missing else Format.ARCHIVE), [*layers, container]
        if container not in STREAMS or len(layers) >= limits.max_nesting:
            break
        layers.append(container)
        stream = Stream(decompress(stream.read_or_raise, container, Guard(file.size_bytes, limits)))
        name = inner_name(name, container)
    if not head:
        return SniffedFormat(Format.TEXT if stream.broken is not None else Format.EMPTY), layers
    sample = _sample(handle, file.size_bytes) if not layers else b""
    return sniff(
        head, name, whole=len(head) < HEAD_BYTES and stream.broken is None, sample=sample, named=limits.encoding
    ), layers


def _sample(handle: BinaryIO, size: int) -> bytes:
    """Whole lines from the inside of a large file that may begin in ASCII and go on in something else."""
    lines = []
    for place in (size // 3, size * 2 // 3):
        if place > HEAD_BYTES:
            handle.seek(place)
            lines.append(b"\n".join(handle.read(LOOK_BYTES).split(b"\n")[1:-1]))
    return b"\n".join(lines)


def _split(unit: Unit, starts: list[int], ends_at: list[int], total: int) -> list[Unit]:
    """The unit cut where the next ones start; `ends_at` says how much of the file lies before each cut."""
    if not starts:
        return [unit]
    starts_all = [unit.start, *starts]
    ends: list[int | None] = [*starts, unit.end]
    shares = [0, *ends_at, total]
    return [
        replace(unit, start=start, end=end, raw_bytes=after - before)
        for start, end, before, after in zip(starts_all, ends, shares, shares[1:], strict=False)
    ]


def _borders(unit: Unit, handle: BinaryIO, limits: ReaderLimits) -> list[int]:
    """Bytes where units after the first begin."""
    size = unit.file.size_bytes
    unit_bytes = limits.unit_bytes
    if size < unit_bytes * 3 // 2 or is_wide(unit.encoding):
        return []
    stream = Stream(FileSlice(handle, unit.bom_bytes, size - unit.bom_bytes).read)
    if unit.format is Format.JSON_LINES:
        return _line_borders(handle, size, unit_bytes, 1)
    if unit.format is Format.JSON_ARRAY and unit.encoding == "utf-8":
        from zero2all.corpus.readers.arrays import array_borders

        return array_borders(stream, limits, unit.bom_bytes, unit.first_key, unit_bytes)
    if unit.format is Format.CSV and unit.encoding == "utf-8":
        from zero2all.corpus.readers.tables import csv_borders

        return csv_borders(stream, limits, unit.bom_bytes, unit.delimiter, unit_bytes)
    if unit.format is not Format.TEXT or suffix_of(unit.file.name) in CODE_SUFFIXES:
        return []
    if limits.text_by is TextBy.LINE:
        return _line_borders(handle, size, unit_bytes, 1)
    if limits.text_by is TextBy.AUTO and unit.encoding == "utf-8" and size > limits.split_text_above_bytes:
        return _line_borders(handle, size, unit_bytes, limits.text_block_bytes)
    return []


def _line_borders(handle: BinaryIO, size: int, unit_bytes: int, step: int) -> list[int]:
    """The first line start at or behind every `unit_bytes` or so, a multiple of `step`."""
    borders: list[int] = []
    target = unit_bytes
    while True:
        target = -(-target // step) * step
        if target + unit_bytes // 2 >= size:
            return borders
        border = _behind_line(handle, target)
        if border is None or border >= size:
            return borders
        borders.append(border)
        target = border + unit_bytes


def _behind_line(handle: BinaryIO, at: int) -> int | None:
    """The first line start at or behind `at`, which is not the beginning of the file."""
    position = at - 1
    handle.seek(position)
    while data := handle.read(LOOK_BYTES):
        if (found := data.find(b"\n")) >= 0:
            return position + found + 1
        position += len(data)
    return None


def _plan_parquet(unit: Unit, handle: BinaryIO, limits: ReaderLimits) -> list[Unit]:
    from zero2all.corpus.readers.tables import parquet_errors, rows_in_groups

    file = unit.file
    try:
        groups = rows_in_groups(file.path if file.url is None else handle)
    except parquet_errors():
        return [unit]  # reading it says what is wrong
    starts, shares = _gathered((size for _, size in groups), limits.unit_bytes)
    units = _split(unit, starts, shares, file.size_bytes)
    rows_before = [0, *accumulate(rows for rows, _ in groups)]
    note = "" if len(groups) != 1 or file.size_bytes < limits.unit_bytes * 2 else "one row group: cannot be split"
    return [replace(one, first_row=rows_before[one.start], note=note) for one in units]


def _gathered(sizes: Iterable[int], unit_bytes: int) -> tuple[list[int], list[int]]:
    """Which parts of a file, given by their sizes, begin a unit after the first, and how much lies before each."""
    starts, shares = [], []
    size = before = 0
    for number, part_bytes in enumerate(sizes):
        if size and size + part_bytes // 2 > unit_bytes:
            starts.append(number)
            shares.append(before)
            size = 0
        size += part_bytes
        before += part_bytes
    return starts, shares


def _plan_compressed(unit: Unit, handle: BinaryIO, limits: ReaderLimits, layers: list[str]) -> list[Unit]:
    if layers == ["zip"]:
        return _plan_zip(unit, handle, limits)
    if layers == ["tar"]:
        return [replace(unit, note="a tar is read by one worker; resuming skips what was read")]
    stream = " in ".join(reversed(layers))
    return [replace(unit, note=f"{stream} cannot be split: one worker reads it, and resuming unpacks it again")]


def _plan_zip(unit: Unit, handle: BinaryIO, limits: ReaderLimits) -> list[Unit]:
    size = handle.seek(0, os.SEEK_END)
    try:
        reader = ZipReader(handle, Guard(size, limits))
        starts, shares = _gathered((info.compress_size for info in reader.directory()), limits.unit_bytes)
    except StreamError as error:
        return [replace(unit, note=error.detail)]
    return _split(unit, starts, [min(share, size) for share in shares], size)
