"""Which documents are duplicates of which: over all units, on disk, in bounded memory.

    exact     (digest, document) of all documents, split by digest; equal digests of a part are one group
    bands     (bucket, document) for each of the 16 bands of every remaining signature, split by bucket
    pairs     documents that share a bucket, split by the earlier document
    edges     pairs whose whole signatures agree
    choose    which of them stay

The best copy of a group is the longest text and, of equally long ones, the first. From the best document to the worst,
one is dropped when it is similar to a document that stays. So every dropped document was compared with the one kept for
it, no two kept documents were found similar, and a chain of small changes is not dropped as a whole. Sweeps over the
edge files decide documents whose better neighbours are all decided, until none is left.

A bucket of more than 32 documents is not compared pair by pair: each document is compared with the 8 best and the 8
next better ones, and what remains of such buckets after the choice is compared again until nothing is found.

The steps are tasks over files (`engine.run`), each writing its file whole or not at all; a killed run goes on at the
first missing file. The result does not depend on the number of tasks, workers or parts. Memory of the calling process:
12 bytes a document and 8 more for every dropped one; a task takes about `memory_bytes`. Document numbers have 32 bits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from zero2all.common.engine import TaskEngine
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import PARTIAL_MARK, fsync_folder, read_json, write_json
from zero2all.common.manifest import fingerprint
from zero2all.corpus.dedup.config import VALUES, DedupConfig
from zero2all.corpus.dedup.index import (
    index_pieces,
    npy_rows,
    partial_of,
    read_index,
    read_signatures,
    sample_borders,
    write_npy,
)
from zero2all.corpus.dedup.tasks import (
    DIGEST_ENTRY,
    LENGTHS_NAME,
    LOST_NAME,
    Chunk,
    CompareTask,
    PartTask,
    UnitRows,
    compare_pairs,
    edge_pieces,
    group_digests,
    pair_buckets,
    part_tasks,
    split_bands,
    split_digests,
)

KEEP, EXACT_DUPLICATE, NEAR_DUPLICATE = range(3)
"""Values of the drop files."""

LAYOUT = 2
RESULT_NAME = "result.json"
CLUSTERS_NAME = "clusters.npy"
INPUTS_NAME = "inputs.json"
STEPS_NAME = "steps"
CLUSTER = np.dtype([("kept", "<u4"), ("member", "<u4"), ("reason", "u1"), ("matches", "u1")])
MAX_ROUNDS = 20
"""How often what remains of large buckets is compared again; two or three times have been enough so far."""
ROWS_AT_ONCE = 1 << 18
DEFAULT_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class DedupResult:
    """Where the result of a search is."""

    work: Path
    first_ids: tuple[int, ...]
    """The number of each unit's first document, and the number of documents."""

    def drops(self, unit: int) -> np.ndarray:
        """(records of the unit,) uint8: 0 keep, 1 exact duplicate, 2 near duplicate."""
        return np.load(drop_path(self.work, unit))


def drop_path(work: Path, unit: int) -> Path:
    """The file of a unit with a byte for each of its kept records: 0 where it stays, else why it is dropped."""
    return work / f"drop-{unit:05d}.npy"


def find_duplicates(
    units: Sequence[Path],
    work: Path,
    config: DedupConfig | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    engine: TaskEngine | None = None,
    channels: Sequence[str] = (),
) -> DedupResult:
    """Find the duplicates of all records of the finished unit folders, given in final order, with the channel of each
    (none: en). Without `engine` the tasks run here."""
    config = config or DedupConfig()
    if problems := config.problems():
        raise UsageError("The dedup settings cannot be used: " + "; ".join(problems) + ".")
    work.mkdir(parents=True, exist_ok=True)
    return _DuplicateSearch(list(units), work, config, max(memory_bytes, 1 << 20), engine, list(channels)).run()


