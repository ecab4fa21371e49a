"""Which records are copies of which: over all units, on disk, in bounded memory.

    exact     (digest, document) of all records, split by digest; equal digests of a part are one group
    bands     (bucket, document) for each of the 16 bands of every remaining signature, split by bucket
    pairs     documents that share a bucket, split by the earlier document
    edges     pairs whose whole signatures agree
    choose    who stays

The best copy of a group is the longest text and, of equally long ones, the first. Groups are not closed under
"similar to similar": going through the documents from best to worst, one is dropped when it is similar to a document
that stays, and stays otherwise. So every dropped record has been compared with the one that is kept for it, and no
two kept records were found similar; a chain of small changes does not swallow its whole length. The order decides
the outcome, not the way of computing it: sweeps over the edge files settle documents whose better neighbours are all
settled, until none is left.

A bucket of more than 32 documents is not compared pair by pair: each document meets the 8 best and the 8 next better
ones, and what remains of such buckets after the choice is compared again until nothing is found.

The steps are tasks over files (`engine.run`), each writing its file whole or not at all; a killed run goes on at the
first missing file. What is found does not depend on the number of tasks, workers or parts. Memory of the calling
process: 12 bytes a document and 8 more for every dropped one; measured over all, 13 bytes a document from 0.6 to
2.4 million, 30 % of them dropped. A task takes about `memory_bytes`. Documents are numbered with 32 bits: at most
4.29e9 of them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import PARTIAL_MARK, fsync_folder, read_json, write_json
from zero2all.common.manifest import fingerprint
from zero2all.corpus.dedup.arrays import NpyFile, npy_rows, sample_borders, write_npy
from zero2all.corpus.dedup.config import VALUES, DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.index import index_pieces, read_index, read_signatures
from zero2all.corpus.dedup.tasks import (
    APART_NAME,
    DIGEST_ENTRY,
    DIGEST_PARTS,
    LENGTHS_NAME,
    LOST_NAME,
    Chunk,
    CompareTask,
    LargeTask,
    PartTask,
    Piece,
    compare_pairs,
    edge_pieces,
    ends_of,
    group_digests,
    pair_buckets,
    pair_large,
    split_bands,
    split_digests,
)

KEEP, EXACT_DUPLICATE, NEAR_DUPLICATE = range(3)
"""Values of the drop files."""

LAYOUT = 1
RESULT_NAME = "result.json"
CLUSTERS_NAME = "clusters.npy"
INPUTS_NAME = "inputs.json"
STEPS_NAME = "steps"
CLUSTER = np.dtype([("kept", "<u4"), ("member", "<u4"), ("reason", "u1"), ("matches", "u1")])
MAX_ROUNDS = 20
"""How often what remains of large buckets is compared again; two or three times have been enough so far."""
PIECE = 1 << 18
DEFAULT_MEMORY_BYTES = 128 << 20

HeldOut = Callable[[int, np.ndarray], np.ndarray]
"""(unit number, its index rows) -> bool per row: held out as valid."""


class Runner(Protocol):
    """What runs tasks; `zero2all.common.engine.Engine` is one."""

    def run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Results in any order, each with the position of its task."""


class Place(NamedTuple):
    """A kept record of a unit."""

    unit: int
    row: int


class Member(NamedTuple):
    """A record dropped as a copy."""

    place: Place
    reason: int
    """EXACT_DUPLICATE or NEAR_DUPLICATE."""
    similarity: float
    """Estimated Jaccard index with the kept record; for an exact copy of a near copy that of the near copy."""


class Cluster(NamedTuple):
    """The record that stays and the ones dropped for it."""

    kept: Place
    members: tuple[Member, ...]


