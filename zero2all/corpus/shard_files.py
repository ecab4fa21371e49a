"""Shards: `part-00000.jsonl`, `part-00001.jsonl`, … of about `shard_bytes` each, as lines of JSON in any format.

jsonl       one record a line
jsonl.zst   the same, compressed in frames of about 4 MB that can be read apart
parquet     a column for each field of the record, `others` as JSON text; zstd, row groups of about 16 MB
txt         the text a model sees (title, then content), each document followed by a line with a form feed;
            no numbers and no other fields
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from zero2all.common import jsonio
from zero2all.common.files import atomic_file
from zero2all.common.records import TEXT_END, TITLE_AND_TEXT, training_text

ShardFormat = Literal["jsonl", "jsonl.zst", "parquet", "txt"]
SHARD_FORMATS: tuple[str, ...] = get_args(ShardFormat)

FRAME_BYTES = 4_000_000
ROW_GROUP_BYTES = 16_000_000
ZSTD_LEVEL = 3


def shard_name(number: int, shard_format: str) -> str:
    """`part-00000.jsonl`."""
    return f"part-{number:05d}.{shard_format}"


def write_shard(path: Path, shard_format: str, batches: Iterator[list[bytes]], template: str = TITLE_AND_TEXT) -> int:
    """Write one shard from lines of JSON, which appears when it is whole; returns how many records it has."""
    writers: dict[str, Callable[[BinaryIO, Iterator[list[bytes]]], None]] = {
        "jsonl": _write_jsonl,
        "jsonl.zst": _write_zst,
        "parquet": _write_parquet,
        "txt": partial(_write_txt, template=template),
    }
    records = 0

    def counted() -> Iterator[list[bytes]]:
        nonlocal records
        for batch in batches:
            records += len(batch)
            yield batch

    with atomic_file(path) as file:
        writers[shard_format](file, counted())
    return records


def _write_jsonl(file: BinaryIO, batches: Iterator[list[bytes]]) -> None:
    for batch in batches:
        file.writelines(batch)


def _write_zst(file: BinaryIO, batches: Iterator[list[bytes]]) -> None:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
    for batch in _regrouped(batches, FRAME_BYTES):
        file.write(compressor.compress(b"".join(batch)))


def _write_parquet(file: BinaryIO, batches: Iterator[list[bytes]]) -> None:
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    names = ("data_src", "category", "title", "content", "desc", "others")
    schema = pyarrow.schema([("gid", pyarrow.int64()), ("id", pyarrow.int64()), *((name, text) for name in names)])
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd", compression_level=ZSTD_LEVEL) as writer:
        for batch in _regrouped(batches, ROW_GROUP_BYTES):
            rows: list[dict[str, Any]] = [jsonio.loads(line) for line in batch]
            for row in rows:
                row["others"] = jsonio.dumps_line(row["others"]).decode().rstrip("\n")
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _write_txt(file: BinaryIO, batches: Iterator[list[bytes]], template: str) -> None:
    for batch in batches:
        for line in batch:
            text = training_text(jsonio.loads(line), template)
            file.write(text.replace("\f", "").encode() + TEXT_END)


def _regrouped(batches: Iterator[list[bytes]], group_bytes: int) -> Iterator[list[bytes]]:
    """The same lines in groups that depend on nothing but their sizes."""
    group: list[bytes] = []
    size = 0
    for batch in batches:
        for line in batch:
            group.append(line)
            size += len(line)
            if size >= group_bytes:
                yield group
                group, size = [], 0
    if group:
        yield group
