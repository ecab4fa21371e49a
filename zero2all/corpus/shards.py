"""Shards: `part-00000.jsonl`, `part-00001.jsonl`, … of about `shard_bytes` each, one record a line."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

WRITE_BUFFER_BYTES = 1 << 20


class LineAt(NamedTuple):
    """Where a line stands."""

    path: Path
    offset: int
    length: int


class ShardWriter:
    """Appends lines, starting a new part when the current one would grow past `shard_bytes`."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.shard_bytes = folder, shard_bytes
        self.records = 0
        self._parts = 0
        self._file: BinaryIO | None = None
        self._path = folder
        self._size = 0

    def write(self, line: bytes) -> LineAt:
        """Append one record, already encoded and ending in a newline."""
        if self._file is None or (self._size and self._size + len(line) > self.shard_bytes):
            self.close()
            self._path = self.folder / f"part-{self._parts:05d}.jsonl"
            self._file = open(self._path, "wb", buffering=WRITE_BUFFER_BYTES)  # noqa: SIM115 - closed in close()
            self._parts += 1
            self._size = 0
        self._file.write(line)
        place = LineAt(self._path, self._size, len(line))
        self._size += len(line)
        self.records += 1
        return place

    def close(self) -> None:
        """Finish the current part."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def cut_line(place: LineAt) -> bytes:
    """Take one line out of a closed shard and return it."""
    rest = place.path.with_suffix(".rest")
    with open(place.path, "rb") as file, open(rest, "wb") as out:
        file.seek(place.offset)
        line = file.read(place.length)
        shutil.copyfileobj(file, out, WRITE_BUFFER_BYTES)
    with open(place.path, "r+b") as file, open(rest, "rb") as tail:
        file.seek(place.offset)
        shutil.copyfileobj(tail, file, WRITE_BUFFER_BYTES)
        file.truncate()
    rest.unlink()
    return line