@dataclass(frozen=True)
class DedupResult:
    """Where the outcome lies, and its counts."""

    work: Path
    documents: int
    exact: int
    """Records dropped as exact duplicates."""
    near: int
    """Records dropped as near duplicates."""
    clusters: int
    compared: int
    """Pairs of signatures compared."""
    similar: int
    """Pairs of them that agreed."""
    first_ids: tuple[int, ...]
    """The number of each unit's first document, and the number of documents."""
    seconds: dict[str, float]
    """Wall-clock time of each step; steps that an earlier run had finished are missing or short."""

    def drop_path(self, unit: int) -> Path:
        """The uint8 file of a unit: 0 keep, 1 exact duplicate, 2 near duplicate, for each of its kept records."""
        return self.work / f"drop-{unit:05d}.npy"

    def drops(self, unit: int) -> np.ndarray:
        """(records of the unit,) uint8."""
        return np.load(self.drop_path(unit))

    def iter_clusters(self) -> Iterator[Cluster]:
        """Every cluster, by the order of the records that stay; members in order."""
        rows = np.load(self.work / CLUSTERS_NAME, mmap_mode="r")
        held: list[np.ndarray] = []
        for start in range(0, len(rows), 1 << 16):
            piece = np.array(rows[start : start + (1 << 16)])
            borders = np.flatnonzero(np.diff(piece["kept"])) + 1
            for group in np.split(piece, borders):
                if held and held[0]["kept"][0] != group["kept"][0]:
                    yield self._cluster(np.concatenate(held))
                    held = []
                held.append(group)
        if held:
            yield self._cluster(np.concatenate(held))

    def _cluster(self, rows: np.ndarray) -> Cluster:
        members = tuple(
            Member(self.place(int(row["member"])), int(row["reason"]), _similarity(int(row["matches"]))) for row in rows
        )
        return Cluster(self.place(int(rows["kept"][0])), members)

    def place(self, document: int) -> Place:
        """Unit and row of a document number."""
        unit = int(np.searchsorted(self.first_ids, document, side="right")) - 1
        return Place(unit, document - self.first_ids[unit])


def _similarity(matches: int) -> float:
    return 1.0 if matches >= 255 else round(jaccard_estimate(matches), 3)


def find_duplicates(
    units: Sequence[Path],
    work: Path,
    config: DedupConfig | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    engine: Runner | None = None,
    held_out: HeldOut | None = None,
) -> DedupResult:
    """Find the duplicates of all records of the finished unit folders, given in final order.

    `held_out` says which records are held out; needed with `near="held_out"` only, where records similar to one of
    those, and not held out themselves, are dropped and nothing else is. Without `engine` the tasks run here.
    """
    config = config or DedupConfig()
    if problems := config.problems():
        raise UsageError("The dedup settings cannot be used: " + "; ".join(problems) + ".")
    if config.near == "held_out" and held_out is None:
        raise AssertionError("near='held_out' needs to know which records are held out")
    work.mkdir(parents=True, exist_ok=True)
    search = _Search(list(units), work, config, max(memory_bytes, 1 << 20), engine, held_out)
    return search.run()


