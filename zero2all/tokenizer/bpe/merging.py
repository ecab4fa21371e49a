"""The merge loop: from words of characters to the list of merges, best pair first.

The loop works on what `arrange` has laid out: the pairs with at least `bound` occurrences and the places where they
stand. When no pair reaches the bound, or the room for places is used up, everything is laid out again from the words as
they are by then: fewer and shorter, since a border that nothing can be merged across any more parts a word. The bound
is never below T, the threshold of the cut, and above it only where the places of all pairs would not fit into memory.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from zero2all.common.progress import Bar
from zero2all.tokenizer.bpe import merge_kernels as kernels
from zero2all.tokenizer.bpe.words import FIRST_SYMBOL, SEPARATOR, Words

MERGES_PER_CALL = 500
SHARED_PLACES = 1 << 16
"""Fewer are not worth a second thread."""
SMALLEST_POOL = 1 << 16
COMFORTABLE_POOL = 1 << 22
"""Room for this many places is always worth its memory; more costs more than laying out anew a few times."""

T = TypeVar("T")


@dataclass(frozen=True)
class Alphabet:
    """The characters that may become pieces, in the order of their symbols."""

    ordered: np.ndarray
    """Code points: ASCII first, then the others by falling count."""
    counts: np.ndarray
    """Occurrences of those that are not ASCII."""
    costs: np.ndarray
    """Places in the vocabulary that each of those takes when admitted in this order: its own, and those of UTF-8
    prefixes that are not there yet."""
    lengths: np.ndarray
    """UTF-8 bytes of every character."""


@dataclass
class Merged:
    """What the loop found: symbols are numbered from `FIRST_SYMBOL`, characters first, then the merges."""

    lefts: np.ndarray
    rights: np.ndarray
    counts: np.ndarray
    admitted: int
    """How many characters that are not ASCII are in the vocabulary."""
    short_of: int
    """Places of the vocabulary that could not be filled."""


class MergeLoop:
    """Fills `to_give` places of the vocabulary with characters and merges of at least `threshold` occurrences."""

    def __init__(
        self, words: Words, alphabet: Alphabet, to_give: int, threshold: int, max_piece_bytes: int | None
    ) -> None:
        self.words, self.alphabet, self.threshold = words, alphabet, threshold
        self.pool_bytes: int | None = None
        self.threads = 1
        characters = alphabet.ordered.size
        numbers = FIRST_SYMBOL + characters + to_give
        self.spans = np.ones(numbers, np.int32)
        self.lengths = np.zeros(numbers, np.int32)
        self.lengths[FIRST_SYMBOL : FIRST_SYMBOL + characters] = alphabet.lengths
        self.made_left, self.made_right = np.empty(to_give, np.int32), np.empty(to_give, np.int32)
        self.made_counts = np.empty(to_give, np.int64)
        self.per_symbol = [np.zeros(numbers, np.int64) for _ in range(6)]
        self.touched = [np.empty(numbers, np.int32) for _ in range(2)]
        self.arrangements = 0
        self.state = np.zeros(12, np.int64)
        self.state[kernels.NEXT_SYMBOL] = self.state[kernels.CHARACTERS_END] = FIRST_SYMBOL + characters
        self.state[kernels.LEFT_TO_GIVE] = to_give
        self.state[kernels.MAX_BYTES] = max_piece_bytes or 0

    def run(self, bar: Bar, threads: int, pool_bytes: int | None) -> Merged:
        """Merge until the vocabulary is full or no pair is left, with `pool_bytes` for the places of pairs."""
        self.pool_bytes, self.threads = pool_bytes, threads if self.words.size > SHARED_PLACES else 1
        self._arrange()
        left = int(self.state[kernels.LEFT_TO_GIVE])
        while left:
            reason = self._merge()
            now = int(self.state[kernels.LEFT_TO_GIVE])
            bar.advance(left - now, note=f"best pair {int(self.state[kernels.LAST_COUNT]):,} times")
            left = now
            if reason == kernels.ENOUGH:
                break
            if reason == kernels.NO_NUMBERS:
                self.words.symbols = self.words.symbols.astype(np.uint32)
            elif reason == kernels.NO_ROOM or (reason == kernels.EXHAUSTED and self.bound > self.threshold):
                self._arrange()
            elif reason == kernels.EXHAUSTED:
                self._admit_rest()
                bar.advance(left - int(self.state[kernels.LEFT_TO_GIVE]))
                break
        merges = int(self.state[kernels.MERGES])
        return Merged(
            self.made_left[:merges],
            self.made_right[:merges],
            self.made_counts[:merges],
            int(self.state[kernels.ADMITTED]),
            int(self.state[kernels.LEFT_TO_GIVE]),
        )

    def _arrange(self) -> None:
        """Lay out words, pairs and places anew."""
        self.arrangements += 1
        words = self.words
        self.pool = np.empty(0, np.uint32)  # free the old one first
        words.size = kernels.squeeze(words.symbols, words.size, self.spans, words.run_starts)
        self.spans[:] = 1
        keys, counts, places = self._count_pairs()
        frequent = counts >= self.threshold
        keys, counts, places = keys[frequent], counts[frequent], places[frequent]
        table = kernels.make_table(keys, keys.size, _slots(keys.size))
        words.size = kernels.cut_rare(words.symbols, words.size, words.run_starts, *table)
        self._choose_bound(keys, counts, places)
        blocks = np.arange((words.size >> kernels.BLOCK_SHIFT) + 1, dtype=np.int64) << kernels.BLOCK_SHIFT
        self.block_runs = words.runs_at(blocks).astype(np.int32)

    def _count_pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs that may reach the threshold, with their counts and numbers of places."""
        words = self.words
        # Words that were just cut have frequent pairs only; later a coarse count keeps most rare ones out of the table.
        cells = np.full(1, np.iinfo(np.int64).max)
        if self.arrangements > 1:

            def coarse(first: int, end: int) -> np.ndarray:
                sums: np.ndarray = np.zeros(_cells(words.size), np.int64)
                run = int(words.runs_at(first))
                kernels.sum_cells(words.symbols, first, end, run, words.run_starts, words.run_counts, sums)
                return sums

            cells = np.sum(self._in_threads(coarse), axis=0)

        def exact(first: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            run = int(words.runs_at(first))
            return kernels.count_pairs(
                words.symbols, first, end, run, words.run_starts, words.run_counts, cells, self.threshold
            )

        found = self._in_threads(exact)
        if len(found) == 1:
            return found[0]
        keys, pair_of = np.unique(np.concatenate([part[0] for part in found]), return_inverse=True)
        counts, places = np.zeros(keys.size, np.int64), np.zeros(keys.size, np.int64)
        np.add.at(counts, pair_of, np.concatenate([part[1] for part in found]))
        np.add.at(places, pair_of, np.concatenate([part[2] for part in found]))
        return keys, counts, places

    def _in_threads(self, work: Callable[[int, int], T]) -> list[T]:
        """Call `work` for ranges of whole words, one per thread."""
        symbols, size = self.words.symbols, self.words.size
        borders = [1]
        for number in range(1, self.threads):
            place = max(borders[-1], size * number // self.threads)
            while place < size and symbols[place] != SEPARATOR:
                place += 1
            borders.append(place)
        ranges = [(start, end) for start, end in pairwise([*borders, size]) if start < end] or [(1, size)]
        if len(ranges) == 1:
            return [work(*ranges[0])]
        with ThreadPoolExecutor(len(ranges)) as pool:
            return list(pool.map(lambda each: work(*each), ranges))

    def _choose_bound(self, keys: np.ndarray, counts: np.ndarray, places: np.ndarray) -> None:
        """Keep the most frequent pairs, as many as fill three quarters of the room, and at least those of one count."""
        order = np.lexsort((keys, -counts))
        keys, counts, places = keys[order], counts[order], places[order]
        if self.state[kernels.MAX_BYTES]:
            lengths = self.lengths[keys >> np.uint64(32)] + self.lengths[keys & np.uint64(0xFFFFFFFF)]
            short = lengths <= self.state[kernels.MAX_BYTES]
            keys, counts, places = keys[short], counts[short], places[short]
        filled = np.cumsum(places)
        total = int(filled[-1]) if filled.size else 0
        dtype = np.uint32 if self.words.size < 1 << 32 else np.int64
        room = min(total + total // 3 + SMALLEST_POOL, max(total // 2, COMFORTABLE_POOL))
        if self.pool_bytes is not None:
            room = min(room, max(self.pool_bytes // np.dtype(dtype).itemsize, SMALLEST_POOL))
        self.bound = self.threshold
        kept = keys.size
        if total > room * 3 // 4:
            fit = max(1, int(np.searchsorted(filled, room * 3 // 4, side="right")))
            self.bound = max(self.threshold, int(counts[fit - 1]))
            kept = int(np.searchsorted(-counts, -self.bound, side="right"))
            room = max(room, int(filled[kept - 1]) * 4 // 3)
        # Most merges find two or three new pairs above the bound.
        capacity = kept + 4 * int(self.state[kernels.LEFT_TO_GIVE]) + 1024
        self.keys = _grown(keys[:kept], capacity, np.uint64)
        self.counts = _grown(counts[:kept], capacity, np.int64)
        self.sizes = _grown(places[:kept], capacity, np.int64)
        self.starts = np.zeros(capacity, np.int64)
        self.starts[1:kept] = filled[: kept - 1] if kept > 1 else 0
        self.pool = np.empty(room, dtype)
        self.table = kernels.make_table(self.keys, kept, _slots(capacity))
        # In a single thread, which writes the places in rising order.
        symbols, cursors = self.words.symbols, self.starts[:kept].copy()
        kernels.fill_postings(symbols, self.words.size, self.table[0], self.table[1], cursors, self.pool)
        self.heap_counts, self.heap_pairs = np.empty(capacity, np.int64), np.empty(capacity, np.int32)
        kernels.fill_heap(self.heap_counts, self.heap_pairs, self.keys, self.counts, kept)
        self.state[kernels.PAIRS] = self.state[kernels.HEAP] = kept
        self.state[kernels.POOL] = int(filled[kept - 1]) if kept else 0
        self.state[kernels.BOUND] = self.bound

    def _merge(self) -> int:
        reason: int = kernels.merge(  # type: ignore[call-arg]
            *(self.state, MERGES_PER_CALL, self.words.symbols, self.spans, self.lengths),
            *(self.words.run_starts, self.words.run_counts, self.block_runs),
            *(*self.table, self.keys, self.counts, self.starts, self.sizes, self.pool),
            *(self.heap_counts, self.heap_pairs),
            *(self.alphabet.counts, self.alphabet.costs),
            *(*self.per_symbol, *self.touched),
            *(self.made_left, self.made_right, self.made_counts),
        )
        return reason

    def _admit_rest(self) -> None:
        """No pair is left: characters with T occurrences come next, in their order, as far as they fit."""
        state, alphabet = self.state, self.alphabet
        while state[kernels.ADMITTED] < alphabet.counts.size and not state[kernels.CLOSED]:
            place = state[kernels.ADMITTED]
            if alphabet.counts[place] < self.threshold or alphabet.costs[place] > state[kernels.LEFT_TO_GIVE]:
                return
            state[kernels.LEFT_TO_GIVE] -= alphabet.costs[place]
            state[kernels.ADMITTED] += 1


def _cells(places: int) -> int:
    """Cells for a first, coarse count of pairs: a power of two, at most 16 MB."""
    return 1 << min(21, max(10, (places // 8).bit_length()))


def _slots(entries: int) -> int:
    """Slots of a hash table that is at most half full: a power of two."""
    return 1 << max(4, (2 * entries).bit_length())


def _grown(array: np.ndarray, capacity: int, dtype: type) -> np.ndarray:
    grown: np.ndarray = np.empty(capacity, dtype)
    grown[: array.size] = array
    return grown
