"""Pieces into shards: which documents stand in which shard follows from their lengths alone.

A shard is closed after the document that takes it past `shard_tokens`. So the shards of a split are the same whatever
the pieces were and whoever made them, and each can be written by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from zero2all.common.engine import advance
from zero2all.common.files import PARTIAL_MARK, read_json, write_json
from zero2all.packed.layout import docs_name, gids_name, mask_name, tokens_name
from zero2all.packed.pieces import COUNTS, GIDS, LENGTHS, TOKENS

SHARD_TOKENS = 1 << 28
"""Tokens after which a shard is closed (512 MB as uint16)."""
COPY_TOKENS = 1 << 22
FACTS_FOLDER = "shards"


class Stretch(NamedTuple):
    """Some documents of one piece."""

    piece: int
    first_document: int
    end_document: int
    first_token: int
    end_token: int


def plan_shards(lengths_of_pieces: Iterable[np.ndarray], shard_tokens: int) -> list[list[Stretch]]:
    """The stretches of each shard; `lengths_of_pieces` are the lengths of each piece's documents."""
    shards: list[list[Stretch]] = []
    in_shard = shard_tokens  # so that the first document opens the first shard
    for piece, lengths in enumerate(lengths_of_pieces):
        ends = np.cumsum(lengths, dtype=np.int64)
        document = before = 0
        while document < len(ends):
            if in_shard >= shard_tokens:
                shards.append([])
                in_shard = 0
            closing = int(np.searchsorted(ends, before + shard_tokens - in_shard, side="left"))
            end = min(closing + 1, len(ends))
            shards[-1].append(Stretch(piece, document, end, before, int(ends[end - 1])))
            in_shard += int(ends[end - 1]) - before
            document, before = end, int(ends[end - 1])
    return shards


class Tokens(Protocol):
    """Documents to be written: those of a piece, or of somebody's file."""

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` to `end`, ids checked."""

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Lengths of documents `first` to `end`."""

    def gids(self, first: int, end: int) -> np.ndarray | None:
        """Gids of documents `first` to `end`."""

    def counts(self, start: int, end: int) -> np.ndarray:
        """1 for each token that counts in the loss."""


class PieceTokens:
    """The files of a piece."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)

    def read(self, start: int, end: int) -> np.ndarray:
        """See `Tokens`."""
        return self._array(TOKENS, self.dtype, start, end)

    def lengths(self, first: int, end: int) -> np.ndarray:
        """See `Tokens`."""
        return self._array(LENGTHS, np.dtype("<u4"), first, end).astype(np.int64)

    def gids(self, first: int, end: int) -> np.ndarray:
        """See `Tokens`."""
        return self._array(GIDS, np.dtype("<u8"), first, end)

    def counts(self, start: int, end: int) -> np.ndarray:
        """See `Tokens`."""
        if not (self.folder / COUNTS).is_file():
            return np.ones(end - start, np.uint8)
        return self._array(COUNTS, np.dtype("u1"), start, end)

    def _array(self, name: str, dtype: np.dtype, start: int, end: int) -> np.ndarray:
        return np.fromfile(self.folder / name, dtype, end - start, offset=start * dtype.itemsize)


@dataclass(frozen=True)
class ShardTask:
    """Everything a worker needs to write one shard of a split."""

    folder: Path
    """Where it is written; what was written is noted beside it, in FACTS_FOLDER."""
    number: int
    dtype: str
    pieces: tuple[Path, ...]
    """Folder of each piece that its stretches name, by `Stretch.piece` minus the first one's."""
    stretches: tuple[Stretch, ...]
    masked: bool


def write_shard_of_pieces(task: ShardTask) -> dict[str, dict[str, Any]]:
    """Write one shard, unless an earlier attempt did; returns size and crc32c of its files."""
    noted = task.folder.parent / FACTS_FOLDER / f"{task.number:05d}.json"
    facts: dict[str, dict[str, Any]]
    if noted.is_file():
        facts = read_json(noted)
    else:
        first = task.stretches[0].piece
        parts = [(PieceTokens(task.pieces[stretch.piece - first], task.dtype), stretch) for stretch in task.stretches]
        facts = write_shard(task.folder, task.number, task.dtype, parts, gids=True, masked=task.masked)
        write_json(noted, facts)
    advance(sum(stretch.end_token - stretch.first_token for stretch in task.stretches))
    return facts


def write_shard(
    folder: Path, number: int, dtype: str, parts: Sequence[tuple[Tokens, Stretch]], gids: bool, masked: bool
) -> dict[str, dict[str, Any]]:
    """Write the files of one shard; returns size and crc32c of each by name."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    with WrittenFile(folder / tokens_name(number), known) as file:
        for tokens, start, end in _copies(parts):
            file.write(tokens.read(start, end).astype(dtype, copy=False).tobytes())
    with WrittenFile(folder / docs_name(number), known) as file:
        before = 0
        for tokens, stretch in parts:
            lengths = tokens.lengths(stretch.first_document, stretch.end_document)
            starts = np.cumsum(lengths) - lengths + before
            before += int(lengths.sum())
            file.write(starts.astype("<u8").tobytes())
    if gids:
        with WrittenFile(folder / gids_name(number), known) as file:
            for tokens, stretch in parts:
                found = tokens.gids(stretch.first_document, stretch.end_document)
                assert found is not None, "a split has the gids of all its documents or of none"
                file.write(found.astype("<u8", copy=False).tobytes())
    if masked:
        with WrittenFile(folder / mask_name(number), known) as file:
            rest = np.empty(0, np.uint8)  # bits do not end where copies do
            for tokens, start, end in _copies(parts):
                bits = np.concatenate((rest, tokens.counts(start, end)))
                whole = len(bits) // 8 * 8
                file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
                rest = bits[whole:]
            file.write(np.packbits(rest, bitorder="little").tobytes())
    return known


def _copies(parts: Sequence[tuple[Tokens, Stretch]]) -> Iterator[tuple[Tokens, int, int]]:
    for tokens, stretch in parts:
        for start in range(stretch.first_token, stretch.end_token, COPY_TOKENS):
            yield tokens, start, min(start + COPY_TOKENS, stretch.end_token)


class WrittenFile:
    """A file that appears when it is whole, its size and crc32c noted in `known`."""

    def __init__(self, path: Path, known: dict[str, dict[str, Any]]) -> None:
        self._path, self._known = path, known
        self._partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
        self._file: BinaryIO | None = None
        self._crc = self._bytes = 0

    def __enter__(self) -> WrittenFile:
        self._file = open(self._partial, "wb")
        return self

    def write(self, data: bytes) -> None:
        """Append."""
        import google_crc32c

        assert self._file is not None, "used as a context manager"
        self._crc = google_crc32c.extend(self._crc, data)
        self._bytes += len(data)
        self._file.write(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None, "used as a context manager"
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self._path)
                self._known[self._path.name] = {"bytes": self._bytes, "crc32c": f"{self._crc:08x}"}
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)
