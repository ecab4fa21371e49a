"""The compiled loops of our own encoder (numba; import this module only where it runs).

Exact by construction. A pretoken's symbols are merged lowest rank first, leftmost first among equals, which is what
`tokenizers` does. Three things make it fast:

- symbols start as whole characters where the merges allow it (`tables.whole_characters` says when), which for Chinese
  are three times fewer than bytes;
- short pretokens are remembered (`cache`), which answers almost every English word;
- a pretoken longer than a window is encoded window by window. A row of pieces is the encoding of its bytes exactly
  if every two neighbours are the encoding of theirs: up to the first merge across a border, the merges on both sides
  are those of the two neighbours alone, so that merge would happen there too. Hence windows may be joined wherever
  the two pieces at the joint encode to themselves, and a line of 100 MB without a space takes time and memory in
  proportion to its length.

Texts are arrays of code points, each followed by `DOCUMENT_END` (see `bpe.scan`).
"""

import numpy as np
from numba import njit

from zero2all.tokenizer.bpe.scan import DOCUMENT_END, pretoken_end

NO_RANK = np.int32(0x7FFFFFFF)
WINDOW = 256
"""Symbols of a long pretoken that are merged at a time."""
ROOM = 4
"""Places beyond what is needed that every output array must have: a remembered pretoken is copied as four ids."""

CACHED_IDS = 4
LOW_WORD = np.uint64(0xFFFFFFFF)
ID_BITS = np.uint64(0x0FFFFFFF)
MIX = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def _slot(left, right, mask):  # type: ignore[no-untyped-def]
    key = (np.uint64(left) << np.uint64(32)) | np.uint64(right)
    key = (key ^ (key >> np.uint64(29))) * MIX
    return np.int64((key >> np.uint64(32)) & mask)


@njit(cache=True, nogil=True)
def fill_ranks(lefts, rights, table):  # type: ignore[no-untyped-def]
    """Fill the table of merges: rows of (left << 32 | right) + 1 and the rank. Returns a rank seen twice, or -1."""
    mask = np.uint64(table.shape[0] - 1)
    for rank in range(lefts.shape[0]):
        slot = _slot(lefts[rank], rights[rank], mask)
        key = ((np.int64(lefts[rank]) << 32) | np.int64(rights[rank])) + 1
        while table[slot, 0] != 0:
            if table[slot, 0] == key:
                return rank
            slot = (slot + 1) & np.int64(mask)
        table[slot, 0] = key
        table[slot, 1] = rank
    return -1


@njit(cache=True, nogil=True)
def _rank_of(left, right, table, mask):  # type: ignore[no-untyped-def]
    slot = _slot(left, right, mask)
    key = ((np.int64(left) << 32) | np.int64(right)) + 1
    while True:
        found = table[slot, 0]
        if found == key:
            return np.int32(table[slot, 1])
        if found == 0:
            return NO_RANK
        slot = (slot + 1) & np.int64(mask)


@njit(cache=True, nogil=True)
def _merge(symbols, ranks, count, table, mask, results):  # type: ignore[no-untyped-def]
    """Merge the first `count` symbols in place; returns how many are left.

    All places of the lowest rank are merged in one pass from left to right. That is the same as one by one, because
    a pair that contains the new symbol has a higher rank than the merge that made it (`tables` refuses others).
    """
    for place in range(count - 1):
        ranks[place] = _rank_of(symbols[place], symbols[place + 1], table, mask)
    while count > 1:
        best = NO_RANK
        for place in range(count - 1):
            best = min(best, ranks[place])
        if best == NO_RANK:
            break
        read = 0
        while ranks[read] != best:
            read += 1
        write = read
        was_new = False
        while read < count:
            is_new = read < count - 1 and ranks[read] == best
            if is_new:
                symbols[write] = results[best]
                read += 2
            else:
                symbols[write] = symbols[read]
                read += 1
            if write > 0 and (is_new or was_new):
                ranks[write - 1] = _rank_of(symbols[write - 1], symbols[write], table, mask)
            ranks[write] = ranks[read - 1]  # of the pair that begins here, unless one of the two turns out to be new
            was_new = is_new
            write += 1
        count = write
    return count


@njit(cache=True, nogil=True)
def _start_symbols(codes, at, end, characters, byte_ids, symbols, limit):  # type: ignore[no-untyped-def]
    """Fill up to `limit` symbols from the text; returns how many there are and where the text was left."""
    count = 0
    while at < end and count + 4 <= limit:
        code = np.int64(codes[at])
        at += 1
        whole = characters[code]
        if whole >= 0:
            symbols[count] = whole
            count += 1
        elif code < 0x800:
            symbols[count] = byte_ids[0xC0 | (code >> 6)]
            symbols[count + 1] = byte_ids[0x80 | (code & 0x3F)]
            count += 2
        elif code < 0x10000:
            symbols[count] = byte_ids[0xE0 | (code >> 12)]
            symbols[count + 1] = byte_ids[0x80 | ((code >> 6) & 0x3F)]
            symbols[count + 2] = byte_ids[0x80 | (code & 0x3F)]
            count += 3
        else:
            symbols[count] = byte_ids[0xF0 | (code >> 18)]
            symbols[count + 1] = byte_ids[0x80 | ((code >> 12) & 0x3F)]
            symbols[count + 2] = byte_ids[0x80 | ((code >> 6) & 0x3F)]
            symbols[count + 3] = byte_ids[0x80 | (code & 0x3F)]
            count += 4
    return count, at


