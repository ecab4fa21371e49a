"""Pass 2: the distinct fragments between cuts, and how often each occurs. numba.

A fragment is two or more characters in a row inside a pretoken with no cut between them. A single character has no pair
to merge and is not kept. In memory a fragment is a record of 32-bit words in an arena:

    length in bytes (16 bits), upper 16 bits of the count; lower 32 bits of the count; the characters

with frequent characters in one byte, most others in two, so that Chinese needs less than its UTF-8. Slots of a hash
table (26 bits of place in the arena, 6 bits of the hash) find the record: about 26 bytes per distinct fragment.

Every worker has a small table that stays in the processor's cache. When it is full, its records go, by their hash, to
one of 64 parts of the one big table. So memory is one table for any number of threads, and the sums do not depend on
which thread counted what. A part that outgrows its share of the memory is appended to a file and starts anew; in the
end, the records of its file are summed up again, one part at a time, which gives the same counts.

Fragments longer than `LONGEST_BYTES` (a line of a hundred megabytes without a space) go to a file of their own, each
with count 1: two equal words do not disturb the merge loop.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from zero2all.tokenizer.bpe.bigrams import PairFilter, are_joined
from zero2all.tokenizer.bpe.scan import BREAK, CODE_POINTS, character_kinds, pretoken_end

PARTS = 64
PART_BITS = 6
HEAD_WORDS = 2
LONGEST_WORDS = 4096
LONGEST_BYTES = 4 * LONGEST_WORDS
LOCAL_SLOTS = 1 << 17
LOCAL_LIMIT = LOCAL_SLOTS * 65 // 100
LOCAL_WORDS = 1 << 20
FULLEST = 0.75
FIRST_SLOTS = 1 << 8
FIRST_WORDS = 1 << 10
ARENA_WORDS = 1 << 26
READ_WORDS = 1 << 20

AT, END, ENTRIES, WORDS, FIRST = range(5)
"""State of a worker's scan: place in the block, end of the pretoken there, records and words of the local table, and,
after a long fragment, where it began."""
FINISHED, FULL, LONG = range(3)
"""Why the scan came back."""

_HALF = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_PLACE = np.uint32((1 << 26) - 1)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX2 = np.uint64(0xD6E8FEB86659FD93)


@njit(cache=True, nogil=True)
def _hash(arena, start, words, length):  # type: ignore[no-untyped-def]
    value = np.uint64(length) * _MIX2
    for place in range(start, start + words):
        value = (value ^ np.uint64(arena[place])) * _MIX
        value ^= value >> np.uint64(29)
    value *= _MIX2
    return value ^ (value >> _HALF)


@njit(cache=True, nogil=True)
def _find(slots, arena, source, start, words, length, value):  # type: ignore[no-untyped-def]
    """The slot of the record whose characters are at source[start:], or the empty one where it belongs."""
    size = np.uint64(slots.size)
    slot = np.int64((value & _LOW32) * size >> _HALF)
    tag = np.uint32(value >> _HALF) >> np.uint32(PART_BITS) & np.uint32(63)
    while slots[slot]:
        if slots[slot] >> np.uint32(26) == tag:
            record = np.int64(slots[slot] & _PLACE)
            if arena[record] & np.uint32(0xFFFF) == length:
                same = True
                for offset in range(words):
                    if arena[record + HEAD_WORDS + offset] != source[start + offset]:
                        same = False
                        break
                if same:
                    return slot
        slot += 1
        if slot == slots.size:
            slot = np.int64(0)
    return slot


@njit(cache=True, nogil=True)
def _slot_value(place, value):  # type: ignore[no-untyped-def]
    tag = np.uint32(value >> _HALF) >> np.uint32(PART_BITS) & np.uint32(63)
    return np.uint32(place) | tag << np.uint32(26)


@njit(cache=True, nogil=True)
def _raise_count(arena, record, low, high):  # type: ignore[no-untyped-def]
    """Add a 48-bit count to a record's."""
    total = np.uint64(arena[record + 1]) + np.uint64(low)
    arena[record + 1] = np.uint32(total & _LOW32)
    arena[record] += np.uint32(np.uint64(high) + (total >> _HALF)) << np.uint32(16)


