"""Which records may be held out: those that share no text with a record that stays in training.

A record is a candidate when its key chooses it (`record.py`); in every unit the records with the least keys are too,
for sources of which no other is left. The anchors of all candidates are looked up in all records. Two records share
text when they have 16 % of the anchors of the smaller one in common, or 8 % counting only those of at most 16 records
(others are phrases and boilerplate), and at least two where it has 16 or more. That finds a fifth of one record in
another. A candidate that shares text with a record in training stays there, and so do the candidates that share text
with it. Memory: 24 bytes an anchor of the candidates, and a unit's anchors.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero2all.corpus.dedup.index import ANCHORS_NAME, HEADER_BYTES, read_index

LEAST_RARE, LEAST_SHARED, MOST_RECORDS = 0.08, 0.16, 16
FEW_ANCHORS = 16
RESERVE = 16
"""Records of a unit that are candidates beside those chosen by their keys."""
LOW = np.uint64(0xFFFFFFFF)


class _Candidates(NamedTuple):
    documents: np.ndarray
    """(c,) int64, rising."""
    is_chosen: np.ndarray
    """(c,) bool: by its key, and not in reserve."""
    counts: np.ndarray
    """(c,) int64: different anchors of each."""
    values: np.ndarray
    """(n,) uint32: these anchors, sorted."""
    owners: np.ndarray
    """(n,) int64: whose each is, as a place in `documents`."""


def find_train_only(units: Sequence[Path], drop: np.ndarray, below: int) -> np.ndarray:
    """(documents,) bool: the records that stay and may not be held out. `drop` says which do not stay."""
    candidates = _candidates(units, drop, below)
    documents, is_chosen, values = candidates.documents, candidates.is_chosen, candidates.values
    records = np.zeros(len(values), np.int32)
    for _, anchors, rows, _ in _known_anchors(units, drop, values):
        _, places = np.unique(rows.astype(np.uint64) << np.uint64(32) | anchors, return_index=True)
        first, end = _places(values, anchors[places])
        np.add.at(records, _ranges(first, end), 1)
    in_train = np.zeros(len(documents), np.bool_)
    pairs = [_shared(candidates, records <= MOST_RECORDS, *unit) for unit in _known_anchors(units, drop, values)]
    one, other = np.concatenate([np.zeros((2, 0), np.int64), *pairs], axis=1)
    place = np.minimum(np.searchsorted(documents, other), max(len(documents) - 1, 0))
    with_train = (documents[place] != other) | ~is_chosen[place] | ~is_chosen[one]
    moved = -1
    while moved != (moved := int(in_train.sum())):
        in_train[one[with_train | in_train[place]]] = True
    train_only: np.ndarray = drop == 0
    train_only[documents[~in_train]] = False
    return train_only


def _shared(
    candidates: _Candidates, is_rare: np.ndarray, at: int, anchors: np.ndarray, rows: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """(2, n) int64: the pairs of a candidate, by its place, and a document of this unit that share text."""
    first, end = _places(candidates.values, anchors)
    at_values = _ranges(first, end)
    owners, row = candidates.owners[at_values], np.repeat(rows, end - first)
    pairs, of_pair, common = np.unique(
        owners.astype(np.uint64) << np.uint64(32) | row.astype(np.uint64), return_inverse=True, return_counts=True
    )
    rare = np.bincount(of_pair, weights=is_rare[at_values], minlength=len(pairs))
    one, row = (pairs >> np.uint64(32)).astype(np.int64), (pairs & LOW).astype(np.int64)
    fewer = np.minimum(candidates.counts[one], counts[row])
    needed = np.where(fewer < FEW_ANCHORS, 1, 2)
    shares = (rare >= np.maximum(needed, np.floor(LEAST_RARE * fewer))) | (
        common >= np.maximum(needed, np.floor(LEAST_SHARED * fewer))
    )
    shares &= candidates.documents[one] != row + at
    return np.stack([one[shares], row[shares] + at])


def _candidates(units: Sequence[Path], drop: np.ndarray, below: int) -> _Candidates:
    documents, is_chosen, pairs = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)], [np.zeros(0, np.uint64)]
    candidates = 0
    for folder, at, counts, anchors in _anchors(units):
        keys = np.array(read_index(folder)["key"])
        stays = np.flatnonzero(drop[at : at + len(counts)] == 0)
        chosen = keys < np.uint64(below)
        is_candidate = np.zeros(len(counts), np.bool_)
        is_candidate[stays] = chosen[stays]
        is_candidate[stays[np.argsort(keys[stays])[:RESERVE]]] = True
        rows = np.flatnonzero(is_candidate)
        owners = np.repeat(np.arange(len(rows)) + candidates, counts[rows]).astype(np.uint64)
        pairs.append(anchors[np.repeat(is_candidate, counts)].astype(np.uint64) << np.uint64(32) | owners)
        documents.append(rows + at)
        is_chosen.append(chosen[rows])
        candidates += len(rows)
    all_pairs = np.unique(np.concatenate(pairs))
    values, of_value = (all_pairs >> np.uint64(32)).astype(np.uint32), (all_pairs & LOW).astype(np.int64)
    counts = np.bincount(of_value, minlength=candidates)
    return _Candidates(np.concatenate(documents), np.concatenate(is_chosen), counts, values, of_value)


def _known_anchors(
    units: Sequence[Path], drop: np.ndarray, values: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """For each unit its first document; the anchors that may be among `values`, their rows; how many each row has."""
    known = np.zeros(1 << 24, np.bool_)
    known[values >> np.uint32(8)] = True
    for _, at, counts, anchors in _anchors(units):
        hits = np.flatnonzero(known[anchors >> np.uint32(8)] & np.repeat(drop[at : at + len(counts)] == 0, counts))
        yield at, anchors[hits], np.repeat(np.arange(len(counts)), counts)[hits], counts


def _anchors(units: Sequence[Path]) -> Iterator[tuple[Path, int, np.ndarray, np.ndarray]]:
    """Each unit, its first document, how many anchors each of its records has, and all of them."""
    at = 0
    for folder in units:
        counts = read_index(folder)["anchors"].astype(np.int64)
        yield folder, at, counts, np.fromfile(folder / ANCHORS_NAME, np.uint32, offset=HEADER_BYTES)
        at += len(counts)


def _places(values: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each anchor begins and ends in `values`."""
    return np.searchsorted(values, anchors, side="left"), np.searchsorted(values, anchors, side="right")


def _ranges(first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """All numbers from each `first` to its `end`."""
    times = end - first
    return np.repeat(first - np.cumsum(times) + times, times) + np.arange(times.sum())
