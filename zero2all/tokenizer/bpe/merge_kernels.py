"""The loops of merging. numba.

Words are in one flat array (`words`). A merged symbol keeps the places of the characters it covers: its number is at
the first and at the last of them. So the symbol to the right begins right after, the one to the left ends right before,
and merging touches three places however long the word is. `spans` says how many places a symbol covers;
`squeeze` moves everything together again, after which each symbol covers one.

Only pairs with at least `bound` occurrences are known at all: their count, and the places where they stood when they
were found, in rising order (postings). Counts only fall, and a new pair is no more frequent than the merge that made
its newer symbol, so a pair below the bound never comes back above it.
"""

import numpy as np
from numba import njit

from zero2all.tokenizer.bpe.bigrams import mixed
from zero2all.tokenizer.bpe.words import INSIDE, SEPARATOR

(
    NEXT_SYMBOL, MERGES, PAIRS, HEAP, POOL, LEFT_TO_GIVE,
    ADMITTED, CHARACTERS_END, CLOSED, BOUND, LAST_COUNT, MAX_BYTES,
) = range(12)  # fmt: skip
"""The state that the merge loop carries from call to call."""

PAUSED, ENOUGH, EXHAUSTED, NO_ROOM, NO_NUMBERS = range(5)
"""Why the merge loop came back: to show progress; the vocabulary is full; no pair reaches the bound; the postings or
the pairs are full; the symbols need larger numbers."""

BLOCK_SHIFT = 10
_HALF = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@njit(cache=True, nogil=True)
def squeeze(symbols, size, spans, run_starts):  # type: ignore[no-untyped-def]
    """Let every symbol take one place, and drop words of one symbol. Returns the new size."""
    write = 1
    read = 1
    run = 0
    runs = run_starts.size
    while read < size:
        while run < runs and run_starts[run] <= read:
            run_starts[run] = write
            run += 1
        start = write
        while symbols[read] != SEPARATOR:
            symbol = symbols[read]
            symbols[write] = symbol
            write += 1
            read += spans[symbol]
        read += 1
        if write - start == 1:
            write = start
        else:
            symbols[write] = SEPARATOR
            write += 1
    while run < runs:
        run_starts[run] = write
        run += 1
    symbols[write] = SEPARATOR
    return write


@njit(cache=True, nogil=True)
def sum_cells(symbols, first, end, run, run_starts, run_counts, cells):  # type: ignore[no-untyped-def]
    """Sum the counts of pairs in cells that several pairs share: no pair in a cell below T has T occurrences.

    Like `count_pairs`, for the squeezed words between two places, so that threads can share the work; `run` is the run
    of the first.
    """
    limit = run_starts[run + 1] if run + 1 < run_starts.size else end
    for place in range(first, end):
        while place >= limit and run + 1 < run_starts.size:
            run += 1
            limit = run_starts[run + 1] if run + 1 < run_starts.size else end
        left, right = symbols[place], symbols[place + 1]
        if left != SEPARATOR and right != SEPARATOR:
            key = np.uint64(left) << _HALF | np.uint64(right)
            cells[mixed(key) & np.uint64(cells.size - 1)] += run_counts[run]


@njit(cache=True, nogil=True)
def find_pair(table_keys, table_pairs, key):  # type: ignore[no-untyped-def]
    """The number of a pair, or -1. A table of pairs is open addressing over a power of two; key 0 is an empty slot."""
    mask = np.uint64(table_keys.size - 1)
    slot = mixed(key) & mask
    while table_keys[slot] != key:
        if table_keys[slot] == 0:
            return -1
        slot = (slot + _ONE) & mask
    return np.int64(table_pairs[slot])


@njit(cache=True, nogil=True)
def _enter_pair(table_keys, table_pairs, key, pair):  # type: ignore[no-untyped-def]
    mask = np.uint64(table_keys.size - 1)
    slot = mixed(key) & mask
    while table_keys[slot] != 0:
        slot = (slot + _ONE) & mask
    table_keys[slot] = key
    table_pairs[slot] = pair


@njit(cache=True, nogil=True)
def make_table(keys, count, slots):  # type: ignore[no-untyped-def]
    """A table over the first `count` keys."""
    table_keys = np.zeros(slots, np.uint64)
    table_pairs = np.empty(slots, np.int32)
    for pair in range(count):
        _enter_pair(table_keys, table_pairs, keys[pair], pair)
    return table_keys, table_pairs