@njit(cache=True, nogil=True)
def _scan(codes, state, kinds, encoded, ascii_joined, filter_rows, mask, slots, arena):  # type: ignore[no-untyped-def]
    """Count fragments from state[AT] on, until the block ends, the local table is full or a long one turns up."""
    at, end, entries, used = state[AT], state[END], state[ENTRIES], state[WORDS]
    reason = FINISHED
    while at < codes.size:
        if at == end:
            if kinds[codes[at]] == BREAK:
                at += 1
                end = at
                continue
            end = pretoken_end(codes, at, kinds)
        first = at
        value = encoded[codes[at]]
        at += 1
        if at == end or value == 0 or encoded[codes[at]] == 0:
            continue
        if not are_joined(codes[at - 1], codes[at], ascii_joined, filter_rows, mask):
            continue
        if entries >= LOCAL_LIMIT or used + HEAD_WORDS + LONGEST_WORDS + 2 > arena.size:
            at = first
            reason = FULL
            break
        # The characters are written where the record will be if the fragment is new.
        start = used + HEAD_WORDS
        word = start
        waiting = np.uint64(value & np.uint32(0xFFFFFF))
        bits = np.uint64(value >> np.uint32(24)) << np.uint64(3)
        while True:
            value = encoded[codes[at]]
            waiting |= np.uint64(value & np.uint32(0xFFFFFF)) << bits
            bits += np.uint64(value >> np.uint32(24)) << np.uint64(3)
            if bits >= _HALF:
                arena[word] = np.uint32(waiting & _LOW32)
                if word < start + LONGEST_WORDS:
                    word += 1
                waiting >>= _HALF
                bits -= _HALF
            at += 1
            if at == end or encoded[codes[at]] == 0:
                break
            if not are_joined(codes[at - 1], codes[at], ascii_joined, filter_rows, mask):
                break
        if word >= start + LONGEST_WORDS:
            state[FIRST] = first
            reason = LONG
            break
        length = (word - start) * 4 + np.int64(bits >> np.uint64(3))
        if bits:
            arena[word] = np.uint32(waiting)
            word += 1
        value64 = _hash(arena, start, word - start, length)
        slot = _find(slots, arena, arena, start, word - start, length, value64)
        if slots[slot]:
            _raise_count(arena, np.int64(slots[slot] & _PLACE), np.uint32(1), np.uint32(0))
        else:
            slots[slot] = _slot_value(used, value64)
            arena[used] = np.uint32(length)
            arena[used + 1] = np.uint32(1)
            used = word
            entries += 1
    state[AT], state[END], state[ENTRIES], state[WORDS] = at, end, entries, used
    return reason


@njit(cache=True, nogil=True)
def words_of_record(head):  # type: ignore[no-untyped-def]
    """How many words the characters of a record take."""
    return np.int64(((head & np.uint32(0xFFFF)) + np.uint32(3)) >> np.uint32(2))


@njit(cache=True, nogil=True)
def _route(arena, used, records, ends, words):  # type: ignore[no-untyped-def]
    """Sort the records of a local table by part: records[ends[p]:ends[p + 1]] are their places; words[p] their size."""
    for index in range(PARTS):
        ends[index] = words[index] = 0
    ends[PARTS] = 0
    place = 1
    while place < used:
        size = words_of_record(arena[place])
        part = np.int64(_hash(arena, place + HEAD_WORDS, size, arena[place] & np.uint32(0xFFFF)) >> np.uint64(58))
        ends[part + 1] += 1
        words[part] += HEAD_WORDS + size
        place += HEAD_WORDS + size
    for index in range(PARTS):
        ends[index + 1] += ends[index]
    put = np.empty(PARTS, np.int64)
    for index in range(PARTS):
        put[index] = ends[index]
    place = 1
    while place < used:
        size = words_of_record(arena[place])
        part = np.int64(_hash(arena, place + HEAD_WORDS, size, arena[place] & np.uint32(0xFFFF)) >> np.uint64(58))
        records[put[part]] = place
        put[part] += 1
        place += HEAD_WORDS + size


