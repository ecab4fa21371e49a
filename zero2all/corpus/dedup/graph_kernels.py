"""The loops of clustering: band hashes, pairs of a bucket, comparing signatures, choosing which stay. numba."""

from __future__ import annotations

import numpy as np
from numba import int64, njit, types, uint8, uint32, uint64

from zero2all.corpus.dedup.config import VALUES

PARTS = 1024
"""Parts of the band entries, by 10 bits of the hash; the other 32 bits are the bucket within a part."""

UNDECIDED, KEPT, DROPPED = range(3)

ROWS = types.Array(uint8, 2, "C", readonly=True)
FLAGS = types.Array(uint8, 1, "C", readonly=True)
LENGTHS = types.Array(uint32, 1, "C", readonly=True)
PAIRS = types.Array(uint64, 1, "C", readonly=True)
HALF = np.uint64(32)
LOW = np.uint64(0xFFFFFFFF)


@njit(int64(ROWS, FLAGS, int64, int64, int64, uint64[::1], int64[::1]), cache=True, nogil=True)
def band_entries(
    rows: np.ndarray, skip: np.ndarray, first_id: int, bands: int, width: int, out: np.ndarray, ends: np.ndarray
) -> int:
    """The entries (bucket << 32 | document) of every band of every signature, grouped by part.

    Documents with `skip` set or without a signature have none. `ends[p + 1]` is where part p ends; returns the total.
    """
    ends[:] = 0
    hashes = np.empty((rows.shape[0], bands), np.uint64)
    for number in range(rows.shape[0]):
        blank = True
        if not skip[number]:
            for value in rows[number]:
                if value:
                    blank = False
                    break
        if blank:
            hashes[number, 0] = np.uint64(0xFFFFFFFFFFFFFFFF)
            continue
        for band in range(bands):
            value = np.uint64(band + 1) * np.uint64(0x9E3779B97F4A7C15)
            for at in range(band * width, (band + 1) * width):
                value = (value ^ np.uint64(rows[number, at])) * np.uint64(0xD6E8FEB86659FD93)
                value ^= value >> np.uint64(29)
            value = (value * np.uint64(0xC4CEB9FE1A85EC53)) >> np.uint64(22)
            hashes[number, band] = value
            ends[(value >> HALF) + np.uint64(1)] += 1
    for part in range(PARTS):
        ends[part + 1] += ends[part]
    put = ends[:-1].copy()
    for number in range(rows.shape[0]):
        if hashes[number, 0] == np.uint64(0xFFFFFFFFFFFFFFFF):
            continue
        for band in range(bands):
            value = hashes[number, band]
            place = np.int64(value >> HALF)
            out[put[place]] = (value & LOW) << HALF | np.uint64(first_id + number)
            put[place] += 1
    return ends[PARTS]


@njit(types.UniTuple(uint64[::1], 2)(PAIRS, int64), cache=True, nogil=True)
def make_pairs(entries: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs (earlier << 32 | later) of the buckets of at most `most` documents; the entries of larger ones."""
    pairs, large = np.empty(0, np.uint64), np.empty(0, np.uint64)
    for is_counted in (False, True):  # first they are counted, then written
        put, put_large, start = 0, 0, 0
        for at in range(1, entries.size + 1):
            if at < entries.size and entries[at] >> HALF == entries[start] >> HALF:
                continue
            for first in range(start, at):
                if at - start > most:
                    if is_counted:
                        large[put_large] = entries[first]
                    put_large += 1
                    continue
                for second in range(first + 1, at):
                    if is_counted:
                        pairs[put] = (entries[first] & LOW) << HALF | (entries[second] & LOW)
                    put += 1
            start = at
        if not is_counted:
            pairs, large = np.empty(put, np.uint64), np.empty(put_large, np.uint64)
    return pairs, large


@njit(types.void(ROWS, int64[::1], int64[::1], uint8[::1], int64[::1]), cache=True, nogil=True)
def compare(rows: np.ndarray, first: np.ndarray, second: np.ndarray, out: np.ndarray, needed: np.ndarray) -> None:
    """Equal values of the signatures of each pair, at most 255; 0 where fewer than `needed`."""
    for pair in range(first.size):
        one = rows[first[pair]]
        two = rows[second[pair]]
        equal = 0
        for at in range(VALUES):
            equal += one[at] == two[at]
        out[pair] = np.uint8(min(equal, 255)) if equal >= needed[pair] else np.uint8(0)


@njit(types.boolean(int64, int64, LENGTHS), cache=True, nogil=True, inline="always")
def _better(first: np.int64, second: np.int64, lengths: np.ndarray) -> np.bool:
    """The longer text is the better copy; of equal lengths the first."""
    if lengths[first] != lengths[second]:
        return lengths[first] > lengths[second]
    return first < second


@njit(types.void(PAIRS, LENGTHS, uint8[::1], uint8[::1]), cache=True, nogil=True)
def spread(edges: np.ndarray, lengths: np.ndarray, state: np.ndarray, waits: np.ndarray) -> None:
    """One sweep: a document similar to a better one that stays is dropped, else it waits until that is decided."""
    for edge in edges:
        better = np.int64(edge >> HALF)
        worse = np.int64(edge & LOW)
        if not _better(better, worse, lengths):
            better, worse = worse, better
        if state[worse] == UNDECIDED:
            if state[better] == KEPT:
                state[worse] = DROPPED
            elif state[better] == UNDECIDED:
                waits[worse] = 1


@njit(int64(uint8[::1], uint8[::1]), cache=True, nogil=True)
def settle(state: np.ndarray, waits: np.ndarray) -> int:
    """Keep every undecided document that waits for no better one. Returns how many still wait."""
    waiting = 0
    for number in range(state.size):
        if state[number] == UNDECIDED:
            if waits[number]:
                waiting += 1
                waits[number] = 0
            else:
                state[number] = KEPT
    return waiting


@njit(types.void(PAIRS, FLAGS, LENGTHS, uint8[::1], uint32[::1], uint8[::1]), cache=True, nogil=True)
def attach(
    edges: np.ndarray,
    matches: np.ndarray,
    lengths: np.ndarray,
    state: np.ndarray,
    parent: np.ndarray,
    parent_matches: np.ndarray,
) -> None:
    """The parent of every dropped document is the best of the similar documents that stay."""
    for at in range(edges.size):
        one = np.int64(edges[at] >> HALF)
        two = np.int64(edges[at] & LOW)
        for _ in range(2):
            if state[one] == DROPPED and state[two] == KEPT:
                current = np.int64(parent[one])
                if current == one or _better(two, current, lengths):
                    parent[one] = two
                    parent_matches[one] = matches[at]
            one, two = two, one
