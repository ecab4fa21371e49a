"""The dedup step of a build: the search over all sources, and its outcome in terms of gids.

.build/<inputs>/drop-00000.npy   which records of a segment are duplicates            (written by dedup/)
                verdict-00000.npy  what becomes of each record of a segment: DROP_REASONS, those of
                                   dedup/split.py, else 0
                clusters.npy     (kept, dropped) pairs by document number             (written by dedup/)
                gids.npy         document number -> gid
                cut-00000/       a segment without repeated passages, where they are looked for (written by dedup/)
                benchmarks.json  for which items records are dropped, with `--against`
                clusters.jsonl   which record was kept for which; also `corpus/clusters.jsonl` at the end
                found.json       last: the step is done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import TaskEngine
from zero2all.common.files import atomic_file, read_json, write_json
from zero2all.common.records import TITLE_AND_TEXT
from zero2all.corpus.dedup.cluster import CLUSTERS_NAME as PAIRS_NAME
from zero2all.corpus.dedup.cluster import NEAR_DUPLICATE, find_duplicates
from zero2all.corpus.dedup.config import DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.index import read_index, write_npy
from zero2all.corpus.dedup.passages import cut_folder, cut_passages
from zero2all.corpus.dedup.split import split_records
from zero2all.corpus.record import ORDINAL_BITS
from zero2all.corpus.segments import RECORDS_NAME, Segment, first_ordinals

CLUSTERS_NAME = "clusters.jsonl"
GIDS_NAME = "gids.npy"
FOUND_NAME = "found.json"
VERDICT_NAME = "verdict-{segment:05d}.npy"
DROP_REASONS = {1: "duplicate", 2: "near_duplicate", 4: "benchmark", 5: "repeated_passages"}
"""Why a record is dropped, by the number in its list."""
BENCHMARK, REPEATED = 4, 5
BENCHMARKS_NAME = "benchmarks.json"
"""For which items of a benchmark records were dropped; also `corpus/benchmarks.json` at the end."""
ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class SourceSegments:
    """The segments of one source and the number that makes its gids."""

    name: str
    number: int
    segments: Sequence[Segment]
    channel: str = "en"
    template: str = TITLE_AND_TEXT
    """How its records become training text."""


Find = Callable[
    [Sequence[tuple[Path, str, str, int]], np.ndarray, np.ndarray, Path, TaskEngine], tuple[np.ndarray, Any]
]
Against = tuple[str, Find]
"""Benchmarks that the corpus must not contain (`evals/contamination.py`): a name for the items and the rule; and from
files of records with source, template and number of the first document, which documents stay, gids, and a folder to
work in: the documents that contain an item, and for which."""


@dataclass(frozen=True)
class Duplicates:
    """The outcome of a finished search."""

    folder: Path
    first_segment: Mapping[str, int]
    """Name of a source -> position of its first segment among all."""
    first_documents: Sequence[int]
    """Number of the first document of each segment."""

    def files_of(self, source: str, segment: int, folder: Path) -> tuple[Path, Path]:
        """What becomes of each record of a segment, a byte for each; and where they stand without repeated passages, or
        its own folder where none were looked for."""
        number = self.first_segment[source] + segment
        cut = cut_folder(self.folder, number)
        return self.folder / VERDICT_NAME.format(segment=number), cut if cut.is_dir() else folder

    def first_document(self, source: str, segment: int) -> int:
        """Number of the first record of a segment over all sources."""
        return self.first_documents[self.first_segment[source] + segment]

    def kept_for(self, documents: Sequence[int]) -> dict[int, int]:
        """Document number -> gid of the record that was kept for it; for a few documents."""
        pairs = np.load(self.folder / PAIRS_NAME, mmap_mode="r")
        gids = np.load(self.folder / GIDS_NAME, mmap_mode="r")
        wanted = np.array(sorted(documents), np.uint32)
        found: dict[int, int] = {}
        for start in range(0, len(pairs) if len(wanted) else 0, ROWS_AT_ONCE):
            rows = np.array(pairs[start : start + ROWS_AT_ONCE])
            for row in rows[np.isin(rows["member"], wanted)]:
                found[int(row["member"])] = int(gids[row["kept"]])
        return found


def read_duplicates(folder: Path, sources: Sequence[str]) -> Duplicates | None:
    """The outcome of a search that was finished; None when it was not, or without one of these sources."""
    try:
        found = read_json(folder / FOUND_NAME)
    except FileNotFoundError:
        return None
    is_whole = all(name in found["first_segment"] for name in sources)
    return Duplicates(folder, found["first_segment"], found["first_documents"]) if is_whole else None


def search_duplicates(
    folder: Path,
    sources: Sequence[SourceSegments],
    config: DedupConfig,
    valid_share: float,
    engine: TaskEngine,
    against: Against | None = None,
) -> Duplicates:
    """Search the records of all sources; goes on where an interrupted search stopped."""
    owners = [source.name for source in sources for _ in source.segments]
    units = [segment.folder for source in sources for segment in source.segments]
    channels = [source.channel for source in sources for _ in source.segments]
    result = find_duplicates(units, folder, config, engine=engine, channels=channels)
    first_ids = result.first_ids
    verdict = np.concatenate([np.zeros(0, np.uint8), *map(result.drops, range(len(units)))])
    _write_gids(folder / GIDS_NAME, sources, first_ids[-1])
    _write_clusters(folder)
    if against is not None:
        named = [(each.folder, source) for source in sources for each in source.segments]
        records = [
            (unit / RECORDS_NAME, source.name, source.template, first)
            for (unit, source), first in zip(named, first_ids, strict=False)
        ]
        gids = np.load(folder / GIDS_NAME, mmap_mode="r")
        contaminated, report = against[1](records, verdict == 0, gids, folder, engine)
        verdict[contaminated] = BENCHMARK
        write_json(folder / BENCHMARKS_NAME, report)
    if config.passages.min_chars is not None:
        verdict[cut_passages(units, first_ids, verdict, config.passages.min_chars, folder, engine)] = REPEATED
    verdict += split_records(units, owners, verdict, int(valid_share * (1 << 64)), config.near != "off")
    for number, (first, end) in enumerate(pairwise(first_ids)):
        write_npy(folder / VERDICT_NAME.format(segment=number), verdict[first:end])
    first_segment = {name: owners.index(name) for name in dict.fromkeys(owners)}
    write_json(folder / FOUND_NAME, {"first_segment": first_segment, "first_documents": first_ids})
    return Duplicates(folder, first_segment, first_ids)


def _write_gids(path: Path, sources: Sequence[SourceSegments], documents: int) -> None:
    gids = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint64, shape=(documents,))
    at = 0
    for source in sources:
        first_gid = source.number << ORDINAL_BITS
        for segment, first in zip(source.segments, first_ordinals(source.segments), strict=True):
            ordinals = read_index(segment.folder)["ordinal"]
            gids[at : at + len(ordinals)] = ordinals + np.uint64(first_gid + first)
            at += len(ordinals)
    gids.flush()


def _write_clusters(folder: Path) -> None:
    with atomic_file(folder / CLUSTERS_NAME) as file:
        for kept, dropped in groupby(_dropped(folder), key=lambda pair: pair[0]):
            file.write(jsonio.dumps_line({"kept": kept, "dropped": [entry for _, entry in dropped]}))


def _dropped(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The gid of the record that was kept, with each one that was dropped for it."""
    pairs = np.load(folder / PAIRS_NAME, mmap_mode="r")
    gids = np.load(folder / GIDS_NAME, mmap_mode="r")
    for start in range(0, len(pairs), ROWS_AT_ONCE):
        rows = np.array(pairs[start : start + ROWS_AT_ONCE])
        columns = (gids[rows["kept"]], gids[rows["member"]], rows["reason"], rows["matches"])
        for kept, member, reason, equal in zip(*(column.tolist() for column in columns), strict=True):
            entry = {"gid": member, "reason": DROP_REASONS[reason]}
            if reason == NEAR_DUPLICATE:
                entry["similarity"] = 1.0 if equal == 255 else round(jaccard_estimate(equal), 3)
            yield kept, entry
