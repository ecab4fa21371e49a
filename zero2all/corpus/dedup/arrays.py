"""One-dimensional .npy files for work that must not grow in memory: read by slice, written whole or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from zero2all.common.files import PARTIAL_MARK


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


def pread_into(rows: np.ndarray, handle: int, at: int, path: Path) -> None:
    """Fill `rows` from byte `at` of an open file."""
    view = rows.reshape(-1).data
    while len(view):
        count = os.preadv(handle, [view], at)
        if count == 0:
            raise AssertionError(f"the signatures of {path} end early")
        view = view[count:]
        at += count


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