class _Search:
    """One run of `find_duplicates`."""

    def __init__(
        self,
        units: list[Path],
        work: Path,
        config: DedupConfig,
        memory_bytes: int,
        engine: Runner | None,
        held_out: HeldOut | None,
    ) -> None:
        self.units, self.work, self.config = units, work, config
        self.memory_bytes, self.engine, self.held_out = memory_bytes, engine, held_out
        self.steps = work / STEPS_NAME
        self.seconds: dict[str, float] = {}
        self.compared = 0
        self.similar = 0

    def run(self) -> DedupResult:
        started = time.monotonic()
        inputs = self._read_indexes()
        done = self._finished(inputs)
        if done is not None:
            return done
        started = self._timed("read", started)
        self.drop = np.zeros(self.documents, np.uint8)
        self.parent = np.arange(self.documents, dtype=np.uint32)
        if self.config.exact:
            self._find_exact()
        started = self._timed("exact", started)
        self.parent_matches = np.zeros(self.documents, np.uint8)
        if self.config.near != "off":
            self._find_near()
        self._timed("near", started)
        return self._write_result(inputs)

    # ---- input

    def _read_indexes(self) -> str:
        """Lengths of all texts, first document numbers, and a fingerprint of everything the outcome depends on."""
        self.first_ids = [0]
        seen: list[Any] = [LAYOUT, asdict(self.config)]
        lengths: list[np.ndarray] = []
        for number, folder in enumerate(self.units):
            rows = read_index(folder)
            if self.config.near != "off" and len(read_signatures(folder)) != len(rows):
                raise BadInputError(f"{folder} has not as many signatures as records: delete it and run again.")
            hasher = xxhash.xxh3_64()
            for piece in index_pieces(folder):
                hasher.update(piece.data.cast("B"))
                if self.config.near == "held_out" and self.held_out is not None:
                    hasher.update(np.packbits(self.held_out(number, piece)).data)
                lengths.append(piece["text_bytes"].astype(np.uint32))
            self.first_ids.append(self.first_ids[-1] + len(rows))
            seen.append([len(rows), hasher.hexdigest()])
        self.documents = self.first_ids[-1]
        if self.documents >= 1 << 32:
            raise UsageError(f"{self.documents} records are more than the 4.29e9 that one corpus can deduplicate.")
        self.lengths = np.concatenate(lengths) if lengths else np.zeros(0, np.uint32)
        return fingerprint(seen)

    def _finished(self, inputs: str) -> DedupResult | None:
        """The result of an earlier run on the same input; steps of a run on other input are removed."""
        result, mark = self.work / RESULT_NAME, self.steps / INPUTS_NAME
        if result.exists():
            content = read_json(result)
            if content.pop("inputs") == inputs:
                shutil.rmtree(self.steps, ignore_errors=True)
                return DedupResult(work=self.work, **{**content, "first_ids": tuple(content["first_ids"])})
            result.unlink()
        cut = [inputs, self.memory_bytes]  # how the work was cut into files depends on the memory
        if not mark.exists() or read_json(mark) != cut:
            shutil.rmtree(self.steps, ignore_errors=True)
            self.steps.mkdir()
            write_json(mark, cut)
        else:
            for leftover in self.steps.glob(f"*{PARTIAL_MARK}*"):
                leftover.unlink()
        self._save(LENGTHS_NAME, self.lengths)
        return None

    def _chunks(self, bytes_per_document: int) -> list[Chunk]:
        """All documents in pieces of at most so many that their entries fill half a task's memory."""
        most = max(1, self.memory_bytes // 2 // bytes_per_document)
        chunks: list[Chunk] = []
        pieces: list[Piece] = []
        room = most
        for folder, first, end in zip(self.units, self.first_ids, self.first_ids[1:], strict=False):
            at = first
            while at < end:
                take = min(room, end - at)
                pieces.append(Piece(folder, at - first, take, at))
                at += take
                room -= take
                if room == 0:
                    chunks.append(Chunk(len(chunks), tuple(pieces), self.steps, self.config))
                    pieces, room = [], most
        if pieces:
            chunks.append(Chunk(len(chunks), tuple(pieces), self.steps, self.config))
        return chunks

    # ---- exact

    def _find_exact(self) -> None:
        chunks = self._chunks(100)
        self._run_tasks(split_digests, chunks)
        tasks = self._part_tasks("digests", len(chunks), DIGEST_PARTS, DIGEST_ENTRY.itemsize * 3)
        for found in self._run_tasks(group_digests, tasks):
            copies = np.load(found)
            self.drop[copies[:, 0]] = EXACT_DUPLICATE
            self.parent[copies[:, 0]] = copies[:, 1]

    def _part_tasks(self, name: str, chunks: int, parts: int, entry_bytes: int) -> list[PartTask]:
        """Runs of consecutive parts that together fit into a task's memory, at least one part each."""
        files = [self.steps / f"{name}-{chunk:05d}.npy" for chunk in range(chunks)]
        sizes = np.zeros(parts, np.int64)
        for file in files:
            sizes += np.diff(np.load(ends_of(file)))
        tasks: list[PartTask] = []
        first, held = 0, 0
        for part in range(parts + 1):
            size = int(sizes[part]) * entry_bytes if part < parts else 0
            if held and (part == parts or held + size > self.memory_bytes):
                tasks.append(PartTask(len(tasks), first, part, tuple(files), self.steps, self.memory_bytes))
                first, held = part, 0
            held += size
        return tasks

    # ---- near

    def _find_near(self) -> None:
        from zero2all.corpus.dedup.graph_kernels import PARTS

        self._save(LOST_NAME.format(round_number=0), self.drop)
        if self.config.near == "held_out":
            self._save(APART_NAME, self._apart())
        chunks = self._chunks(VALUES + 2 * 8 * self.config.bands)
        self._run_tasks(split_bands, chunks)
        found = self._run_tasks(pair_buckets, self._part_tasks("bands", len(chunks), PARTS, 8 * 3))
        edges = self._edges_of([run for result in found for run in result["runs"]], 0)
        self._choose(edges)
        large = [result["large"] for result in found if result["large_buckets"]]
        for round_number in range(1, MAX_ROUNDS):
            if not large or self.config.near == "held_out":
                break
            self._save(LOST_NAME.format(round_number=round_number), self.drop)
            tasks = [
                LargeTask(number, round_number, file, self.steps, self.memory_bytes)
                for number, file in enumerate(large)
            ]
            more = self._edges_of([run for runs in self._run_tasks(pair_large, tasks) for run in runs], round_number)
            if not any(npy_rows(file) for file in more):
                break
            edges += more
            self._choose(edges)

    def _apart(self) -> np.ndarray:
        """1 for every held-out document."""
        assert self.held_out is not None, "checked by find_duplicates"
        apart = np.zeros(self.documents, np.uint8)
        for number, folder in enumerate(self.units):
            first = self.first_ids[number]
            for piece in index_pieces(folder):
                apart[first : first + len(piece)] = self.held_out(number, piece)
                first += len(piece)
        return apart

    def _edges_of(self, runs: list[str], round_number: int) -> list[Path]:
        """Compare the signatures of all pairs of the sorted files; the files of the pairs that agree."""
        files = [self.steps / run for run in runs]
        borders = sample_borders(files, self.memory_bytes // 4)
        tasks = [
            CompareTask(
                number,
                round_number,
                first,
                end,
                tuple(files),
                tuple(self.units),
                tuple(self.first_ids),
                self.steps,
                self.config.needed_matches,
            )
            for number, (first, end) in enumerate(pairwise(borders))
        ]
        found = []
        for file, compared, similar in self._run_tasks(compare_pairs, tasks):
            self.compared += compared
            self.similar += similar
            found.append(self.steps / file)
        return found

    def _choose(self, edges: list[Path]) -> None:
        """Decide who stays, given all edges known so far, and whom every dropped document belongs to."""
        from zero2all.corpus.dedup import graph_kernels as kernels

        near = self.drop == NEAR_DUPLICATE
        self.drop[near] = KEEP
        numbers = np.flatnonzero(near).astype(np.uint32)
        self.parent[numbers] = numbers
        self.parent_matches[numbers] = 0
        del near, numbers
        state = np.where(self.drop == KEEP, np.uint8(kernels.UNDECIDED), np.uint8(kernels.DROPPED))
        waits = np.zeros(self.documents, np.uint8)
        if self.config.near == "held_out":
            apart = np.load(self.steps / APART_NAME, mmap_mode="r")
            state[(state == kernels.UNDECIDED) & (apart == 1)] = kernels.KEPT
            for pairs, _ in edge_pieces(edges):  # each has one held-out end
                for end in (pairs >> np.uint64(32), pairs & np.uint64(0xFFFFFFFF)):
                    others = end[apart[end] == 0]
                    state[others] = kernels.DROPPED
            kernels.settle(state, waits)
        else:
            waiting = 1
            while waiting:
                for pairs, _ in edge_pieces(edges):
                    kernels.spread(pairs, self.lengths, state, waits)
                waiting = kernels.settle(state, waits)
        for pairs, matches in edge_pieces(edges):
            kernels.attach(pairs, matches, self.lengths, state, self.parent, self.parent_matches)
        self.drop[(state == kernels.DROPPED) & (self.drop == KEEP)] = NEAR_DUPLICATE

    # ---- output

    def _write_result(self, inputs: str) -> DedupResult:
        started = time.monotonic()
        for leftover in self.work.glob(f"*{PARTIAL_MARK}*"):  # of searches that were killed here
            leftover.unlink()
        for number, (first, end) in enumerate(pairwise(self.first_ids)):
            write_npy(self.work / f"drop-{number:05d}.npy", self.drop[first:end])
        clusters = self._write_clusters()
        fsync_folder(self.work)
        self._timed("write", started)
        content: dict[str, Any] = {
            "documents": self.documents,
            "exact": int(np.count_nonzero(self.drop == EXACT_DUPLICATE)),
            "near": int(np.count_nonzero(self.drop == NEAR_DUPLICATE)),
            "clusters": clusters,
            "compared": self.compared,
            "similar": self.similar,
            "first_ids": self.first_ids,
            "seconds": self.seconds,
        }
        write_json(self.work / RESULT_NAME, {"inputs": inputs, **content})
        shutil.rmtree(self.steps, ignore_errors=True)
        return DedupResult(work=self.work, **{**content, "first_ids": tuple(self.first_ids)})

    def _write_clusters(self) -> int:
        """Sort (kept, member) of all dropped documents; returns the number of clusters."""
        count = int(np.count_nonzero(self.drop))
        packed = np.empty(count, np.uint64)
        at = 0
        for start in range(0, self.documents, PIECE):
            members = (np.flatnonzero(self.drop[start : start + PIECE]) + start).astype(np.uint32)
            kept = self.parent[members]
            moved = self.drop[kept] != KEEP  # the best exact copy is itself a near copy
            self.parent_matches[members[moved]] = self.parent_matches[kept[moved]]
            kept[moved] = self.parent[kept[moved]]
            exact = ~moved & (self.drop[members] == EXACT_DUPLICATE)
            self.parent_matches[members[exact]] = 255
            packed[at : at + len(members)] = kept.astype(np.uint64) << np.uint64(32) | members
            at += len(members)
        packed.sort()
        clusters = 0
        previous = -1
        with NpyFile(self.work / CLUSTERS_NAME, CLUSTER, count) as file:
            for start in range(0, count, PIECE):
                piece = packed[start : start + PIECE]
                rows = np.empty(len(piece), CLUSTER)
                rows["kept"] = piece >> np.uint64(32)
                rows["member"] = piece & np.uint64(0xFFFFFFFF)
                rows["reason"] = self.drop[rows["member"]]
                rows["matches"] = self.parent_matches[rows["member"]]
                clusters += int(np.count_nonzero(rows["kept"][1:] != rows["kept"][:-1]))
                clusters += int(rows["kept"][0]) != previous
                previous = int(rows["kept"][-1])
                file.write(rows)
        return clusters

    # ---- helpers

    def _run_tasks(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> list[Any]:
        results: list[Any] = [None] * len(tasks)
        if self.engine is None:
            return [function(task) for task in tasks]
        for position, result in self.engine.run(function, tasks):
            results[position] = result
        return results

    def _save(self, name: str, values: np.ndarray) -> None:
        write_npy(self.steps / name, values)

    def _timed(self, name: str, started: float) -> float:
        now = time.monotonic()
        self.seconds[name] = round(now - started, 3)
        return now
