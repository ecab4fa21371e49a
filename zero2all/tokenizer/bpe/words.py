"""The distinct fragments as words of symbols, all in one flat array, ready for merging. numba.

    0 | word | 0 | word | 0 ...

Words of equal count are neighbours, so a count belongs to a run of words, not to each: a word takes only the memory of
its symbols (16 bits each, as long as there are fewer than 65,536) and one separator. Symbols are numbered in the order
of the vocabulary: ASCII characters, then the others by count and code point, then the merges as they are made. The
order does not depend on where text was cut, so ties are broken alike.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from zero2all.common.errors import UsageError
from zero2all.common.files import human_bytes
from zero2all.tokenizer.bpe.fragments import HEAD_WORDS, PARTS, Fragments, counts_at, record_places, words_of_record

SEPARATOR = 0
INSIDE = 1
FIRST_SYMBOL = 2
"""Symbols begin here: 0 separates words, 1 marks a place inside a merged symbol."""

LARGEST_COUNT = 1 << 20
"""Larger counts are treated as equal when the rarest fragments are left out."""

LARGEST_SHORT = np.iinfo(np.uint16).max


@dataclass
class Words:
    """The flat array and its runs of equal count."""

    symbols: np.ndarray
    size: int
    """Places of `symbols` in use."""
    run_starts: np.ndarray
    run_counts: np.ndarray
    unique: int
    """Distinct fragments, with those that were left out."""
    dropped: int

    def runs_at(self, places: np.ndarray | int) -> np.ndarray:
        """The run that each place belongs to."""
        return np.maximum(np.searchsorted(self.run_starts, places, side="right") - 1, 0)


def symbol_order(code_points: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Characters in the order of their symbols: ASCII by value, the others by falling count, then code point."""
    ascii_first = np.where(code_points < 128, code_points, 128)
    order = np.lexsort((code_points, np.where(code_points < 128, 0, -counts), ascii_first))
    return np.asarray(code_points[order])