@njit(cache=True, nogil=True)
def _absorb(source, records, slots, arena, used):  # type: ignore[no-untyped-def]
    """Add the records at these places of `source` to a table that has room; its new size in words, and new records."""
    new = 0
    for index in range(records.size):
        place = np.int64(records[index])
        head = source[place]
        size = words_of_record(head)
        length = np.int64(head & np.uint32(0xFFFF))
        value = _hash(source, place + HEAD_WORDS, size, length)
        slot = _find(slots, arena, source, place + HEAD_WORDS, size, length, value)
        if slots[slot]:
            _raise_count(arena, np.int64(slots[slot] & _PLACE), source[place + 1], head >> np.uint32(16))
        else:
            slots[slot] = _slot_value(used, value)
            for offset in range(HEAD_WORDS + size):
                arena[used + offset] = source[place + offset]
            used += HEAD_WORDS + size
            new += 1
    return used, new


@njit(cache=True, nogil=True)
def _fill_slots(slots, arena, used):  # type: ignore[no-untyped-def]
    """Enter all records of an arena, known to be distinct, into empty slots."""
    place = 1
    while place < used:
        size = words_of_record(arena[place])
        value = _hash(arena, place + HEAD_WORDS, size, arena[place] & np.uint32(0xFFFF))
        slot = np.int64((value & _LOW32) * np.uint64(slots.size) >> _HALF)
        while slots[slot]:
            slot += 1
            if slot == slots.size:
                slot = np.int64(0)
        slots[slot] = _slot_value(place, value)
        place += HEAD_WORDS + size


@njit(cache=True, nogil=True)
def record_places(arena, used, places):  # type: ignore[no-untyped-def]
    """The places of the records in words[:used], which begin at 0; stops before one that is cut off. (number, end)"""
    count = 0
    place = 0
    while place + HEAD_WORDS <= used and count < places.size:
        size = words_of_record(arena[place])
        if place + HEAD_WORDS + size > used:
            break
        places[count] = place
        count += 1
        place += HEAD_WORDS + size
    return count, place


class CharacterCode:
    """How characters are written inside records: by rank, the most frequent ones in one byte.

    The lowest bits of the first byte tell the length, as in UTF-8: 0 one byte, 01 two, 11 three. `encoded` holds, per
    code point, the bytes and in its upper 8 bits their number; 0 for a character that is not a symbol.
    """

    def __init__(self, code_points: np.ndarray, counts: np.ndarray) -> None:
        by_rank = code_points[np.lexsort((code_points, -counts))]
        self.code_points = by_rank
        rank = np.arange(by_rank.size, dtype=np.uint32)
        assert by_rank.size <= 128 + (1 << 14) + (1 << 22), "Unicode has fewer characters"
        far = 128 + (1 << 14)
        one, two, three = rank << 1 | 1 << 24, (rank - 128) << 2 | 1 | 2 << 24, (rank - far) << 2 | 3 | 3 << 24
        self.encoded = np.zeros(CODE_POINTS, np.uint32)
        self.encoded[by_rank] = np.select([rank < 128, rank < far], [one, two], three)

    def ranks(self, codes: np.ndarray) -> np.ndarray:
        """The ranks of these characters."""
        rank_of = np.zeros(CODE_POINTS, np.uint32)
        rank_of[self.code_points] = np.arange(self.code_points.size)
        return rank_of[codes]


