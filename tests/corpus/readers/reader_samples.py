"""Small inputs of every format in every wrapping, and how to read them. RAR archives are written by hand here, since
nothing free writes them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import libarchive
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from zero2all.corpus.listing import list_files
from zero2all.corpus.readers import Damaged, RawRow, ReaderLimits, Unit, plan_units, read_unit

TEXTS = [f'Document number {n}, 第{n}篇。\nSecond line, with "quotes" and a comma.' for n in range(40)]
ROWS: list[dict[str, Any]] = [{"id": str(n), "title": f"t{n}", "text": text} for n, text in enumerate(TEXTS)]


def json_lines(rows: Sequence[Any] = ROWS) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def json_array(rows: Sequence[Any] = ROWS, indent: int | None = None) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=indent).encode()


def parquet(rows: Sequence[dict[str, Any]] = ROWS, group: int = 16) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), out, row_group_size=group)
    return out.getvalue()


def csv_table(rows: Sequence[dict[str, Any]] = ROWS, delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def plain_lines() -> bytes:
    return "".join(text.replace("\n", " ") + "\n" for text in TEXTS).encode()


FORMATS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "json lines": ("a.jsonl", json_lines),
    "json lines named json": ("a.json", json_lines),
    "json array": ("a.json", json_array),
    "json array, indented": ("a.json", lambda: json_array(indent=2)),
    "parquet": ("a.parquet", parquet),
    "csv": ("a.csv", csv_table),
    "tsv": ("a.tsv", lambda: csv_table(delimiter="\t")),
    "text": ("a.txt", plain_lines),
}


def tar_of(members: dict[str, bytes], **more: Any) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **more) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def zip_of(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def seven_zip_of(members: dict[str, bytes]) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".7z") as file:
        with libarchive.file_writer(file.name, "7zip") as archive:
            for name, data in members.items():
                archive.add_file_from_memory(name, len(data), data)
        return Path(file.name).read_bytes()


def zstd_of(data: bytes, frame_bytes: int | None = None) -> bytes:
    compressor = zstandard.ZstdCompressor()
    step = frame_bytes or len(data) or 1
    return b"".join(compressor.compress(data[at : at + step]) for at in range(0, len(data) or 1, step))


def _number(value: int) -> bytes:
    """A RAR 5 number: 7 bits a byte, lowest first."""
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _rar5_block(body: bytes, data: bytes = b"") -> bytes:
    sized = _number(len(body)) + body
    return struct.pack("<I", zlib.crc32(sized)) + sized + data


def rar5_of(members: dict[str, bytes]) -> bytes:
    """A RAR 5 archive of stored entries (technical note of RARLAB, section "Archive structure")."""
    out = b"Rar!\x1a\x07\x01\x00" + _rar5_block(_number(1) + _number(0) + _number(0))
    for name, data in members.items():
        raw_name = name.encode()
        body = _number(2) + _number(2) + _number(len(data))  # a file, data follows, how much
        body += _number(4) + _number(len(data)) + _number(0o100644)  # check sum given, plain size, mode
        body += struct.pack("<I", zlib.crc32(data)) + _number(0) + _number(1)  # check sum, stored, Unix
        out += _rar5_block(body + _number(len(raw_name)) + raw_name, data)
    return out + _rar5_block(_number(5) + _number(0) + _number(0))


STREAMS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd_of}
STREAMS[".frames.zst"] = partial(zstd_of, frame_bytes=700)

ZIPS = {".stored.zip": zipfile.ZIP_STORED, ".bzip2.zip": zipfile.ZIP_BZIP2, ".lzma.zip": zipfile.ZIP_LZMA}
TARS = {".tar.gz": ".gz", ".tgz": ".gz", ".tar.bz2": ".bz2", ".tar.xz": ".xz", ".tar.zst": ".zst"}
PACKS: dict[str, Callable[[dict[str, bytes]], bytes]]
PACKS = {".zip": zip_of, ".tar": tar_of, ".7z": seven_zip_of, ".rar": rar5_of}
PACKS |= {name: partial(zip_of, compression=kind) for name, kind in ZIPS.items()}
PACKS |= {name: lambda members, end=end: STREAMS[end](tar_of(members)) for name, end in TARS.items()}
"""Archives of several members."""


def wrapped(wrapping: str, name: str, data: bytes) -> bytes:
    return PACKS[wrapping]({name: data}) if wrapping in PACKS else STREAMS[wrapping](data)


Item = RawRow | Damaged


def units_of(path: Path, limits: ReaderLimits | None = None) -> list[Unit]:
    [file] = list_files(path).files
    return plan_units(file, limits or ReaderLimits())


def read_all(path: Path, limits: ReaderLimits | None = None, skipped: list[Any] | None = None) -> list[Item]:
    """All items of one file; checks that exactly its bytes are reported as consumed."""
    told: list[int] = []
    items: list[Item] = []
    for unit in units_of(path, limits):
        note = None if skipped is None else (lambda reason, name: skipped.append((reason, name)))
        items += read_unit(unit, limits or ReaderLimits(), told.append, None, note)
    assert sum(told) == path.stat().st_size
    return items


def rows_of(items: list[Item]) -> list[dict[str, Any]]:
    return [item.fields for item in items if isinstance(item, RawRow)]


def damaged_of(items: list[Item]) -> list[Damaged]:
    return [item for item in items if isinstance(item, Damaged)]


def essence(item: Item) -> tuple[Any, ...]:
    """What must be the same however a file is split or resumed."""
    if isinstance(item, RawRow):
        return (item.fields, item.place, item.is_document, item.origin.name, item.origin.encoding)
    return (item.place, item.reason, item.detail, item.raw_bytes, item.excerpt, item.ends_file)
