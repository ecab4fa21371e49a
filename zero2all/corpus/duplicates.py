"""The dedup step of a build: the search over all sources, and its outcome in terms of gids.

.build/<inputs>/drop-00000.npy   which records of a segment are dropped, and why      (written by dedup/)
                clusters.npy     (kept, dropped) pairs by document number             (written by dedup/)
                gids.npy         document number -> gid
                clusters.jsonl   which record was kept for which; also `corpus/clusters.jsonl` at the end
                found.json       last: the step is done
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import TaskEngine
from zero2all.common.files import atomic_file, read_json, write_json
from zero2all.corpus.dedup.cluster import CLUSTERS_NAME as PAIRS_NAME
from zero2all.corpus.dedup.cluster import NEAR_DUPLICATE, DedupResult, drop_path, find_duplicates
from zero2all.corpus.dedup.config import VALUES, DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.index import read_anchors, read_index, read_signatures
from zero2all.corpus.record import ORDINAL_BITS, Split, choose_split
from zero2all.corpus.segments import Segment, first_ordinals

CLUSTERS_NAME = "clusters.jsonl"
GIDS_NAME = "gids.npy"
FOUND_NAME = "found.json"
DROP_REASONS = {1: "duplicate", 2: "near_duplicate"}
"""Why dedup drops a record, by the number in its list."""
ROWS_AT_ONCE = 1 << 16
CONTAINED_EXAMPLES = 5


@dataclass(frozen=True)
class SourceSegments:
    """The segments of one source and the number that makes its gids."""

    name: str
    number: int
    segments: Sequence[Segment]


@dataclass(frozen=True)
class Duplicates:
    """The outcome of a finished search."""

    folder: Path
    first_segment: Mapping[str, int]
    """Name of a source -> position of its first segment among all."""
    first_documents: Sequence[int]
    """Number of the first document of each segment."""
    contained: Mapping[str, Any]
    """By source: records that stand inside longer ones."""

    def drop_path(self, source: str, segment: int) -> Path:
        """The list of a segment: a byte for each kept record, 0 where it stays."""
        return drop_path(self.folder, self.first_segment[source] + segment)

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


def read_duplicates(folder: Path) -> Duplicates | None:
    """The outcome of a search that was finished; None when it was not."""
    try:
        found = read_json(folder / FOUND_NAME)
    except FileNotFoundError:
        return None
    return Duplicates(folder, found["first_segment"], found["first_documents"], found["facts"]["contained"])


def search_duplicates(
    folder: Path, sources: Sequence[SourceSegments], config: DedupConfig, valid_share: float, engine: TaskEngine
) -> Duplicates:
    """Search the records of all sources; goes on where an interrupted search stopped."""
    owners = [source.name for source in sources for _ in source.segments]
    splits = {}
    if config.near == "held_out":
        splits = {source.name: split_before_dedup(source.segments, valid_share) for source in sources}

    def held_out(unit: int, rows: np.ndarray) -> np.ndarray:
        return splits[owners[unit]].is_valid(rows["key"])

    units = [segment.folder for source in sources for segment in source.segments]
    result = find_duplicates(units, folder, config, engine=engine, held_out=held_out)
    _write_gids(folder / GIDS_NAME, sources, result.first_ids[-1])
    _write_clusters(folder)
    first_segment = {name: owners.index(name) for name in dict.fromkeys(owners)}
    contained = _contained(folder, units, result, owners) if config.near != "off" else {}
    found = {"first_segment": first_segment, "first_documents": result.first_ids, "facts": {"contained": contained}}
    write_json(folder / FOUND_NAME, found)
    return Duplicates(folder, first_segment, result.first_ids, contained)


def _contained(folder: Path, units: list[Path], result: DedupResult, owners: list[str]) -> dict[str, Any]:
    """By source: how many kept records were looked up, how many stand inside a longer record, and some examples."""
    drops = [result.drops(unit) for unit in range(len(units))]
    found = find_contained(units, drops, result.first_ids)
    gids = np.load(folder / GIDS_NAME, mmap_mode="r")
    by_source: dict[str, Any] = {}
    for name in dict.fromkeys(owners):
        at = [number for number, owner in enumerate(owners) if owner == name]
        first, end = result.first_ids[at[0]], result.first_ids[at[-1] + 1]
        own = np.flatnonzero((found.inner >= first) & (found.inner < end))
        by_source[name] = {
            "looked_up": int(((found.looked_up >= first) & (found.looked_up < end)).sum()),
            "records": len(own),
            "examples": [
                {
                    "gid": int(gids[found.inner[row]]),
                    "inside": int(gids[found.outer[row]]),
                    "share": round(float(found.shares[row]), 2),
                }
                for row in own[:CONTAINED_EXAMPLES].tolist()
            ],
        }
    return by_source


def split_before_dedup(segments: Sequence[Segment], valid_share: float) -> Split:
    """How a source is split when all its records are taken into account, duplicates too."""
    return choose_split(valid_share, (read_index(segment.folder)["key"] for segment in segments))


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


# Records that stand inside longer ones: half copies, quotations, chapters beside their book. Reported, not dropped.
#
# The Jaccard index of a text and its half is 0.5, far below what near dedup looks for. But the least shingle hashes of
# a text (its anchors) that lie in the half are the least of the half too. Kept records that share an anchor are
# compared by their signatures: with J the estimated Jaccard index, a and b the lengths,
#
#     share of the shorter one that is in the longer one  =  J / (1 + J) * (a + b) / b
#
# At most `SAMPLED` records are looked up among all, an anchor is followed to the first `MOST_RECORDS` records only, and
# a record more than `MOST_LONGER` times as long is not considered. So the count is a lower bound. Memory: at most 400
# MB.


SAMPLED = 50_000
MOST_RECORDS = 8
MOST_LONGER = 8.0
LEAST_SHARE = 0.8
"""From here on the shorter record counts as contained."""
LEAST_BYTES = 100
"""Shorter texts stand in others too easily."""
NO_ANCHOR = 0xFFFFFFFF
PAIRS_AT_ONCE = 1 << 15


class Contained(NamedTuple):
    """What was found, by document number."""

    looked_up: np.ndarray
    """The records that were looked up, in rising order."""
    inner: np.ndarray
    """Those of them that stand in another."""
    outer: np.ndarray
    """The record each of these stands in."""
    shares: np.ndarray
    """How much of each does."""


def find_contained(units: Sequence[Path], drops: Sequence[np.ndarray], first_ids: Sequence[int]) -> Contained:
    """Look records up among all kept ones; `drops` says which are not kept, `first_ids` how they are numbered."""
    kept = sum(int((drop == 0).sum()) for drop in drops)
    step = max(1, -(-kept // SAMPLED))
    sampled: list[np.ndarray] = []
    anchors: list[np.ndarray] = []
    for unit, drop, first in zip(units, drops, first_ids, strict=False):
        rows = read_index(unit)
        chosen = np.flatnonzero((drop == 0) & (rows["key"] // 8 % step == 0) & (rows["text_bytes"] >= LEAST_BYTES))
        sampled.append((chosen + first).astype(np.int64))
        anchors.append(np.unique(np.array(read_anchors(unit)[chosen])))
    looked_up = np.concatenate(sampled) if sampled else np.zeros(0, np.int64)
    wanted = np.unique(np.concatenate(anchors)) if anchors else np.zeros(0, np.uint32)
    wanted = wanted[wanted != NO_ANCHOR]
    pairs = _pairs(units, drops, first_ids, wanted, looked_up)
    return _verified(units, first_ids, looked_up, pairs)


def _pairs(
    units: Sequence[Path],
    drops: Sequence[np.ndarray],
    first_ids: Sequence[int],
    wanted: np.ndarray,
    looked_up: np.ndarray,
) -> np.ndarray:
    """(n, 2) int64: a record that was looked up, and another one that shares an anchor with it."""
    met = np.zeros(len(wanted), np.int64)
    places: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    for unit, drop, first in zip(units, drops, first_ids, strict=False):
        if not len(wanted):
            break
        kept = np.flatnonzero(drop == 0)
        values = np.array(read_anchors(unit))[kept]
        place = np.minimum(np.searchsorted(wanted, values.ravel()), len(wanted) - 1)
        hits = np.flatnonzero(wanted[place] == values.ravel())
        place, document = place[hits], kept[hits // values.shape[1]] + first
        order = np.argsort(place, kind="stable")
        place, document = place[order], document[order]
        starts = np.searchsorted(place, place)
        few = met[place] + np.arange(len(place)) - starts < MOST_RECORDS
        met += np.bincount(place, minlength=len(wanted))
        places.append(place[few])
        documents.append(document[few])
    if not places:
        return np.zeros((0, 2), np.int64)
    place, document = np.concatenate(places), np.concatenate(documents)
    order = np.argsort(place, kind="stable")
    place, document = place[order], document[order]
    at = np.minimum(np.searchsorted(looked_up, document), len(looked_up) - 1)
    is_looked_up = looked_up[at] == document
    found = [np.zeros(0, np.int64)]
    for apart in range(1, MOST_RECORDS):
        same = np.flatnonzero(place[apart:] == place[:-apart])
        for inner, outer in ((same, same + apart), (same + apart, same)):
            wanted_here = is_looked_up[inner]
            found.append(document[inner[wanted_here]] << 32 | document[outer[wanted_here]])
    packed = np.unique(np.concatenate(found))
    return np.stack([packed >> 32, packed & 0xFFFFFFFF], axis=1)


def _verified(units: Sequence[Path], first_ids: Sequence[int], looked_up: np.ndarray, pairs: np.ndarray) -> Contained:
    """The pairs whose first record stands in the second; of several for one record, the best."""
    best: dict[int, tuple[float, int]] = {}
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        some = pairs[start : start + PAIRS_AT_ONCE]
        inner_bytes, outer_bytes = (
            _gathered(units, first_ids, some[:, side], _lengths).astype(np.float64) for side in (0, 1)
        )
        some_ok = (outer_bytes > inner_bytes) & (outer_bytes <= MOST_LONGER * inner_bytes)
        some, inner_bytes, outer_bytes = some[some_ok], inner_bytes[some_ok], outer_bytes[some_ok]
        if not len(some):
            continue
        inner_rows, outer_rows = (_gathered(units, first_ids, some[:, side], read_signatures) for side in (0, 1))
        equal = inner_rows == outer_rows
        jaccard = np.maximum((equal.mean(axis=1) - 1 / VALUES) / (1 - 1 / VALUES), 0)
        shares = np.minimum(jaccard / (1 + jaccard) * (inner_bytes + outer_bytes) / inner_bytes, 1)
        for at in np.flatnonzero(shares >= LEAST_SHARE).tolist():
            inner, outer, share = int(some[at, 0]), int(some[at, 1]), float(shares[at])
            if share > best.get(inner, (0.0, 0))[0]:
                best[inner] = (share, outer)
    inner_ids = sorted(best)
    return Contained(
        looked_up,
        np.array(inner_ids, np.int64),
        np.array([best[inner][1] for inner in inner_ids], np.int64),
        np.array([best[inner][0] for inner in inner_ids]),
    )


def _gathered(
    units: Sequence[Path], first_ids: Sequence[int], documents: np.ndarray, read: Callable[[Path], np.ndarray]
) -> np.ndarray:
    """The rows of some documents, of what `read` gives for their units."""
    owners = np.searchsorted(np.asarray(first_ids), documents, side="right") - 1
    found: list[np.ndarray] = []
    places = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
    for at in places:
        owner = int(owners[at[0]])
        found.append(read(units[owner])[documents[at] - first_ids[owner]])
    order = np.argsort(np.concatenate(places))
    return np.concatenate(found)[order]


def _lengths(unit: Path) -> np.ndarray:
    return read_index(unit)["text_bytes"]