def words_of(fragments: Fragments, ordered: np.ndarray, max_bytes: int | None, drop_below: int = 0) -> Words:
    """Turn the fragments into words, emptying their table. Those rarer than `drop_below` are left out and counted."""
    symbol_of = _symbol_of_rank(fragments.code.code_points, ordered)
    wide = ordered.size + FIRST_SYMBOL > LARGEST_SHORT
    dtype = np.uint32 if wide else np.uint16
    parts: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    size, unique, dropped = 1, 0, 0
    for number in range(PARTS):
        records = fragments.table(number)
        places = np.empty(records.size // (HEAD_WORDS + 1) + 1, np.uint32)
        places = places[: record_places(records, records.size, places)[0]]
        occurrences = counts_at(records, places)
        unique += places.size
        kept = np.flatnonzero(occurrences >= drop_below) if drop_below else np.arange(places.size)
        dropped += places.size - kept.size
        kept = kept[np.argsort(occurrences[kept], kind="stable")]
        part = np.empty(_symbols_in(records, places) + kept.size, dtype)
        word_starts = np.empty(kept.size, np.int64)
        used = _write(records, places[kept], symbol_of, part, word_starts)
        values, first = np.unique(occurrences[kept], return_index=True)
        parts.append(part[:used].copy() if used < part.size else part)
        starts.append(word_starts[first] + size)
        counts.append(values)
        size += used
        if max_bytes is not None and size * np.dtype(dtype).itemsize > max_bytes:
            raise _too_large(size * np.dtype(dtype).itemsize * PARTS // (number + 1), max_bytes)
        del records, places, occurrences, kept, part, word_starts
    starts.append(np.array([size], np.int64))
    counts.append(np.ones(1, np.int64))
    for ranks in fragments.long_symbols():
        unique += 1
        parts.append(np.append(symbol_of[ranks], np.uint32(SEPARATOR)).astype(dtype))
        size += ranks.size + 1
    return Words(_joined(parts, size, dtype), size, np.concatenate(starts), np.concatenate(counts), unique, dropped)


def rarest_that_fit(fragments: Fragments, ordered: np.ndarray, max_bytes: int) -> int:
    """The smallest count so that all fragments with at least that count fit as words; 0 when everything fits."""
    itemsize = 4 if ordered.size + FIRST_SYMBOL > LARGEST_SHORT else 2
    places_of_count = np.zeros(LARGEST_COUNT + 1, np.int64)
    for number in range(PARTS):
        records = fragments.table(number)
        _places_by_count(records, places_of_count)
        fragments.put_back(number, records)
    from_count = np.cumsum(places_of_count[::-1])[::-1] + fragments.long_bytes // 4
    fits = np.flatnonzero(from_count * itemsize <= max_bytes)
    lowest = int(fits[0]) if fits.size else LARGEST_COUNT
    return 0 if lowest <= 1 else lowest


def _too_large(needed: int, allowed: int) -> UsageError:
    return UsageError(
        "The memory limit is too small for an exact result: the distinct fragments of this text need about "
        f"{human_bytes(needed)} for merging, and {human_bytes(allowed)} are left for them. Raise --max-memory "
        f"by {human_bytes(1.5 * (needed - allowed))} or more, train on less text, or accept an approximate "
        "result with --approximate, which leaves out the rarest fragments."
    )


def _symbol_of_rank(by_rank: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    symbol = np.zeros(int(by_rank.max(initial=0)) + 1, np.uint32)
    symbol[ordered] = np.arange(FIRST_SYMBOL, FIRST_SYMBOL + ordered.size, dtype=np.uint32)
    return np.asarray(symbol[by_rank])


def _joined(parts: list[np.ndarray], size: int, dtype: type) -> np.ndarray:
    """One array, a separator before everything; each part is freed as soon as it is copied."""
    symbols: np.ndarray = np.empty(size + 1, dtype)
    symbols[0] = symbols[size] = SEPARATOR
    place = 1
    parts.reverse()
    while parts:
        part = parts.pop()
        symbols[place : place + part.size] = part
        place += part.size
    return symbols


@njit(cache=True, nogil=True)
def _symbols_at(records, place):  # type: ignore[no-untyped-def]
    """How many characters the record at this place has."""
    length = np.int64(records[place] & np.uint32(0xFFFF))
    at = 0
    symbols = 0
    while at < length:
        byte = records[place + HEAD_WORDS + (at >> 2)] >> np.uint32((at & 3) << 3)
        at += 1 if byte & np.uint32(1) == 0 else 2 if byte & np.uint32(2) == 0 else 3
        symbols += 1
    return symbols


@njit(cache=True, nogil=True)
def _places_by_count(records, places_of_count):  # type: ignore[no-untyped-def]
    """Add, per count, how many places the words of these records take."""
    place = np.int64(0)
    while place < records.size:
        count = np.int64(records[place] >> np.uint32(16)) << 32 | np.int64(records[place + 1])
        places_of_count[min(count, places_of_count.size - 1)] += _symbols_at(records, place) + 1
        place += HEAD_WORDS + words_of_record(records[place])


@njit(cache=True, nogil=True)
def _symbols_in(records, places):  # type: ignore[no-untyped-def]
    """How many characters these records have together."""
    total = 0
    for index in range(places.size):
        total += _symbols_at(records, np.int64(places[index]))
    return total


@njit(cache=True, nogil=True)
def _write(records, places, symbol_of, out, starts):  # type: ignore[no-untyped-def]
    """Write the records as words, a separator behind each; returns the places taken."""
    put = 0
    for index in range(places.size):
        starts[index] = put
        start = np.int64(places[index])
        length = np.int64(records[start] & np.uint32(0xFFFF))
        word = start + HEAD_WORDS
        held = np.uint64(0)
        bits = np.uint64(0)
        at = 0
        while at < length:
            if bits < np.uint64(24) and word < start + HEAD_WORDS + ((length + 3) >> 2):
                held |= np.uint64(records[word]) << bits
                bits += np.uint64(32)
                word += 1
            if held & np.uint64(1) == 0:
                rank = (held & np.uint64(0xFF)) >> np.uint64(1)
                taken = 1
            elif held & np.uint64(2) == 0:
                rank = ((held & np.uint64(0xFFFF)) >> np.uint64(2)) + np.uint64(128)
                taken = 2
            else:
                rank = ((held & np.uint64(0xFFFFFF)) >> np.uint64(2)) + np.uint64(128 + (1 << 14))
                taken = 3
            held >>= np.uint64(8 * taken)
            bits -= np.uint64(8 * taken)
            at += taken
            out[put] = symbol_of[rank]
            put += 1
        out[put] = SEPARATOR
        put += 1
    return put
