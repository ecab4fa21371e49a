"""Which records are held out: whole clusters of records that share text, so that none of it is in train, too.

Two records share text when they have 8 % of the anchors of the smaller one in common, rounded down, and at least one;
anchors of more than 64 records are boilerplate and do not count. That finds a fifth of one record in another.
The search begins at the records that their keys choose, follows the links, and gives up where a cluster grows too
large. A cluster of n records, of which the least key is k, is held out when n k < `valid_share`: a record alone by
its key, and one of a large cluster as often. In train are clusters of more records than are to be held out, and those
with a record of which half is boilerplate.

Where that leaves a source without a quarter of what the keys alone would choose, clusters come next that missed by
little; then, as where all texts are made of the same phrases, the records with the least keys, and those that share
text with train are counted. Memory: 25 bytes a document, a unit's anchors, and 24 bytes an anchor that is looked up.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from zero2all.corpus.dedup.index import ANCHORS_NAME, read_index

LEAST_SHARED, MOST_RECORDS, BOILERPLATE = 0.08, 64, 0.5
MIN_RECORDS_FOR_VALID = 20
"""A source with fewer records holds none out by their keys; one with at least as many holds out at least one."""
RESERVE = 16
"""So many records of each source are looked at beside those their keys choose; clusters of as many are followed."""
MOST_ROUNDS = 16
LOW = np.uint64(0xFFFFFFFF)
HELD_OUT, HELD_OUT_SHARED = 3, 6
"""What becomes of records. The latter are held out, too, and share text with train."""


def split_records(
    units: Sequence[Path], sources: Sequence[str], drop: np.ndarray, below: int, follows_links: bool
) -> np.ndarray:
    """(documents,) uint8: HELD_OUT or HELD_OUT_SHARED; 0 where `drop` names it or it is for training. `sources` are
    those of the units. Without `follows_links` the keys alone decide."""
    verdict = np.zeros(len(drop), np.uint8)
    if not below:
        return verdict
    keys = np.concatenate([np.zeros(0, np.uint64), *(read_index(folder)["key"] for folder in units)])
    source = np.repeat(np.unique(sources, return_inverse=True)[1], [len(read_index(folder)) for folder in units])
    in_sources = [np.flatnonzero((source == number) & (drop == 0)) for number in range(len(set(sources)))]
    by_key = [mine[np.argsort(keys[mine], kind="stable")] for mine in in_sources if len(mine) >= MIN_RECORDS_FOR_VALID]
    wanted = [max(1, int((keys[mine] < np.uint64(below)).sum())) for mine in by_key]
    label, is_member, is_explored, is_open = np.arange(len(drop)), *np.zeros((3, len(drop)), np.bool_)
    for mine, count in zip(by_key, wanted, strict=True):
        is_member[mine[: max(count, RESERVE)]] = True
    links = np.zeros((2, 0), np.int64)
    for _ in range(MOST_ROUNDS):
        members = np.flatnonzero(is_member)
        labels, of_member, sizes = np.unique(label[members], return_inverse=True, return_counts=True)
        score = np.full(len(labels), np.inf)
        np.minimum.at(score, of_member, keys[members].astype(np.float64))
        score *= sizes
        follow = members[~is_explored[members] & ((score < below) | (sizes <= RESERVE))[of_member]]
        if not len(follow) or not follows_links:
            break
        found, boilerplate = _links(units, drop, follow)
        is_explored[follow], is_open[boilerplate], is_member[found[1]] = True, True, True
        links = np.concatenate([links, found], axis=1)
        _join(label, *found)
    is_closed = sizes <= sum(wanted)
    is_closed[of_member[is_open[members] | (~is_explored[members] & follows_links)]] = False
    held_out = np.zeros(len(drop), np.bool_)
    held_out[members[(is_closed & (score < below))[of_member]]] = True
    next_best = members[np.argsort(score[of_member], kind="stable")]
    for mine, count in zip(by_key, wanted, strict=True):
        spare = next_best[np.isin(next_best, mine) & np.isin(label[next_best], labels[is_closed & (sizes <= count)])]
        for document in spare.tolist():
            if held_out[mine].sum() > count // 4:
                break
            held_out[members[label[members] == label[document]]] = True
        if held_out[mine].sum() <= count // 4:
            held_out[mine[:count]] = True
    verdict[held_out] = HELD_OUT
    verdict[held_out & is_open] = HELD_OUT_SHARED
    crossing = links[:, held_out[links[0]] != held_out[links[1]]]
    verdict[crossing[held_out[crossing]]] = HELD_OUT_SHARED
    return verdict


def _join(label: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Give linked documents one label, the least of theirs."""
    while (label[one] != label[other]).any():
        low = np.minimum(label[one], label[other])
        np.minimum.at(label, label[one], low)
        np.minimum.at(label, label[other], low)
        while (label[label] != label).any():
            label[:] = label[label]