class _Part:
    """One of the parts of the big table."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.slots = np.zeros(FIRST_SLOTS, np.uint32)
        self.arena = np.empty(FIRST_WORDS, np.uint32)
        self.used = 1  # place 0 means an empty slot
        self.entries = 0

    def bytes_with(self, entries: int, words: int) -> int:
        return 4 * self._slots_for(self.entries + entries) + 4 * (self.used + words)

    def add(self, source: np.ndarray, records: np.ndarray, words: int) -> None:
        assert self.used + words <= ARENA_WORDS, "64 parts of 256 MB of distinct fragments are more than any text has"
        if self.used + words > self.arena.size:
            # An array that numpy does not fill takes memory only where it is written: room to spare costs nothing.
            arena = np.empty(max(self.used + words, int(1.3 * self.arena.size)), np.uint32)
            arena[: self.used] = self.arena[: self.used]
            self.arena = arena
        slots = self._slots_for(self.entries + records.size)
        if slots > self.slots.size:
            self.slots = np.zeros(slots, np.uint32)
            _fill_slots(self.slots, self.arena, self.used)
        self.used, new = _absorb(source, records, self.slots, self.arena, self.used)
        self.entries += new

    def restore(self, words: np.ndarray) -> None:
        self.arena = np.concatenate([np.zeros(1, np.uint32), words])
        self.used = self.arena.size
        places = np.empty(words.size // (HEAD_WORDS + 1) + 1, np.uint32)
        self.entries = record_places(words, words.size, places)[0]
        self.slots = np.zeros(self._slots_for(self.entries), np.uint32)
        _fill_slots(self.slots, self.arena, self.used)

    def _slots_for(self, entries: int) -> int:
        """How many slots the table needs for this many records: it grows by a third at a time."""
        slots = int(self.slots.size)
        while entries > FULLEST * slots:
            slots = int(slots * 1.33)
        return slots


class Fragments:
    """The fragments of all text; `worker()` gives each thread its own small table."""

    def __init__(self, code: CharacterCode, pairs: PairFilter, scratch: Path, max_bytes: int | None) -> None:
        self.code, self.pairs, self.scratch = code, pairs, scratch
        self.part_limit = ARENA_WORDS * 4 if max_bytes is None else min(ARENA_WORDS * 4, max_bytes // PARTS)
        self.parts = [_Part() for _ in range(PARTS)]
        self.spilled = [0] * PARTS
        self.spills = 0
        self.workers = 0
        self.long_bytes = 0
        self.long_fragments = 0
        self.long_lock = threading.Lock()
        scratch.mkdir(parents=True, exist_ok=True)

    def worker(self) -> FragmentWorker:
        """A counter for one thread."""
        return FragmentWorker(self)

    def spilled_bytes(self) -> int:
        """Bytes of records on disk."""
        return sum(self.spilled)

    def take(self, worker: FragmentWorker) -> None:
        """Add what a worker has counted."""
        used = int(worker.state[WORDS])
        records = np.empty(int(worker.state[ENTRIES]), np.uint32)
        ends, words = np.empty(PARTS + 1, np.int64), np.empty(PARTS, np.int64)
        _route(worker.arena, used, records, ends, words)
        for step in range(PARTS):
            number = (step + worker.first_part) % PARTS
            chosen = records[ends[number] : ends[number + 1]]
            if chosen.size == 0:
                continue
            part = self.parts[number]
            with part.lock:
                if part.bytes_with(chosen.size, int(words[number])) > self.part_limit and part.used > 1:
                    self._spill(number)
                part.add(worker.arena, chosen, int(words[number]))

    def take_long(self, symbols: np.ndarray) -> None:
        """Keep one long fragment, given as ranks of characters."""
        with self.long_lock, open(self.scratch / "long.pieces", "ab") as file:
            head = np.array([symbols.size], np.int64)
            file.write(head.tobytes())
            file.write(symbols.tobytes())
            self.long_bytes += 8 + symbols.nbytes
            self.long_fragments += 1

    def long_symbols(self) -> Iterator[np.ndarray]:
        """The long fragments, as ranks of characters."""
        if self.long_fragments == 0:
            return
        with open(self.scratch / "long.pieces", "rb") as file:
            for _ in range(self.long_fragments):
                size = int(np.frombuffer(file.read(8), np.int64)[0])
                yield np.frombuffer(file.read(4 * size), np.uint32)

    def _spill(self, number: int) -> None:
        part = self.parts[number]
        with open(self.scratch / f"part-{number:02d}.pieces", "ab") as file:
            part.arena[1 : part.used].tofile(file)
        self.spilled[number] += 4 * (part.used - 1)
        self.spills += 1
        part.clear()

    def table(self, number: int) -> np.ndarray:
        """All records of one part, those on disk summed up with those in memory; afterwards the part is empty."""
        part = self.parts[number]
        if self.spilled[number]:
            path = self.scratch / f"part-{number:02d}.pieces"
            with open(path, "rb") as file:
                rest = np.empty(0, np.uint32)
                places = np.empty(READ_WORDS, np.uint32)
                left = self.spilled[number]
                while left:
                    data = file.read(min(left, 4 * READ_WORDS))
                    left -= len(data)
                    block = np.concatenate([rest, np.frombuffer(data, np.uint32)])
                    count, end = record_places(block, block.size, places)
                    part.add(block, places[:count], end)
                    rest = block[end:]
        records: np.ndarray = part.arena[1 : part.used]
        part.clear()
        return records

    def counts(self) -> np.ndarray:
        """The counts of all fragments in memory, in no particular order."""
        found = []
        for part in self.parts:
            records = part.arena[1 : part.used]
            places = np.empty(part.entries, np.uint32)
            record_places(records, records.size, places)
            found.append(counts_at(records, places))
        return np.concatenate(found)

    def put_back(self, number: int, records: np.ndarray) -> None:
        """Keep what `table` gave on disk, to be given once more."""
        with open(self.scratch / f"part-{number:02d}.pieces", "wb") as file:
            records.tofile(file)
        self.spilled[number] = records.nbytes

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the table into `folder`; the spilled files stay where they are, as long as they are now."""
        with open(folder / "tables.pieces", "wb") as file:
            for part in self.parts:
                part.arena[1 : part.used].tofile(file)
        return {
            "words": [part.used - 1 for part in self.parts],
            "spilled": self.spilled,
            "spills": self.spills,
            "long_bytes": self.long_bytes,
            "long_pieces": self.long_fragments,
        }

    def load(self, folder: Path, facts: dict[str, Any]) -> None:
        """Continue from what `save` wrote; what was spilled later is cut off again."""
        with open(folder / "tables.pieces", "rb") as file:
            for part, words in zip(self.parts, facts["words"], strict=True):
                part.restore(np.frombuffer(file.read(4 * words), np.uint32))
        self.spilled, self.spills = facts["spilled"], facts["spills"]
        self.long_bytes, self.long_fragments = facts["long_bytes"], facts["long_pieces"]
        self.cut_files()

    def cut_files(self) -> None:
        """Bring the files on disk to the sizes that are known, which may be 0."""
        names = [f"part-{number:02d}.pieces" for number in range(PARTS)]
        for name, size in zip([*names, "long.pieces"], [*self.spilled, self.long_bytes], strict=True):
            path = self.scratch / name
            if size == 0:
                path.unlink(missing_ok=True)
            else:
                with open(path, "rb+") as file:
                    file.truncate(size)


