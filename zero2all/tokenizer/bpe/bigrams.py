"""Pass 1: how often each character occurs, and each pair of neighbouring characters inside a pretoken. numba.

Every worker counts into a small table of its own, which stays in the processor's cache, and adds it to the one big
table when it is full; the sums do not depend on which thread counted what. Pairs of ASCII characters have an array.

When the big table would outgrow its share of the memory, it becomes a count-min sketch: two rows of counters of fixed
size, each shared by several pairs. A pair may then look more frequent than it is, never less. Cutting less than allowed
is always safe, so the result stays exact.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from zero2all.common.files import read_json
from zero2all.tokenizer.bpe.counting import PROGRESS_NAME
from zero2all.tokenizer.bpe.scan import BREAK, CODE_POINTS, character_kinds, pretoken_end

ASCII = 128
LOCAL_SLOTS = 1 << 18
LOCAL_LIMIT = LOCAL_SLOTS * 6 // 10
FIRST_SLOTS = 1 << 12
FULLEST = 0.8
BYTES_PER_SLOT = 16
FILTER_BITS = 23
"""The filter for pass 2 has two rows of this many bits, as a power of two: 1 MB each."""
SMALLEST_SKETCH_BITS = 16

_SHIFT = np.uint64(21)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_LOW32 = np.uint64(0xFFFFFFFF)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX2 = np.uint64(0xD6E8FEB86659FD93)


@njit(cache=True, nogil=True)
def mixed(key):  # type: ignore[no-untyped-def]
    """A hash of a 64-bit key whose upper and lower halves are both good."""
    key = (key ^ (key >> _HALF)) * _MIX
    key = (key ^ (key >> _HALF)) * _MIX2
    return key ^ (key >> _HALF)


@njit(cache=True, nogil=True)
def _enter(keys, key):  # type: ignore[no-untyped-def]
    """The slot of a key in an open-addressing table that has room; 1 if it was not there before."""
    slot = (mixed(key) & _LOW32) * np.uint64(keys.size) >> _HALF
    while keys[slot] != key:
        if keys[slot] == 0:
            keys[slot] = key
            return slot, 1
        slot += _ONE
        if slot == keys.size:
            slot = np.uint64(0)
    return slot, 0


@njit(cache=True, nogil=True)
def _count(codes, state, kinds, characters, ascii_pairs, keys, counts):  # type: ignore[no-untyped-def]
    """Count from state[0] on; true when the block is finished, false when the local table is full.

    state: place in the block, end of the pretoken at that place, entries of the local table.
    """
    at, end, entries = state[0], state[1], state[2]
    finished = True
    while at < codes.size:
        if at == end:
            if kinds[codes[at]] == BREAK:
                at += 1
                end = at
                continue
            end = pretoken_end(codes, at, kinds)
        first = codes[at]
        characters[first] += 1
        at += 1
        if at == end:
            continue
        second = codes[at]
        if (first | second) < ASCII:
            ascii_pairs[first * ASCII + second] += 1
            continue
        key = np.uint64(first) << _SHIFT | np.uint64(second)  # never 0: one of the two is not ASCII
        slot, is_new = _enter(keys, key)
        counts[slot] += 1
        entries += is_new
        if entries >= LOCAL_LIMIT:
            finished = False
            break
    state[0], state[1], state[2] = at, end, entries
    return finished


@njit(cache=True, nogil=True)
def _add_table(keys, counts, to_keys, to_counts):  # type: ignore[no-untyped-def]
    """Add one open-addressing table to another that has room; returns how many keys are new there."""
    new = 0
    for place in range(keys.size):
        key = keys[place]
        if key == 0:
            continue
        slot, is_new = _enter(to_keys, key)
        to_counts[slot] += counts[place]
        new += is_new
    return new


@njit(cache=True, nogil=True)
def _add_to_sketch(keys, counts, rows, bits):  # type: ignore[no-untyped-def]
    mask = (_ONE << np.uint64(bits)) - _ONE
    for place in range(keys.size):
        if keys[place]:
            value = mixed(keys[place])
            rows[0, value & mask] += counts[place]
            rows[1, (value >> _HALF) & mask] += counts[place]


@njit(cache=True, nogil=True)
def _fill_filter(keys, counts, threshold, filter_rows, bits):  # type: ignore[no-untyped-def]
    mask = (_ONE << np.uint64(bits)) - _ONE
    for place in range(keys.size):
        if keys[place] and counts[place] >= threshold:
            value = mixed(keys[place])
            for row in range(2):
                bit = (value if row == 0 else value >> _HALF) & mask
                filter_rows[row, bit >> np.uint64(6)] |= _ONE << (bit & np.uint64(63))


@njit(cache=True, nogil=True)
def are_joined(first, second, ascii_joined, filter_rows, mask):  # type: ignore[no-untyped-def]
    """Whether two neighbouring characters may have come from a frequent pair (see `PairFilter`)."""
    if (first | second) < ASCII:
        return ascii_joined[first * ASCII + second]
    value = mixed(np.uint64(first) << _SHIFT | np.uint64(second))
    bit = value & mask
    if not filter_rows[0, bit >> np.uint64(6)] >> (bit & np.uint64(63)) & _ONE:
        return False
    bit = (value >> _HALF) & mask
    return (filter_rows[1, bit >> np.uint64(6)] >> (bit & np.uint64(63)) & _ONE) != 0


class PairFilter:
    """Which pairs of characters occur at least `threshold` times; now and then it says yes for a rarer one.

    A Bloom filter of two rows: a wrong yes only leaves a cut out, which is safe, and 2 MB stay in the cache.
    """

    def __init__(self, threshold: int, ascii_joined: np.ndarray, rows: np.ndarray) -> None:
        self.threshold, self.ascii_joined, self.rows = threshold, ascii_joined, rows
        self.mask = np.uint64(rows.shape[1] * 64 - 1)

    @classmethod
    def of_everything(cls) -> PairFilter:
        """The filter that cuts nothing."""
        return cls(0, np.ones(ASCII * ASCII, np.bool_), np.full((2, 1), ~np.uint64(0), np.uint64))


class Bigrams:
    """The counts of all text; `worker()` gives each thread its own small table."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.characters = np.zeros(CODE_POINTS, np.int64)
        self.ascii_pairs = np.zeros(ASCII * ASCII, np.int64)
        self.keys = np.zeros(FIRST_SLOTS, np.uint64)
        self.counts = np.zeros(FIRST_SLOTS, np.int64)
        self.entries = 0
        self.released = False
        self.sketch: np.ndarray | None = None
        self.sketch_bits = 0
        self.distinct = 0
        """Pairs of characters, of which a sketch does not know the number."""
        self.lock = threading.Lock()

    def worker(self) -> BigramWorker:
        """A counter for one thread."""
        return BigramWorker(self)

    def add(self, worker: BigramWorker) -> None:
        """Add what a worker has counted."""
        with self.lock:
            used = np.flatnonzero(worker.characters)
            self.characters[used] += worker.characters[used]
            self.ascii_pairs += worker.ascii_pairs
            entries = int(worker.state[2])
            if self.sketch is None:
                self._make_room(entries)
            if self.sketch is None:
                self.entries += _add_table(worker.keys, worker.counts, self.keys, self.counts)
            else:
                _add_to_sketch(worker.keys, worker.counts, self.sketch, self.sketch_bits)

    def _make_room(self, more: int) -> None:
        needed = self.entries + more
        if needed <= FULLEST * self.keys.size:
            return
        # What is needed may be mostly known keys, so grow by a third at least and never to the worst case at once.
        slots = max(int(1.3 * self.keys.size), int(needed / FULLEST) + 1)
        # While it grows, both the old and the new table are in memory.
        if self.max_bytes is not None and (slots + self.keys.size) * BYTES_PER_SLOT > self.max_bytes:
            self._become_sketch()
            return
        keys, counts = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)
        _add_table(self.keys, self.counts, keys, counts)
        self.keys, self.counts = keys, counts

    def _become_sketch(self) -> None:
        assert self.max_bytes is not None, "without a limit the table grows"
        spare = self.max_bytes - self.keys.size * BYTES_PER_SLOT
        self.sketch_bits = SMALLEST_SKETCH_BITS
        while 16 << (self.sketch_bits + 1) <= spare and self.sketch_bits < 30:
            self.sketch_bits += 1
        self.sketch = np.zeros((2, 1 << self.sketch_bits), np.int64)
        _add_to_sketch(self.keys, self.counts, self.sketch, self.sketch_bits)
        self.keys, self.counts, self.entries = np.zeros(1, np.uint64), np.zeros(1, np.int64), 0

    def text_bytes(self) -> int:
        """All characters counted, in UTF-8."""
        ends = ((0x80, 1), (0x800, 2), (0x10000, 3), (CODE_POINTS, 4))
        start, total = 0, 0
        for end, size in ends:
            total += size * int(self.characters[start:end].sum())
            start = end
        return total

    def release(self) -> None:
        """Give the memory of the pairs back; `restore` reads them from disk again."""
        self.distinct = self.entries + int(np.count_nonzero(self.ascii_pairs))
        self.keys, self.counts, self.entries = np.zeros(1, np.uint64), np.zeros(1, np.int64), 0
        self.sketch = None
        self.released = True

    def restore(self, folder: Path) -> None:
        """Undo `release`, from the state that the finished pass left in `folder`."""
        if self.released:
            state = read_json(folder / PROGRESS_NAME)
            self.load(folder / state["folder"], state["count"]["bigrams"])
            self.released = False

    def pair_counts(self) -> np.ndarray:
        """Counts of all pairs but ASCII ones, in no order, zeros among them; of a sketch, those of its first row."""
        return self.counts if self.sketch is None else self.sketch[0]

    def filter(self, threshold: int) -> PairFilter:
        """The pairs with at least `threshold` occurrences, for pass 2."""
        ascii_joined = self.ascii_pairs >= threshold
        if self.sketch is None:
            rows = np.zeros((2, 1 << (FILTER_BITS - 6)), np.uint64)
            _fill_filter(self.keys, self.counts, threshold, rows, FILTER_BITS)
        else:
            frequent = np.packbits(self.sketch >= threshold, axis=1, bitorder="little")
            rows = frequent.view(np.uint64)
        return PairFilter(threshold, ascii_joined, rows)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the counts into `folder`, not yet for good; returns what `load` must know besides."""
        used = np.flatnonzero(self.characters)
        arrays = {
            "used": used,
            "characters": self.characters[used],
            "ascii_pairs": self.ascii_pairs,
            "keys": self.keys,
            "counts": self.counts,
        }
        if self.sketch is not None:
            arrays["sketch"] = self.sketch
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return {"sketch_bits": self.sketch_bits}

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Continue from what `save` wrote."""
        self.characters[:] = 0
        self.characters[np.load(folder / "used.npy")] = np.load(folder / "characters.npy")
        self.ascii_pairs = np.load(folder / "ascii_pairs.npy")
        self.keys, self.counts = np.load(folder / "keys.npy"), np.load(folder / "counts.npy")
        self.entries = int(np.count_nonzero(self.keys))
        self.sketch_bits = facts["sketch_bits"]
        if self.sketch_bits:
            self.sketch = np.load(folder / "sketch.npy")


class BigramWorker:
    """One thread's counts."""

    def __init__(self, total: Bigrams) -> None:
        self.total = total
        self.kinds = character_kinds()
        self.state = np.zeros(3, np.int64)
        self._clear()

    def _clear(self) -> None:
        # Fresh zero pages cost nothing until they are touched, unlike filling these arrays with zeros.
        self.characters = np.zeros(CODE_POINTS, np.int64)
        self.ascii_pairs = np.zeros(ASCII * ASCII, np.int64)
        self.keys = np.zeros(LOCAL_SLOTS, np.uint64)
        self.counts = np.zeros(LOCAL_SLOTS, np.int64)
        self.state[2] = 0

    def add(self, codes: np.ndarray, _number: int = 0) -> None:
        """Count one block."""
        self.state[:2] = 0
        while not _count(codes, self.state, self.kinds, self.characters, self.ascii_pairs, self.keys, self.counts):
            self.flush()

    def flush(self) -> None:
        """Hand everything over."""
        self.total.add(self)
        self._clear()
