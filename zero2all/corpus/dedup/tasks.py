"""The tasks of a search for duplicates: each reads files, and writes files that depend on the task alone.

A task whose last file exists is done and does nothing. `cluster.py` says what the steps are for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common.files import read_json, write_json
from zero2all.corpus.dedup.config import VALUES, DedupConfig
from zero2all.corpus.dedup.index import (
    SIGNATURES_NAME,
    index_slice,
    lookup,
    npy_rows,
    read_slice,
    read_sorted_slice,
    sorted_unique,
    write_npy,
)

DIGEST_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u4")])
DIGEST_PARTS = 4096
BUCKET_MOST = 32
"""A bucket of at most this many documents is compared pair by pair."""
BUCKET_BEST = 8
BUCKET_NEXT = 8
COMPARED_PAIRS = 1 << 15
"""Pairs whose signatures are in memory at a time: at most 17 MB."""
LENGTHS_NAME = "lengths.npy"
LOST_NAME = "lost-{round_number:02d}.npy"
"""One byte a document: 0 when it still takes part in this round."""


class UnitRows(NamedTuple):
    """Consecutive rows of one unit."""

    folder: Path
    row: int
    records: int
    first_id: int


class Chunk(NamedTuple):
    """Consecutive documents."""

    number: int
    ranges: tuple[UnitRows, ...]
    steps: Path
    config: DedupConfig


class PartTask(NamedTuple):
    """Parts `first` to `end` of all files."""

    number: int
    first: int
    end: int
    files: tuple[Path, ...]
    steps: Path
    memory_bytes: int
    round_number: int = 0
    """Of pairs: from 1 on, only what is left of large buckets is looked at."""


class CompareTask(NamedTuple):
    """The pairs from `first` up to `end` of all files."""

    number: int
    round_number: int
    first: int
    end: int
    files: tuple[Path, ...]
    units: tuple[Path, ...]
    first_ids: tuple[int, ...]
    steps: Path
    needed: tuple[tuple[int, float], ...]
    """`DedupConfig.needed` of each unit; of two units, the larger."""


def split_digests(chunk: Chunk) -> None:
    """Digests of a chunk in the order of their parts."""
    target = chunk.steps / f"digests-{chunk.number:05d}.npy"
    if ends_of(target).exists():
        return
    entries = np.empty(sum(each.records for each in chunk.ranges), DIGEST_ENTRY)
    entries["document"] = np.arange(len(entries), dtype=np.uint32) + np.uint32(chunk.ranges[0].first_id)
    at = 0
    for each in chunk.ranges:
        digests = index_slice(each.folder, each.row, each.records)["digest"]
        entries["high"][at : at + each.records] = digests[:, 0]
        entries["low"][at : at + each.records] = digests[:, 1]
        at += each.records
    write_parts(target, entries)


def write_parts(target: Path, entries: np.ndarray) -> None:
    """Entries in the order of their parts, by the upper bits of `high`, and where each part ends."""
    parts = (entries["high"] >> np.uint64(52)).astype(np.uint16)
    order = np.argsort(parts, kind="stable")
    ends = np.searchsorted(parts[order], np.arange(DIGEST_PARTS + 1)).astype(np.int64)
    write_npy(target, entries[order])
    write_npy(ends_of(target), ends)


def read_parts(task: PartTask) -> np.ndarray:
    """The entries of the parts of a task, those of the first file first."""
    bounds = [np.load(ends_of(file))[[task.first, task.end]].tolist() for file in task.files]
    return np.concatenate([read_slice(file, *bound) for file, bound in zip(task.files, bounds, strict=True)])


def part_tasks(files: Sequence[Path], entry_bytes: int, steps: Path, memory_bytes: int) -> list[PartTask]:
    """Runs of consecutive parts that together fit into a task's memory, at least one part each."""
    sizes = np.zeros(0, np.int64)
    for file in files:
        found = np.diff(np.load(ends_of(file))) * entry_bytes
        sizes = sizes + found if len(sizes) else found
    tasks: list[PartTask] = []
    first, held = 0, 0
    for part in range(len(sizes) + 1):
        size = int(sizes[part]) if part < len(sizes) else 0
        if held and (part == len(sizes) or held + size > memory_bytes):
            tasks.append(PartTask(len(tasks), first, part, tuple(files), steps, memory_bytes))
            first, held = part, 0
        held += size
    return tasks


