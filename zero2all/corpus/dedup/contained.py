"""Records that stand inside longer ones: half copies, quotations, chapters beside their book. Reported, not dropped.

The Jaccard index of a text and its half is 0.5, far below what near dedup looks for. But the least shingle hashes of a
text (its anchors) that lie in the half are the least of the half too. Kept records that share an anchor are compared by
their signatures: with J the estimated Jaccard index, a and b the lengths,

    share of the shorter one that is in the longer one  =  J / (1 + J) * (a + b) / b

At most `SAMPLED` records are looked up among all, an anchor is followed to the first `MOST_RECORDS` records only, and a
record more than `MOST_LONGER` times as long is not considered. So the count is a lower bound. Memory: at most 400 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero2all.corpus.dedup.config import VALUES
from zero2all.corpus.dedup.index import read_anchors, read_index, read_signatures

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