def _links(units: Sequence[Path], drop: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(2, n) int64: these documents, each with one that shares text with it; and those that are mostly boilerplate."""
    pairs, all_counts = [np.zeros(0, np.uint64)], np.zeros(len(drop), np.uint32)
    is_one = np.zeros(len(drop), np.bool_)
    is_one[documents] = True
    for at, counts, anchors in _anchors(units):
        chosen = np.flatnonzero(is_one[at : at + len(counts)])
        owners = np.repeat(chosen + at, counts[chosen]).astype(np.uint64)
        mine = anchors[np.repeat(is_one[at : at + len(counts)], counts)].astype(np.uint64)
        pairs.append(np.unique(mine << np.uint64(32) | owners))
        all_counts[at : at + len(counts)] = counts
    packed = np.sort(np.concatenate(pairs))
    owners = (packed & LOW).astype(np.int64)
    values, first, times = np.unique((packed >> np.uint64(32)).astype(np.uint32), return_index=True, return_counts=True)
    records = np.zeros(len(values), np.int64)
    for place, _ in _places(units, drop, values):
        records += np.bincount(place, minlength=len(values))
    is_rare = records <= MOST_RECORDS
    found = [np.zeros((2, 0), np.int64)]
    for place, row in _places(units, drop, values):
        place, row = place[is_rare[place]], row[is_rare[place]]
        repeats = times[place]
        at_owner = np.repeat(first[place] - np.cumsum(repeats) + repeats, repeats) + np.arange(repeats.sum())
        both = owners[at_owner].astype(np.uint64) << np.uint64(32) | np.repeat(row, repeats).astype(np.uint64)
        both, shared = np.unique(both, return_counts=True)
        one, other = (both >> np.uint64(32)).astype(np.int64), (both & LOW).astype(np.int64)
        fewer = np.minimum(all_counts[one], all_counts[other])
        enough = shared >= np.maximum(1, np.floor(LEAST_SHARED * fewer))
        found.append(np.stack([one, other])[:, enough & (one != other)])
    own, which = np.unique(owners, return_inverse=True)
    share = np.bincount(which, weights=~np.repeat(is_rare, times)) / np.maximum(np.bincount(which), 1)
    return np.concatenate(found, axis=1), own[share >= BOILERPLATE]


def _places(units: Sequence[Path], drop: np.ndarray, values: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each unit where in `values` the anchors of its documents are, each once, and the documents."""
    known = np.zeros(1 << 24, np.bool_)
    known[values >> np.uint32(8)] = True
    for at, counts, anchors in _anchors(units):
        hits = np.flatnonzero(known[anchors >> np.uint32(8)])
        place = np.searchsorted(values, anchors[hits])
        is_equal = values[np.minimum(place, len(values) - 1)] == anchors[hits]
        hits, place = hits[is_equal], place[is_equal]
        rows = at + np.searchsorted(np.cumsum(counts), hits, side="right")
        stays = drop[rows] == 0
        both = np.unique(place[stays].astype(np.uint64) << np.uint64(32) | rows[stays].astype(np.uint64))
        yield (both >> np.uint64(32)).astype(np.int64), (both & LOW).astype(np.int64)


def _anchors(units: Sequence[Path]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Of each unit its first document, how many anchors each of its records has, and all of them."""
    at = 0
    for folder in units:
        counts = read_index(folder)["anchors"].astype(np.int64)
        yield at, counts, np.fromfile(folder / ANCHORS_NAME, np.uint32)
        at += len(counts)