@dataclass
class _DuplicateSearch:
    """One run of `find_duplicates`."""

    units: list[Path]
    work: Path
    config: DedupConfig
    memory_bytes: int
    engine: TaskEngine | None
    channels: list[str]

    def run(self) -> DedupResult:
        self.steps = self.work / STEPS_NAME
        inputs = self._read_indexes()
        done = self._finished(inputs)
        if done is not None:
            return done
        self.drop = np.zeros(self.documents, np.uint8)
        self.parent = np.arange(self.documents, dtype=np.uint32)
        if self.config.exact:
            self._find_exact()
        self.parent_matches = np.zeros(self.documents, np.uint8)
        if self.config.signs:
            self._find_near()
        return self._write_result(inputs)

    def _read_indexes(self) -> str:
        """Lengths of all texts, first document numbers, and a fingerprint of everything the outcome depends on."""
        self.first_ids = [0]
        seen: list[Any] = [LAYOUT, asdict(self.config), self.channels]
        lengths: list[np.ndarray] = []
        for folder in self.units:
            rows = read_index(folder)
            if self.config.signs and len(read_signatures(folder)) != len(rows):
                raise BadInputError(f"{folder} does not have one signature per record. Delete it and run again.")
            hasher = xxhash.xxh3_64()
            for piece in index_pieces(folder):
                hasher.update(piece.data.cast("B"))
                lengths.append(piece["text_bytes"].astype(np.uint32))
            self.first_ids.append(self.first_ids[-1] + len(rows))
            seen.append([len(rows), hasher.hexdigest()])
        self.documents = self.first_ids[-1]
        if self.documents >= 1 << 32:
            raise UsageError(f"The corpus has {self.documents} records; one corpus can deduplicate 4.29e9.")
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.uint32)
        return fingerprint(seen)

    def _finished(self, inputs: str) -> DedupResult | None:
        """The result of an earlier run on the same input; steps of a run on other input are removed."""
        result, mark = self.work / RESULT_NAME, self.steps / INPUTS_NAME
        if result.exists():
            if read_json(result)["inputs"] == inputs:
                shutil.rmtree(self.steps, ignore_errors=True)
                return DedupResult(self.work, tuple(self.first_ids))
            result.unlink()
        cut = [inputs, self.memory_bytes]  # how the work was cut into files depends on the memory
        if not mark.exists() or read_json(mark) != cut:
            shutil.rmtree(self.steps, ignore_errors=True)
            self.steps.mkdir()
            write_json(mark, cut)
        else:
            for leftover in self.steps.glob(f"*{PARTIAL_MARK}*"):
                leftover.unlink()
        write_npy(self.steps / LENGTHS_NAME, self.lengths)
        return None

    def _chunks(self, bytes_per_document: int) -> list[Chunk]:
        """All documents in chunks whose entries fill half a task's memory."""
        most = max(1, self.memory_bytes // 2 // bytes_per_document)
        chunks: list[Chunk] = []
        ranges: list[UnitRows] = []
        room = most
        for folder, first, end in zip(self.units, self.first_ids, self.first_ids[1:], strict=False):
            at = first
            while at < end:
                take = min(room, end - at)
                ranges.append(UnitRows(folder, at - first, take, at))
                at += take
                room -= take
                if room == 0:
                    chunks.append(Chunk(len(chunks), tuple(ranges), self.steps, self.config))
                    ranges, room = [], most
        if ranges:
            chunks.append(Chunk(len(chunks), tuple(ranges), self.steps, self.config))
        return chunks

    def _find_exact(self) -> None:
        chunks = self._chunks(100)
        self._run_tasks(split_digests, chunks)
        tasks = self._part_tasks("digests", len(chunks), DIGEST_ENTRY.itemsize * 3)
        for found in self._run_tasks(group_digests, tasks):
            copies = np.load(found)
            self.drop[copies[:, 0]] = EXACT_DUPLICATE
            self.parent[copies[:, 0]] = copies[:, 1]

    def _part_tasks(self, name: str, chunks: int, entry_bytes: int) -> list[PartTask]:
        files = [self.steps / f"{name}-{chunk:05d}.npy" for chunk in range(chunks)]
        return part_tasks(files, entry_bytes, self.steps, self.memory_bytes)

    def _find_near(self) -> None:
        edges: list[Path] = []
        for round_number in range(MAX_ROUNDS):
            write_npy(self.steps / LOST_NAME.format(round_number=round_number), self.drop)
            if round_number == 0:
                chunks = self._chunks(VALUES + 2 * 8 * self.config.bands)
                self._run_tasks(split_bands, chunks)
                tasks = self._part_tasks("bands", len(chunks), 8 * 3)
            found = self._run_tasks(pair_buckets, [task._replace(round_number=round_number) for task in tasks])
            more = self._edges_of([run for result in found for run in result["runs"]], round_number)
            if round_number and not any(npy_rows(file) for file in more):
                break
            edges += more
            self._choose(edges)
            tasks = [task for task, result in zip(tasks, found, strict=True) if result["has_large_buckets"]]
            if not tasks:
                break

    def _edges_of(self, runs: list[str], round_number: int) -> list[Path]:
        """Compare the signatures of all pairs of the sorted files; the files of the pairs that agree."""
        files = [self.steps / run for run in runs]
        borders = sample_borders(files, self.memory_bytes // 4)
        needed = tuple(map(self.config.needed, self.channels or ["en"] * len(self.units)))
        shared = (tuple(files), tuple(self.units), tuple(self.first_ids), self.steps, needed)
        ranges = enumerate(pairwise(borders))
        tasks = [CompareTask(number, round_number, first, end, *shared) for number, (first, end) in ranges]
        return [self.steps / file for file in self._run_tasks(compare_pairs, tasks)]

    def _choose(self, edges: list[Path]) -> None:
        """Decide which documents stay, given all edges so far, and for which of them each other one is dropped."""
        from zero2all.corpus.dedup import graph_kernels as kernels

        near = self.drop == NEAR_DUPLICATE
        self.drop[near] = KEEP
        numbers = np.flatnonzero(near).astype(np.uint32)
        self.parent[numbers] = numbers
        self.parent_matches[numbers] = 0
        del near, numbers
        state = np.where(self.drop == KEEP, np.uint8(kernels.UNDECIDED), np.uint8(kernels.DROPPED))
        waits = np.zeros(self.documents, np.uint8)
        waiting = 1
        while waiting:
            for pairs, _ in edge_pieces(edges):
                kernels.spread(pairs, self.lengths, state, waits)
            waiting = kernels.settle(state, waits)
        for pairs, matches in edge_pieces(edges):
            kernels.attach(pairs, matches, self.lengths, state, self.parent, self.parent_matches)
        self.drop[(state == kernels.DROPPED) & (self.drop == KEEP)] = NEAR_DUPLICATE

    def _write_result(self, inputs: str) -> DedupResult:
        for leftover in self.work.glob(f"*{PARTIAL_MARK}*"):  # of searches that were killed here
            leftover.unlink()
        for number, (first, end) in enumerate(pairwise(self.first_ids)):
            write_npy(drop_path(self.work, number), self.drop[first:end])
        self._write_clusters()
        fsync_folder(self.work)
        write_json(self.work / RESULT_NAME, {"inputs": inputs})
        shutil.rmtree(self.steps, ignore_errors=True)
        return DedupResult(self.work, tuple(self.first_ids))

    def _write_clusters(self) -> None:
        """(kept, member) of all dropped documents, sorted, with the reason."""
        count = int(np.count_nonzero(self.drop))
        packed = np.empty(count, np.uint64)
        at = 0
        for start in range(0, self.documents, ROWS_AT_ONCE):
            members = (np.flatnonzero(self.drop[start : start + ROWS_AT_ONCE]) + start).astype(np.uint32)
            kept = self.parent[members]
            moved = self.drop[kept] != KEEP  # the best exact copy is itself a near copy
            self.parent_matches[members[moved]] = self.parent_matches[kept[moved]]
            kept[moved] = self.parent[kept[moved]]
            exact = ~moved & (self.drop[members] == EXACT_DUPLICATE)
            self.parent_matches[members[exact]] = 255
            packed[at : at + len(members)] = kept.astype(np.uint64) << np.uint64(32) | members
            at += len(members)
        packed.sort()
        partial = partial_of(self.work / CLUSTERS_NAME)
        out = np.lib.format.open_memmap(partial, mode="w+", dtype=CLUSTER, shape=(count,))
        for start in range(0, count, ROWS_AT_ONCE):
            piece = packed[start : start + ROWS_AT_ONCE]
            rows = out[start : start + ROWS_AT_ONCE]
            rows["kept"] = piece >> np.uint64(32)
            rows["member"] = piece & np.uint64(0xFFFFFFFF)
            rows["reason"] = self.drop[rows["member"]]
            rows["matches"] = self.parent_matches[rows["member"]]
        out.flush()
        partial.replace(self.work / CLUSTERS_NAME)

    def _run_tasks(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        if self.engine is None:
            return [function(task) for task in tasks]
        return [result for _, result in sorted(self.engine.run(function, tasks), key=lambda pair: pair[0])]