def group_digests(task: PartTask) -> Path:
    """(copy, best copy) of all documents of these parts that are not the best of their digest."""
    target = task.steps / f"copies-{task.number:05d}.npy"
    if target.exists():
        return target
    entries = _repeated(read_parts(task))  # a full sort of all entries would take five times as long
    lengths = lookup(task.steps / LENGTHS_NAME, entries["document"])
    order = np.lexsort((entries["document"], ~lengths, entries["low"], entries["high"]))
    entries = entries[order]
    starts = np.ones(len(entries), np.bool_)
    if len(entries):
        same = (entries["high"][1:] == entries["high"][:-1]) & (entries["low"][1:] == entries["low"][:-1])
        starts[1:] = ~same
    best = np.maximum.accumulate(np.where(starts, np.arange(len(entries)), 0))
    copies = np.stack([entries["document"][~starts], entries["document"][best[~starts]]], axis=1)
    write_npy(target, copies)
    return target


def _repeated(entries: np.ndarray) -> np.ndarray:
    """The entries whose upper digest half stands more than once."""
    high = entries["high"].copy()
    order = np.argsort(high)
    high = high[order]
    same = high[1:] == high[:-1]
    repeated = np.zeros(len(entries), np.bool_)
    repeated[1:] |= same
    repeated[:-1] |= same
    return entries[order[repeated]]


def split_bands(chunk: Chunk) -> None:
    """Band entries of a chunk, grouped by part."""
    from zero2all.corpus.dedup import graph_kernels as kernels

    target = chunk.steps / f"bands-{chunk.number:05d}.npy"
    if ends_of(target).exists():
        return
    first_id = chunk.ranges[0].first_id
    end_id = first_id + sum(each.records for each in chunk.ranges)
    lost = read_slice(chunk.steps / LOST_NAME.format(round_number=0), first_id, end_id)
    unit_ids = [each.first_id - each.row for each in chunk.ranges]
    rows = _signatures_of(np.arange(first_id, end_id), [each.folder for each in chunk.ranges], unit_ids)
    entries = np.empty(len(rows) * chunk.config.bands, np.uint64)
    ends = np.empty(kernels.PARTS + 1, np.int64)
    total = kernels.band_entries(rows, lost, first_id, chunk.config.bands, chunk.config.rows, entries, ends)
    write_npy(target, entries[:total])
    write_npy(ends_of(target), ends)