@njit(cache=True, nogil=True)
def _encodes_to_itself(left, right, piece_starts, piece_bytes, byte_ids, table, mask, results):  # type: ignore[no-untyped-def]
    """Whether the bytes of the two pieces are encoded as just these two pieces."""
    middle = piece_starts[left + 1] - piece_starts[left]
    size = middle + piece_starts[right + 1] - piece_starts[right]
    symbols = np.empty(size, np.int64)
    for place in range(size):
        source = piece_starts[left] + place if place < middle else piece_starts[right] + place - middle
        symbols[place] = byte_ids[piece_bytes[source]]
    count = _merge(symbols, np.empty(size, np.int32), size, table, mask, results)
    return count == 2 and symbols[0] == left and symbols[1] == right


@njit(cache=True, nogil=True)
def _encode_long(  # type: ignore[no-untyped-def]
    codes, start, end, characters, byte_ids, table, mask, results, piece_starts, piece_bytes, out, first_written
):
    """Encode one long pretoken window by window; returns how many ids `out` holds then."""
    window = WINDOW
    symbols = np.empty(window, np.int64)
    ranks = np.empty(window, np.int32)
    at, written = start, first_written
    last_at, last_written = start, first_written
    while at < end:
        count, stop = _start_symbols(codes, at, end, characters, byte_ids, symbols, window)
        count = _merge(symbols, ranks, count, table, mask, results)
        keep = count
        if stop < end:
            # The last pieces are the ones that the end of the window may have bent, and the next window has to start
            # at a whole character.
            keep = count - max(1, count // 8)
            while keep > 0 and piece_bytes[piece_starts[symbols[keep]]] & 0xC0 == 0x80:
                keep -= 1
        joins = at == start or _encodes_to_itself(
            np.int64(out[written - 1]), symbols[0], piece_starts, piece_bytes, byte_ids, table, mask, results
        )
        if keep == 0 or not joins:
            # Begin again where the window before began, or else at the very start, and look further.
            at, written = last_at, last_written
            last_at, last_written = start, first_written
            window *= 2
            symbols = np.empty(window, np.int64)
            ranks = np.empty(window, np.int32)
            continue
        last_at, last_written = at, written
        for number in range(keep):
            piece = symbols[number]
            out[written] = piece
            written += 1
            for place in range(piece_starts[piece], piece_starts[piece + 1]):
                at += piece_bytes[place] & 0xC0 != 0x80  # a character begins
    return written


@njit(cache=True, nogil=True)
def _key_word(codes, at, end):  # type: ignore[no-untyped-def]
    """Pack as many characters as fit into one word: behind a leading 1, ASCII takes 8 bits and others 24, whose first
    bit is set."""
    word = np.uint64(1)
    while at < end:
        code = codes[at]
        if code < 128:
            if word >> np.uint64(56) != 0:
                break
            word = (word << np.uint64(8)) | np.uint64(code)
        else:
            if word >> np.uint64(40) != 0:
                break
            word = (word << np.uint64(24)) | np.uint64(code | 0x800000)
        at += 1
    return word, at


@njit(cache=True, nogil=True)
def encode_documents(  # type: ignore[no-untyped-def]
    codes, kinds, characters, byte_ids, table, results, piece_starts, piece_bytes, cache, out, offsets
):
    """Encode all documents of `codes` into `out`; document i gets out[offsets[i] : offsets[i + 1]]."""
    mask = np.uint64(table.shape[0] - 1)
    cache_mask = np.uint64(cache.shape[0] - 1)
    symbols = np.empty(max(WINDOW, CACHED_IDS), np.int64)
    ranks = np.empty(WINDOW, np.int32)
    written = np.int64(0)
    document = 0
    offsets[0] = 0
    at = 0
    while at < codes.shape[0]:
        code = codes[at]
        if code == DOCUMENT_END:
            document += 1
            offsets[document] = written
            at += 1
            continue
        end = pretoken_end(codes, at, kinds)
        if end == at + 1 and characters[code] >= 0:
            out[written] = characters[code]
            written += 1
            at = end
            continue
        low, place = _key_word(codes, at, end)
        high, place = _key_word(codes, place, end)
        row = np.int64(-1)
        if place == end:
            row = np.int64((((low ^ (high << np.uint64(27))) * MIX) >> np.uint64(40)) & cache_mask)
            found = row
            if cache[row, 0] != low or cache[row, 1] != high:
                found = row ^ 1  # each key has two places, in one cache line
            if cache[found, 0] == low and cache[found, 1] == high:
                first_two, rest = cache[found, 2], cache[found, 3]
                out[written] = first_two & LOW_WORD
                out[written + 1] = first_two >> np.uint64(32)
                out[written + 2] = rest & ID_BITS
                out[written + 3] = (rest >> np.uint64(28)) & ID_BITS
                written += np.int64(rest >> np.uint64(56))
                at = end
                continue
        count, stop = _start_symbols(codes, at, end, characters, byte_ids, symbols, WINDOW)
        if stop < end:
            written = _encode_long(
                codes, at, end, characters, byte_ids, table, mask, results, piece_starts, piece_bytes, out, written
            )
            at = end
            continue
        count = _merge(symbols, ranks, count, table, mask, results)
        for number in range(count):
            out[written + number] = symbols[number]
        written += count
        at = end
        if row >= 0 and count <= CACHED_IDS:
            for number in range(count, CACHED_IDS):
                symbols[number] = 0
            for word in range(4):
                cache[row ^ 1, word] = cache[row, word]
            cache[row, 0] = low
            cache[row, 1] = high
            cache[row, 2] = np.uint64(symbols[0]) | (np.uint64(symbols[1]) << np.uint64(32))
            rest = np.uint64(symbols[2]) | (np.uint64(symbols[3]) << np.uint64(28))
            cache[row, 3] = rest | (np.uint64(count) << np.uint64(56))
    return written