class FragmentWorker:
    """One thread's fragments."""

    def __init__(self, total: Fragments) -> None:
        self.total = total
        self.kinds = character_kinds()
        self.state = np.zeros(5, np.int64)
        self.slots = np.zeros(LOCAL_SLOTS, np.uint32)
        self.arena = np.empty(LOCAL_WORDS, np.uint32)
        total.workers += 1
        self.first_part = total.workers * 23 % PARTS  # workers hand over from different parts on, and seldom meet
        self.state[WORDS] = 1

    def add(self, codes: np.ndarray, _number: int = 0) -> None:
        """Count one block."""
        pairs = self.total.pairs
        encoded = self.total.code.encoded
        self.state[AT] = self.state[END] = 0
        while True:
            reason = _scan(
                *(codes, self.state, self.kinds, encoded),
                *(pairs.ascii_joined, pairs.rows, pairs.mask, self.slots, self.arena),
            )
            if reason == FINISHED:
                return
            if reason == FULL:
                self.flush()
            else:
                self.total.take_long(self.total.code.ranks(codes[self.state[FIRST] : self.state[AT]]))

    def flush(self) -> None:
        """Hand everything over."""
        self.total.take(self)
        self.slots[:] = 0
        self.state[ENTRIES], self.state[WORDS] = 0, 1


def counts_at(records: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The counts of the records at these places."""
    high: np.ndarray = (records[places] >> np.uint32(16)).astype(np.int64) << 32
    return high | records[places + np.uint32(1)]