def pair_buckets(task: PartTask) -> dict[str, Any]:
    """Pairs of documents that share a bucket, in sorted files, and whether there are large buckets."""
    from zero2all.corpus.dedup import graph_kernels as kernels

    name = f"pairs-{task.round_number:02d}-{task.number:05d}"
    done = task.steps / f"{name}.json"
    if done.exists():
        return read_json(done)
    runs = _Runs(task.steps, name, task.memory_bytes // 4)
    pieces, ends = [], []
    for file in task.files:
        bounds = np.load(ends_of(file))[task.first : task.end + 1]
        pieces.append(read_slice(file, int(bounds[0]), int(bounds[-1])))
        ends.append(bounds - bounds[0])
    large: list[np.ndarray] = []
    for part in range(task.end - task.first):
        entries = np.concatenate([piece[end[part] : end[part + 1]] for piece, end in zip(pieces, ends, strict=True)])
        entries.sort()
        pairs, members = kernels.make_pairs(entries, BUCKET_MOST)
        if task.round_number == 0:
            runs.add(pairs)
        borders = np.flatnonzero(np.diff(members >> np.uint64(32))) + 1
        large += np.split(members.astype(np.uint32), borders) if len(members) else []
    del pieces, ends
    for documents in large:
        _pair_members(documents, task.steps, task.round_number, runs)
    result = {"runs": runs.finish(), "has_large_buckets": bool(large)}
    write_json(done, result)
    return result


def _pair_members(documents: np.ndarray, steps: Path, round_number: int, runs: _Runs) -> None:
    """Pair every document of a large bucket with the best ones and the next better ones."""
    documents = documents[lookup(steps / LOST_NAME.format(round_number=round_number), documents) == 0]
    lengths = lookup(steps / LENGTHS_NAME, documents)
    ranked = documents[np.lexsort((documents, ~lengths))].astype(np.uint64)
    for best in range(min(BUCKET_BEST, len(ranked))):
        runs.add(_packed(ranked[best], ranked[best + 1 :]))
    for back in range(1, BUCKET_NEXT + 1):
        runs.add(_packed(ranked[:-back], ranked[back:]))


def _packed(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Pairs as earlier << 32 | later."""
    return np.minimum(one, two) << np.uint64(32) | np.maximum(one, two)


def compare_pairs(task: CompareTask) -> str:
    """The pairs whose signatures agree, with the number of equal values; returns the name of their file."""
    from zero2all.corpus.dedup import graph_kernels as kernels

    name = f"edges-{task.round_number:02d}-{task.number:05d}.npy"
    if (task.steps / name).exists():
        return name
    pairs = sorted_unique(np.concatenate([read_sorted_slice(file, task.first, task.end) for file in task.files]))
    edges, edge_matches = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint8)]
    for start in range(0, len(pairs), COMPARED_PAIRS):
        some = pairs[start : start + COMPARED_PAIRS]
        one, two = (some >> np.uint64(32)).astype(np.uint32), some.astype(np.uint32)
        documents = sorted_unique(np.concatenate([one, two]))
        first, second = np.searchsorted(documents, one), np.searchsorted(documents, two)
        matches = np.empty(len(some), np.uint8)
        of_document = np.array(task.needed)[np.searchsorted(task.first_ids, documents, side="right") - 1]
        needed, part = np.maximum(of_document[first], of_document[second]).T
        lengths = lookup(task.steps / LENGTHS_NAME, documents)
        one, two = lengths[first], lengths[second]
        needed[np.minimum(one, two) < part * np.maximum(one, two)] = VALUES + 1
        signatures = _signatures_of(documents, task.units, task.first_ids)
        kernels.compare(signatures, first, second, matches, needed.astype(np.int64))
        edges.append(some[matches > 0])
        edge_matches.append(matches[matches > 0])
    write_npy(matches_of(task.steps / name), np.concatenate(edge_matches))
    write_npy(task.steps / name, np.concatenate(edges))
    return name


class _Runs:
    """Pairs collected in memory and written as sorted files without repeats whenever there are too many."""

    def __init__(self, steps: Path, name: str, most_bytes: int) -> None:
        self.steps, self.name, self.most = steps, name, max(1, most_bytes // 8)
        self.held: list[np.ndarray] = []
        self.count = 0
        self.names: list[str] = []

    def add(self, pairs: np.ndarray) -> None:
        if len(pairs):
            self.held.append(pairs)
            self.count += len(pairs)
        if self.count > self.most:
            merged = sorted_unique(np.concatenate(self.held))
            self.held, self.count = [merged], len(merged)
            if self.count > self.most // 2:
                self._spill()

    def finish(self) -> list[str]:
        if self.held:
            self.held = [sorted_unique(np.concatenate(self.held))]
            self._spill()
        return self.names

    def _spill(self) -> None:
        name = f"{self.name}-{len(self.names):03d}.npy"
        write_npy(self.steps / name, self.held[0])
        self.names.append(name)
        self.held, self.count = [], 0


def _signatures_of(documents: np.ndarray, units: Sequence[Path], first_ids: Sequence[int]) -> np.ndarray:
    """(n, 256) uint8 for increasing document numbers; runs of neighbours are read at once, and nothing is mapped."""
    rows = np.empty((len(documents), VALUES), np.uint8)
    owners = np.searchsorted(np.array(first_ids), documents, side="right") - 1
    breaks = np.flatnonzero((np.diff(documents) != 1) | (np.diff(owners) != 0)) + 1
    runs = pairwise([0, *breaks.tolist(), len(documents)])
    for owner, of_unit in groupby(runs, key=lambda run: int(owners[run[0]])):
        with open(units[owner] / SIGNATURES_NAME, "rb", buffering=0) as file:
            for start, end in of_unit:
                at = (int(documents[start]) - first_ids[owner]) * VALUES
                data = os.pread(file.fileno(), (end - start) * VALUES, at)
                rows[start:end] = np.frombuffer(data, np.uint8).reshape(-1, VALUES)
    return rows


def ends_of(path: Path) -> Path:
    """Where each part of a file of entries ends."""
    return path.with_suffix(".ends.npy")


def matches_of(path: Path) -> Path:
    """The equal values of each edge of a file."""
    return path.with_suffix(".matches.npy")


def edge_pieces(edges: list[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All edges and their equal values, a million at a time."""
    for file in edges:
        rows = npy_rows(file)
        for start in range(0, rows, 1 << 20):
            end = min(rows, start + (1 << 20))
            yield read_slice(file, start, end), read_slice(matches_of(file), start, end)
