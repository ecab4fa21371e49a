"""What a unit folder holds for dedup, a row for every kept record, in order.

    index.bin        digest (16 bytes as two big-endian uint64), key (what decides the split), ordinal (place of the
                     record among all items of the unit, kept or not), text_bytes, anchors: 40 bytes a record
    signatures.bin   (n, 256) uint8; absent when near duplicates stay
    anchors.bin      uint32: the anchors of all records, one after the other

They are rows and nothing else, as `np.fromfile` reads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import PARTIAL_MARK
from zero2all.corpus.dedup.config import VALUES
from zero2all.corpus.dedup.signatures import Described

INDEX_NAME = "index.bin"
SIGNATURES_NAME = "signatures.bin"
ANCHORS_NAME = "anchors.bin"
INDEX = np.dtype([("digest", ">u8", 2), ("key", "<u8"), ("ordinal", "<u8"), ("text_bytes", "<u4"), ("anchors", "<u4")])
SIGNATURE = np.dtype((np.uint8, VALUES))


class IndexWriter:
    """Appends records to the files of a unit folder."""

    def __init__(self, folder: Path, near: bool) -> None:
        names = (INDEX_NAME, ANCHORS_NAME, *([SIGNATURES_NAME] if near else []))
        self._files = [open(folder / name, "wb") for name in names]  # noqa: SIM115, closed at the end of the context

    def add(self, described: Described, ordinals: np.ndarray) -> None:
        """Append a batch; `ordinals` are the places of its records among all items of the unit."""
        rows = np.empty(len(described.digests), INDEX)
        rows["digest"] = np.ascontiguousarray(described.digests).view(">u8")
        rows["key"] = described.keys
        rows["ordinal"] = ordinals
        rows["text_bytes"] = described.text_bytes
        rows["anchors"] = described.anchor_counts
        for file, values in zip(self._files, (rows, described.anchors, described.signatures), strict=False):
            assert values is not None, "near dedup is on, but the batch was described without signatures"
            file.write(values.tobytes())

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def read_index(folder: Path) -> np.ndarray:
    """The index of a finished unit: a structured array, mapped from disk."""
    return _map(folder / INDEX_NAME, INDEX)


def index_pieces(folder: Path, records: int = 1 << 18) -> Iterator[np.ndarray]:
    """The same rows in batches, read rather than mapped: memory stays bounded for any unit."""
    for start in range(0, len(read_index(folder)), records):
        yield index_slice(folder, start, records)


def index_slice(folder: Path, start: int, records: int) -> np.ndarray:
    """Rows of the index from `start` on, read rather than mapped."""
    return np.fromfile(folder / INDEX_NAME, INDEX, records, offset=start * INDEX.itemsize)


def read_signatures(folder: Path) -> np.ndarray:
    """(n, 256) uint8, mapped from disk."""
    return _map(folder / SIGNATURES_NAME, SIGNATURE)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        return np.memmap(path, dtype, mode="r", shape=(path.stat().st_size // dtype.itemsize,))
    except FileNotFoundError:
        raise BadInputError(
            f"{path} is missing: the unit was read with other dedup settings. Delete {path.parent} and run again."
        ) from None
    except ValueError:  # an empty file cannot be mapped
        return np.empty(0, dtype)


# One-dimensional .npy files for work that must not grow in memory: read by slice, written whole or not at all.


def partial_of(path: Path) -> Path:
    """A unique name: a task may run twice at the same time, on two machines."""
    return path.with_name(f"{path.name}{PARTIAL_MARK}{os.getpid()}-{time.time_ns()}")


def write_npy(path: Path, values: np.ndarray) -> None:
    """Write an array so that it is there whole or not at all."""
    partial = partial_of(path)
    with open(partial, "wb") as file:
        np.save(file, values)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def npy_rows(path: Path) -> int:
    """How many rows a .npy file has."""
    return int(np.load(path, mmap_mode="r").shape[0])


def read_slice(path: Path, start: int, end: int) -> np.ndarray:
    """Rows `start` to `end` of a one-dimensional .npy file, read rather than mapped."""
    mapped = np.load(path, mmap_mode="r")
    return np.fromfile(path, mapped.dtype, end - start, offset=mapped.offset + start * mapped.dtype.itemsize)


def read_sorted_slice(path: Path, first: int, end: int) -> np.ndarray:
    """The values of a sorted uint64 file from `first` up to `end`."""
    values = np.load(path, mmap_mode="r")
    start = int(np.searchsorted(values, np.uint64(first)))
    stop = len(values) if end >= 1 << 64 else int(np.searchsorted(values, np.uint64(end)))
    return read_slice(path, start, stop)


def sorted_unique(values: np.ndarray) -> np.ndarray:
    """The distinct values, sorted; sorts `values` in place. `np.unique` hashes, which took five times as long."""
    values.sort()
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values


def lookup(path: Path, documents: np.ndarray) -> np.ndarray:
    """Values of a file with one value a document, for some documents."""
    return np.load(path, mmap_mode="r")[documents]


def sample_borders(files: list[Path], most_bytes: int) -> list[int]:
    """Values that cut all pairs of the sorted files into runs of about `most_bytes`, by a sample of them."""
    total = sum(npy_rows(file) for file in files)
    if total == 0:
        return [0]
    pieces = -(-total * 8 // most_bytes)
    step = max(1, total // (64 * pieces))
    sample = np.sort(np.concatenate([np.array(np.load(file, mmap_mode="r")[::step]) for file in files]))
    inner = np.unique(sample[np.linspace(0, len(sample), pieces, endpoint=False).astype(np.int64)[1:]])
    return [0, *(int(value) for value in inner if value), 1 << 64]