@njit(cache=True, nogil=True)
def count_pairs(symbols, first, end, run, run_starts, run_counts, cells, threshold):  # type: ignore[no-untyped-def]
    """Exact counts and numbers of places of the pairs whose cell reaches the threshold. (squeezed words)"""
    slots = 1 << 14
    table_keys = np.zeros(slots, np.uint64)
    table_pairs = np.empty(slots, np.int32)
    keys = np.empty(slots // 2, np.uint64)
    counts = np.empty(slots // 2, np.int64)
    places = np.empty(slots // 2, np.int64)
    pairs = 0
    limit = run_starts[run + 1] if run + 1 < run_starts.size else end
    for place in range(first, end):
        while place >= limit and run + 1 < run_starts.size:
            run += 1
            limit = run_starts[run + 1] if run + 1 < run_starts.size else end
        left, right = symbols[place], symbols[place + 1]
        if left == SEPARATOR or right == SEPARATOR:
            continue
        key = np.uint64(left) << _HALF | np.uint64(right)
        value = mixed(key)
        if cells[value & np.uint64(cells.size - 1)] < threshold:
            continue
        slot = value & np.uint64(slots - 1)
        while table_keys[slot] != key and table_keys[slot] != 0:
            slot = (slot + _ONE) & np.uint64(slots - 1)
        if table_keys[slot] == key:
            pair = table_pairs[slot]
            counts[pair] += run_counts[run]
            places[pair] += 1
            continue
        if pairs == keys.size:
            slots *= 2
            more_keys = np.empty(slots // 2, np.uint64)
            more_counts = np.empty(slots // 2, np.int64)
            more_places = np.empty(slots // 2, np.int64)
            # Copying by slices would compile string handling for its error message: seconds.
            for known in range(pairs):
                more_keys[known], more_counts[known], more_places[known] = keys[known], counts[known], places[known]
            keys, counts, places = more_keys, more_counts, more_places
            table_keys, table_pairs = make_table(keys, pairs, slots)
        keys[pairs] = key
        counts[pairs] = run_counts[run]
        places[pairs] = 1
        _enter_pair(table_keys, table_pairs, key, pairs)
        pairs += 1
    return keys[:pairs], counts[:pairs], places[:pairs]


@njit(cache=True, nogil=True)
def cut_rare(symbols, size, run_starts, table_keys, table_pairs):  # type: ignore[no-untyped-def]
    """Part words between symbols whose pair is not in the table, dropping what is left alone. (squeezed words)

    Such a pair can never be merged, nor any later pair across the same border, which is no more frequent. Parting
    takes a separator; where dropping has not made room for one yet, the word stays whole. Returns the new size.
    """
    write = 1
    read = 1
    run = 0
    runs = run_starts.size
    while read < size:
        while run < runs and run_starts[run] <= read:
            run_starts[run] = write
            run += 1
        start = write
        last = symbols[read]
        symbols[write] = last
        write += 1
        read += 1
        while last != SEPARATOR:
            symbol = symbols[read]
            if symbol == SEPARATOR:
                if write - start == 1:
                    write = start
                else:
                    symbols[write] = SEPARATOR
                    write += 1
            else:
                key = np.uint64(last) << _HALF | np.uint64(symbol)
                if find_pair(table_keys, table_pairs, key) < 0:
                    if write - start == 1:
                        write = start
                    elif write < read:
                        symbols[write] = SEPARATOR
                        write += 1
                        start = write
                symbols[write] = symbol
                write += 1
            last = symbol
            read += 1
    while run < runs:
        run_starts[run] = write
        run += 1
    symbols[write] = SEPARATOR
    return write


@njit(cache=True, nogil=True)
def fill_postings(symbols, end, table_keys, table_pairs, cursors, pool):  # type: ignore[no-untyped-def]
    """Write the places of every pair in the table to where its cursor points. (squeezed words)"""
    for place in range(1, end):
        left, right = symbols[place], symbols[place + 1]
        if left != SEPARATOR and right != SEPARATOR:
            pair = find_pair(table_keys, table_pairs, np.uint64(left) << _HALF | np.uint64(right))
            if pair >= 0:
                pool[cursors[pair]] = place
                cursors[pair] += 1


@njit(cache=True, nogil=True)
def _before(count, key, other_count, other_key):  # type: ignore[no-untyped-def]
    """The order of merging: by falling count, then by left and right symbol."""
    return count > other_count or (count == other_count and key < other_key)


@njit(cache=True, nogil=True)
def push(heap_counts, heap_pairs, size, keys, count, pair):  # type: ignore[no-untyped-def]
    """Put a pair with this count on the heap; returns the new size."""
    at = size
    key = keys[pair]
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(count, key, heap_counts[parent], keys[heap_pairs[parent]]):
            break
        heap_counts[at] = heap_counts[parent]
        heap_pairs[at] = heap_pairs[parent]
        at = parent
    heap_counts[at] = count
    heap_pairs[at] = pair
    return size + 1


@njit(cache=True, nogil=True)
def _pop(heap_counts, heap_pairs, size, keys):  # type: ignore[no-untyped-def]
    """Take the first pair off the heap; returns the new size."""
    size -= 1
    count, pair = heap_counts[size], heap_pairs[size]
    key = keys[pair]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(
            heap_counts[child + 1], keys[heap_pairs[child + 1]], heap_counts[child], keys[heap_pairs[child]]
        ):
            child += 1
        if not _before(heap_counts[child], keys[heap_pairs[child]], count, key):
            break
        heap_counts[at] = heap_counts[child]
        heap_pairs[at] = heap_pairs[child]
        at = child
    heap_counts[at] = count
    heap_pairs[at] = pair
    return size


@njit(cache=True, nogil=True)
def fill_heap(heap_counts, heap_pairs, keys, counts, pairs):  # type: ignore[no-untyped-def]
    """All pairs on an empty heap."""
    size = 0
    for pair in range(pairs):
        size = push(heap_counts, heap_pairs, size, keys, counts[pair], pair)


@njit(cache=True, nogil=True)
def _run_at(place, run, run_starts, block_runs):  # type: ignore[no-untyped-def]
    """The run that a place belongs to; `run` is one at or before it."""
    run = max(run, np.int64(block_runs[place >> BLOCK_SHIFT]))
    while run + 1 < run_starts.size and run_starts[run + 1] <= place:
        run += 1
    return run


@njit(cache=True, nogil=True)
def merge(  # type: ignore[no-untyped-def]
    state, most, symbols, spans, lengths,
    run_starts, run_counts, block_runs,
    table_keys, table_pairs, keys, counts, starts, sizes, pool,
    heap_counts, heap_pairs,
    character_counts, character_costs,
    lost_left, lost_right, new_left, new_right, put_left, put_right, touched_left, touched_right,
    made_left, made_right, made_counts,
):  # fmt: skip
    """Make at most `most` merges, best pair first. Returns why it stopped.

    A character is admitted to the vocabulary when no pair is more frequent than it; its cost is itself and the UTF-8
    prefixes it is the first to need. A pair of which a part is not admitted (this happens only when the last one or
    two pieces cannot pay for the next character) is passed over.
    """
    bound = state[BOUND]
    heap = state[HEAP]
    for _ in range(most):
        # the most frequent pair whose count is not stale
        pair = np.int64(-1)
        best = np.int64(0)
        while heap > 0:
            best = heap_counts[0]
            pair = np.int64(heap_pairs[0])
            now = counts[pair]
            if now == best:
                break
            heap = _pop(heap_counts, heap_pairs, heap, keys)
            if now >= bound:
                heap = push(heap_counts, heap_pairs, heap, keys, now, pair)
            pair = np.int64(-1)
        if pair < 0:
            state[HEAP] = heap
            return EXHAUSTED
        while state[CLOSED] == 0 and state[ADMITTED] < character_counts.size:
            if character_counts[state[ADMITTED]] < best:
                break
            cost = character_costs[state[ADMITTED]]
            if cost > state[LEFT_TO_GIVE]:
                state[CLOSED] = 1
            else:
                state[LEFT_TO_GIVE] -= cost
                state[ADMITTED] += 1
        if state[LEFT_TO_GIVE] == 0:
            state[HEAP] = heap
            return ENOUGH
        new = state[NEXT_SYMBOL]
        if new >= spans.size or (symbols.itemsize == 2 and new > 65535):
            state[HEAP] = heap
            return NO_NUMBERS
        heap = _pop(heap_counts, heap_pairs, heap, keys)
        left = np.int64(keys[pair] >> _HALF)
        right = np.int64(keys[pair] & _LOW32)
        missing = state[CHARACTERS_END] - (character_counts.size - state[ADMITTED])
        if (missing <= left < state[CHARACTERS_END]) or (missing <= right < state[CHARACTERS_END]):
            continue

        left_span, right_span = np.int64(spans[left]), np.int64(spans[right])
        span = left_span + right_span
        spans[new] = span
        lengths[new] = lengths[left] + lengths[right]
        start = starts[pair]
        found = 0
        lefts = 0
        rights = 0
        run = 0
        for index in range(start, start + sizes[pair]):
            place = np.int64(pool[index])
            if symbols[place] != left or symbols[place + left_span] != right:
                continue
            run = _run_at(place, run, run_starts, block_runs)
            count = run_counts[run]
            before = np.int64(symbols[place - 1])
            after = np.int64(symbols[place + span])
            if before != SEPARATOR and before != new:
                if lost_left[before] == 0:
                    touched_left[lefts] = before
                    lefts += 1
                lost_left[before] += count
            if after != SEPARATOR:
                if lost_right[after] == 0:
                    touched_right[rights] = after
                    rights += 1
                lost_right[after] += count
            symbols[place] = new
            if right_span > 1:
                symbols[place + left_span] = INSIDE
            symbols[place + span - 1] = new
            pool[start + found] = place
            found += 1
        counts[pair] = 0
        for index in range(lefts):
            symbol = touched_left[index]
            other = find_pair(table_keys, table_pairs, np.uint64(symbol) << _HALF | np.uint64(left))
            if other >= 0 and other != pair:
                counts[other] -= lost_left[symbol]
            lost_left[symbol] = 0
        for index in range(rights):
            symbol = touched_right[index]
            other = find_pair(table_keys, table_pairs, np.uint64(right) << _HALF | np.uint64(symbol))
            if other >= 0 and other != pair:
                counts[other] -= lost_right[symbol]
            lost_right[symbol] = 0

        # the neighbours as they are now
        lefts = 0
        rights = 0
        run = 0
        for index in range(start, start + found):
            place = np.int64(pool[index])
            run = _run_at(place, run, run_starts, block_runs)
            count = run_counts[run]
            before = np.int64(symbols[place - 1])
            after = np.int64(symbols[place + span])
            if before != SEPARATOR and before != new:
                if new_left[before] == 0:
                    touched_left[lefts] = before
                    lefts += 1
                new_left[before] += count
                put_left[before] += 1
            if after != SEPARATOR:
                if new_right[after] == 0:
                    touched_right[rights] = after
                    rights += 1
                new_right[after] += count
                put_right[after] += 1
        enough_room = True
        pairs, filled = state[PAIRS], state[POOL]
        for side in range(2):
            totals = new_left if side == 0 else new_right
            put = put_left if side == 0 else put_right
            touched = touched_left if side == 0 else touched_right
            for index in range(lefts if side == 0 else rights):
                symbol = touched[index]
                places = put[symbol]
                put[symbol] = -1
                total = totals[symbol]
                totals[symbol] = 0
                too_long = state[MAX_BYTES] > 0 and lengths[new] + lengths[symbol] > state[MAX_BYTES]
                if total < bound or too_long or not enough_room:
                    continue
                if pairs == keys.size or filled + places > pool.size:
                    enough_room = False
                    continue
                key = (
                    np.uint64(symbol) << _HALF | np.uint64(new)
                    if side == 0
                    else (np.uint64(new) << _HALF | np.uint64(symbol))
                )
                keys[pairs] = key
                counts[pairs] = total
                starts[pairs] = filled
                sizes[pairs] = places
                put[symbol] = filled
                filled += places
                _enter_pair(table_keys, table_pairs, key, pairs)
                heap = push(heap_counts, heap_pairs, heap, keys, total, pairs)
                pairs += 1
        for index in range(start, start + found):
            place = np.int64(pool[index])
            before = np.int64(symbols[place - 1])
            after = np.int64(symbols[place + span])
            if before != SEPARATOR and before != new and put_left[before] >= 0:
                pool[put_left[before]] = place - np.int64(spans[before])
                put_left[before] += 1
            if after != SEPARATOR and put_right[after] >= 0:
                pool[put_right[after]] = place
                put_right[after] += 1
        for index in range(lefts):
            put_left[touched_left[index]] = 0
        for index in range(rights):
            put_right[touched_right[index]] = 0

        made_left[state[MERGES]] = left
        made_right[state[MERGES]] = right
        made_counts[state[MERGES]] = best
        state[LAST_COUNT] = best
        state[PAIRS], state[POOL] = pairs, filled
        state[MERGES] += 1
        state[NEXT_SYMBOL] += 1
        state[LEFT_TO_GIVE] -= 1
        if not enough_room:
            state[HEAP] = heap
            return NO_ROOM
    state[HEAP] = heap
    return PAUSED
