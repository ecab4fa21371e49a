"""Pieces into shards: which documents stand in which shard follows from their lengths alone.

A shard is closed after the document that takes it past `shard_tokens`. So the shards of a split are the same whatever
the pieces were, and each can be written by itself.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common.engine import advance
from zero2all.common.files import PARTIAL_MARK, read_json, write_json
from zero2all.packed.pieces import COUNTS, GIDS, LENGTHS, TOKENS
from zero2all.packed.shard_format import docs_name, gids_name, mask_name, tokens_name

SHARD_TOKENS = 1 << 28
"""Tokens after which a shard is closed (512 MB as uint16)."""
COPY_TOKENS = 1 << 22
FACTS_FOLDER = "shards"


class DocumentRange(NamedTuple):
    """Some documents of one piece."""

    piece: int
    first_document: int
    end_document: int
    first_token: int
    end_token: int


def plan_shards(lengths_of_pieces: Iterable[np.ndarray], shard_tokens: int) -> list[list[DocumentRange]]:
    """The stretches of each shard; `lengths_of_pieces` are the lengths of each piece's documents."""
    shards: list[list[DocumentRange]] = []
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
            shards[-1].append(DocumentRange(piece, document, end, before, int(ends[end - 1])))
            in_shard += int(ends[end - 1]) - before
            document, before = end, int(ends[end - 1])
    return shards


class PieceTokens:
    """Documents to be written: those of a piece. `foreign.ForeignTokens` has the same methods."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)

    def read(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` to `end`."""
        return self._array(TOKENS, self.dtype, start, end)

    def lengths(self, first: int, end: int) -> np.ndarray:
        """Lengths of documents `first` to `end`."""
        return self._array(LENGTHS, np.dtype("<u4"), first, end).astype(np.int64)

    def gids(self, first: int, end: int) -> np.ndarray:
        """Gids of documents `first` to `end`."""
        return self._array(GIDS, np.dtype("<u8"), first, end)

    def counts(self, start: int, end: int) -> np.ndarray:
        """1 for each token that counts in the loss."""
        if not (self.folder / COUNTS).is_file():
            return np.ones(end - start, np.uint8)
        return self._array(COUNTS, np.dtype("u1"), start, end)

    def _array(self, name: str, dtype: np.dtype, start: int, end: int) -> np.ndarray:
        return np.fromfile(self.folder / name, dtype, end - start, offset=start * dtype.itemsize)


@dataclass(frozen=True)
class TokenShardTask:
    """Everything a worker needs to write one shard of a split."""

    folder: Path
    """Where it is written; what was written is noted beside it, in FACTS_FOLDER."""
    number: int
    dtype: str
    pieces: tuple[Path, ...]
    """Folder of each piece that its stretches name, by `DocumentRange.piece` minus the first one's."""
    stretches: tuple[DocumentRange, ...]
    masked: bool


def write_shard_of_pieces(task: TokenShardTask) -> dict[str, dict[str, Any]]:
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
    folder: Path, number: int, dtype: str, parts: Sequence[tuple[Any, DocumentRange]], gids: bool, masked: bool
) -> dict[str, dict[str, Any]]:
    """Write the files of one shard; returns size and crc32c of each by name."""
    folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    with written_file(folder / tokens_name(number), known) as write:
        for tokens, start, end in _copies(parts):
            write(tokens.read(start, end).astype(dtype, copy=False).tobytes())
    with written_file(folder / docs_name(number), known) as write:
        before = 0
        for tokens, stretch in parts:
            lengths = tokens.lengths(stretch.first_document, stretch.end_document)
            starts = np.cumsum(lengths) - lengths + before
            before += int(lengths.sum())
            write(starts.astype("<u8").tobytes())
    if gids:
        with written_file(folder / gids_name(number), known) as write:
            for tokens, stretch in parts:
                write(tokens.gids(stretch.first_document, stretch.end_document).astype("<u8", copy=False).tobytes())
    if masked:
        with written_file(folder / mask_name(number), known) as write:
            rest = np.empty(0, np.uint8)  # bits do not end where copies do
            for tokens, start, end in _copies(parts):
                bits = np.concatenate((rest, tokens.counts(start, end)))
                whole = len(bits) // 8 * 8
                write(np.packbits(bits[:whole], bitorder="little").tobytes())
                rest = bits[whole:]
            write(np.packbits(rest, bitorder="little").tobytes())
    return known


def _copies(parts: Sequence[tuple[Any, DocumentRange]]) -> Iterator[tuple[Any, int, int]]:
    for tokens, stretch in parts:
        for start in range(stretch.first_token, stretch.end_token, COPY_TOKENS):
            yield tokens, start, min(start + COPY_TOKENS, stretch.end_token)


@contextmanager
def written_file(path: Path, known: dict[str, dict[str, Any]]) -> Iterator[Callable[[bytes], None]]:
    """A function that appends to a file; the file appears when it is whole, its size and crc32c noted in `known`."""
    import google_crc32c

    partial = path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}")
    crc = size = 0
    try:
        with open(partial, "wb") as file:

            def write(data: bytes) -> None:
                nonlocal crc, size
                crc = google_crc32c.extend(crc, data)
                size += len(data)
                file.write(data)

            yield write
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        known[path.name] = {"bytes": size, "crc32c": f"{crc:08x}"}
    finally:
        partial.unlink(missing_ok=True)
