"""The native part: one pass over the code points of a batch that counts everything the rules ask about.

A batch is the texts put end to end as UTF-32. Each character takes one look-up in the character table, one increment of
a histogram and two hashes (of its word and its line). Words and lines go into small buffers; when a buffer is full or
the text ends, repetition is counted in it with an open hash table: exact within windows of `WINDOW_UNITS` units or
`WINDOW_LINES` lines, in constant memory.

A unit is a word (a run of letters, marks and digits, ASCII upper case as lower case), or a single character of a
script written without spaces.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from zero2all.corpus.clean import counts as k
from zero2all.corpus.clean import tables as t
from zero2all.corpus.clean.han import PAIR_BITS

WINDOW_UNITS = 1 << 15
WINDOW_LINES = 1 << 13
TABLE_SLOTS = 2 * WINDOW_UNITS
FUNCTION_SLOTS = 1024
SPAM_WORD = 2
"""The mark of a spam word among the function words."""
FAR = 6
"""Characters this far apart are the control of the pairs: what a text would have of them in any order."""
MENU_PIECE_CHARS = 20
"""Pieces between bars that are shorter on average are entries of a menu."""
LONG_PHRASE = 15
"""Phrases of this many characters and more are counted as one size."""
BY_SIGN, BY_SPACE, BY_LINE_END, BY_SENTENCE_END = range(4)
"""What closes a phrase."""
BARE_PHRASE_CHARS = 8
BINDING = t.FUNCTION_HAN | t.COUNTING_HAN
"""Flags of the characters that a bare phrase has none of. (A bit of it on a spam character is not set.)"""
PROSE_LINE_CHARS = 20
TAG_CHARS, FORMULA_CHARS, CODE_CHARS = 400, 4_000, 100_000
"""Longer tags, formulas and blocks of code are taken for text."""
MASK_TOKEN_CHARS = 16
"""A run of letters and digits at least this long may be a key, and is looked at by the masks."""

_SEED = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_BASE = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)
_FUNCTION_MASK = np.uint64(FUNCTION_SLOTS - 1)

Array = np.ndarray[Any, np.dtype[Any]]

_U32 = "Array(uint32, 1, 'C', readonly=True)"


@njit(nogil=True, inline="always")
def _mixed(value):  # type: ignore[no-untyped-def]
    value ^= value >> _HALF
    value *= _MIX
    return value ^ (value >> _HALF)


@njit(nogil=True)
def _cleared(keys, items):  # type: ignore[no-untyped-def]
    """Make the beginning of `keys` an empty hash table with room for `items`; returns its last slot."""
    slots = 64
    while slots < 2 * items:
        slots *= 2
    for slot in range(slots):
        keys[slot] = _ZERO
    return np.uint64(slots - 1)


@njit(nogil=True)
def _top_ngram_chars(units, sizes, count, n, keys, tally):  # type: ignore[no-untyped-def]
    """Characters in all copies of the n-gram that covers most, or 0 when none occurs three times."""
    if n == 0 or count < n + 2:
        return 0
    last_slot = _cleared(keys, count)
    power = _ONE
    for _ in range(n):
        power *= _BASE
    rolling = _ZERO
    size = 0
    best = 0
    for at in range(count):
        rolling = rolling * _BASE + units[at]
        size += sizes[at]
        if at >= n:
            rolling -= units[at - n] * power
            size -= sizes[at - n]
        if at < n - 1:
            continue
        key = rolling | _ONE
        slot = _mixed(rolling) & last_slot
        while keys[slot] != _ZERO and keys[slot] != key:
            slot = (slot + _ONE) & last_slot
        if keys[slot] == _ZERO:
            keys[slot] = key
            tally[slot] = 1
        else:
            tally[slot] += 1
            if tally[slot] >= 3 and tally[slot] * size > best:
                best = tally[slot] * size
    return best


@njit(nogil=True)
def _duplicate_ngram_chars(units, sizes, count, n, keys):  # type: ignore[no-untyped-def]
    """Characters covered by n-grams that occurred before."""
    if n == 0 or count < n + 1:
        return 0
    last_slot = _cleared(keys, count)
    power = _ONE
    for _ in range(n):
        power *= _BASE
    rolling = _ZERO
    covered = 0
    covered_to = 0
    for at in range(count):
        rolling = rolling * _BASE + units[at]
        if at >= n:
            rolling -= units[at - n] * power
        if at < n - 1:
            continue
        key = rolling | _ONE
        slot = _mixed(rolling) & last_slot
        while keys[slot] != _ZERO and keys[slot] != key:
            slot = (slot + _ONE) & last_slot
        if keys[slot] == _ZERO:
            keys[slot] = key
        else:
            for unit in range(max(covered_to, at - n + 1), at + 1):
                covered += sizes[unit]
            covered_to = at + 1
    return covered


@njit(nogil=True)
def _close_window(units, sizes, count, settings, keys, tally, row):  # type: ignore[no-untyped-def]
    """Measure the repetition among the units gathered so far; returns how many are left, 0."""
    row[k.TOP_NGRAM_CHARS] += _top_ngram_chars(units, sizes, count, settings[k.TOP_NGRAM], keys, tally)
    row[k.DUPLICATE_NGRAM_CHARS] += _duplicate_ngram_chars(units, sizes, count, settings[k.DUPLICATE_NGRAM], keys)
    row[k.UNITS] += count
    return 0


@njit(nogil=True)
def _duplicate_line_chars(lines, sizes, count, keys):  # type: ignore[no-untyped-def]
    """Characters of the lines that occurred before."""
    last_slot = _cleared(keys, count)
    repeated = 0
    for at in range(count):
        key = lines[at] | _ONE
        slot = _mixed(lines[at]) & last_slot
        while keys[slot] != _ZERO and keys[slot] != key:
            slot = (slot + _ONE) & last_slot
        if keys[slot] == _ZERO:
            keys[slot] = key
        else:
            repeated += sizes[at]
    return repeated


@njit(nogil=True)
def _utf8_bytes(points, start, end):  # type: ignore[no-untyped-def]
    total = 0
    for at in range(start, end):
        point = points[at]
        total += 1 + (point >= 0x80) + (point >= 0x800) + (point >= 0x10000)
    return total


@njit(nogil=True)
def _is_email_at(points, at, end):  # type: ignore[no-untyped-def]
    """Whether the @ at `at` has a host name with a dot and a letter behind its last dot."""
    dot = 0
    for place in range(at + 1, min(end, at + 128)):
        point = points[place]
        if point == 46:
            dot = place
        elif not (97 <= (point | 32) <= 122 or 48 <= point <= 57 or point == 45):
            break
        elif dot == place - 1 and 97 <= (point | 32) <= 122:
            return True
    return False


@njit(nogil=True)
def _url_end(points, at, end):  # type: ignore[no-untyped-def]
    """The first place behind `at` that cannot be inside a URL."""
    place = at
    while place < end:
        point = points[place]
        if point <= 32 or point >= 127 or point in (34, 39, 41, 60, 62, 93, 96, 124, 125):  # "')<>]`|}
            break
        place += 1
    return place


@njit(nogil=True, inline="always")
def _is_pair(pairs, one, two):  # type: ignore[no-untyped-def]
    """1 for a frequent pair; for others, and for characters without a code, 1 in some 40 by chance."""
    place = np.uint32(one * np.uint32(31) + two) >> np.uint32(32 - PAIR_BITS)
    return np.int64((pairs[place >> np.uint32(3)] >> (place & np.uint32(7))) & np.uint32(1))


@njit(nogil=True, inline="always")
def _close_phrase(phrases, size, bound, size_before, closed_by):  # type: ignore[no-untyped-def]
    """Count a phrase, the Han characters between two separators; returns its size if the one before had it too.

    `bound` is not 0 if it has a function or counting character.
    """
    phrases[(min(size, LONG_PHRASE) << 3) | (closed_by << 1) | (bound != 0)] += 1
    return size * (size == size_before and size > 2)


@njit(nogil=True)
def _add_phrases(phrases, row):  # type: ignore[no-untyped-def]
    """The measures of phrases from their counts by size, what closed them and whether they are bare; clears these."""
    for entry in range(len(phrases)):
        number = phrases[entry]
        if number == 0:
            continue
        phrases[entry] = 0
        size = entry >> 3
        closed_by = (entry >> 1) & 3
        row[k.PHRASES] += number
        row[k.LONGEST_PHRASE] = size
        if closed_by == BY_SENTENCE_END:
            row[k.ENDED_PHRASES] += number
        elif closed_by == BY_LINE_END:
            row[k.LINE_PHRASES] += number
        if size == 5 or size == 7:
            row[k.VERSE_CHARS] += number * size
        elif size == 1 and closed_by == BY_SPACE:
            row[k.LONE_HANS] += number
        if entry & 1 == 0 and size <= BARE_PHRASE_CHARS:
            row[k.BARE_CHARS] += number * size


@njit(nogil=True)
def _is_broken(points, start, end, table):  # type: ignore[no-untyped-def]
    """Whether a digit stands between lower-case letters, as in br0wn; not in words of many digits, as in a hash."""
    digits = 0
    between = False
    for at in range(start, end):
        if table[points[at]] & t.CLASS_MASK == t.DIGIT:
            digits += 1
            between |= (
                start < at < end - 1
                and table[points[at - 1]] & t.CLASS_MASK == t.LATIN_LOWER
                and table[points[at + 1]] & t.CLASS_MASK == t.LATIN_LOWER
            )
    return between and 3 * digits <= end - start


@njit(nogil=True)
def _is_table_rule(points, start, end):  # type: ignore[no-untyped-def]
    """Whether a line is the rule of a Markdown table: nothing but | - : and spaces."""
    dashes = 0
    for at in range(start, end):
        point = points[at]
        if point == 45:
            dashes += 1
        elif point != 124 and point != 58 and point != 32:
            return False
    return dashes > 0


@njit(nogil=True, inline="always")
def _may_open(point, line_chars):  # type: ignore[no-untyped-def]
    """Whether one of the signs with which `_aside_end` begins: $ < \\ ] and, at the beginning of a line, `."""
    return point == 36 or point == 60 or point == 92 or point == 93 or (point == 96 and line_chars == 0)


@njit(nogil=True)
def _end_behind(points, at, end, one, two, three):  # type: ignore[no-untyped-def]
    """The place behind the first run of these signs (0: none) from `at` on, or 0."""
    size = 1 + (two != 0) + (three != 0)
    for place in range(at, end - size + 1):
        if (
            points[place] == one
            and (two == 0 or points[place + 1] == two)
            and (three == 0 or points[place + 2] == three)
        ):
            return place + size
    return 0


@njit(nogil=True)
def _aside_end(points, at, end):  # type: ignore[no-untyped-def]
    """Where what begins at `at` ends: a formula ($…$, $$…$$, \\(…\\), \\[…\\]), a tag, CDATA, and in
    Markdown a block of code or the address of a link.

    0 when none begins.
    """
    if at + 2 >= end:
        return 0
    point, follows, third = points[at], points[at + 1], points[at + 2]
    if point == 96:  # `
        return _end_behind(points, at + 3, min(end, at + CODE_CHARS), 96, 96, 96) if follows == third == 96 else 0
    if point == 92:  # backslash
        closer = 41 if follows == 40 else 93 if follows == 91 else 0
        return _end_behind(points, at + 2, min(end, at + FORMULA_CHARS), 92, closer, 0) if closer else 0
    if point == 93:  # ](…), where a link leads to
        closed = _end_behind(points, at + 2, min(end, at + FORMULA_CHARS), 41, 0, 0) if follows == 40 else 0
        return 0 if _end_behind(points, at + 2, closed, 10, 0, 0) else closed
    if point == 60:  # <
        if follows == 33 and third == 91:  # ![
            return _end_behind(points, at + 3, min(end, at + CODE_CHARS), 93, 93, 62)
        if not (97 <= (follows | 32) <= 122 or follows == 47 or follows == 33 or follows == 63):  # / ! ?
            return 0
        closed = _end_behind(points, at + 2, min(end, at + TAG_CHARS), 62, 0, 0)
        opened = _end_behind(points, at + 2, closed, 60, 0, 0)
        return 0 if opened else closed
    if follows == 36:
        return _end_behind(points, at + 2, min(end, at + FORMULA_CHARS), 36, 36, 0)
    closed = _end_behind(points, at + 2, min(end, at + FORMULA_CHARS), 36, 0, 0)
    line_ended = _end_behind(points, at + 1, closed, 10, 0, 0)
    # Prices have a space before the next $, or a digit behind it.
    is_price = closed > 0 and (points[closed - 2] == 32 or (closed < end and 48 <= points[closed] <= 57))
    return 0 if line_ended or is_price or follows == 32 else closed


@njit(nogil=True)
def _ends(table, points, beyond, start, end):  # type: ignore[no-untyped-def]
    """Whether nothing of a word stands at `beyond`; on both sides of the letters of a+b, but not of w+rd."""
    return not (start <= beyond < end and t.LATIN_LOWER <= table[points[beyond]] & t.CLASS_MASK <= t.LETTER)


@njit(nogil=True)
def _is_maths_bar(points, at, start, end):  # type: ignore[no-untyped-def]
    """Whether a | stands beside a digit, a sign of maths or a single letter with another |, as in |a| and |x-1|."""
    for place in (at - 1, at + 1):
        if start <= place < end:
            beside = points[place]
            if 48 <= beside <= 57 or beside in (40, 41, 43, 60, 61, 62, 94, 95, 123, 125, 92, 0x2212):  # ()+<=>^_{}\\−
                return True
            beyond = 2 * place - at
            if start <= beyond < end and 97 <= (beside | 32) <= 122 and points[beyond] == 124:
                return True
    return False


@njit(
    f"void({_U32}, int64[::1], Array(uint8, 1, 'C', readonly=True), uint32[::1], uint8[::1], uint64[::1], uint8[::1], "
    "int64[::1], uint32[::1], uint32, int64[:, ::1])",
    cache=True,
    nogil=True,
)
def scan(  # type: ignore[no-untyped-def]
    points, starts, table, han_codes, pairs, known_words, word_marks, settings, stamps, first_stamp, counts
):
    """Fill `counts` (a row per text, a column per count) for the texts that begin at `starts` in `points`.

    `han_codes` and `pairs` are those of `han`, `known_words` and `word_marks` of `word_table`. `stamps` has a place
    for every code point and remembers the last text it was seen in; text t is `first_stamp` + t.
    """
    units = np.empty(WINDOW_UNITS, np.uint64)
    unit_sizes = np.empty(WINDOW_UNITS, np.uint32)
    lines = np.empty(WINDOW_LINES, np.uint64)
    line_sizes = np.empty(WINDOW_LINES, np.uint32)
    keys = np.empty(TABLE_SLOTS, np.uint64)
    tally = np.empty(TABLE_SLOTS, np.uint32)
    histogram = np.empty(256, np.int64)
    recent = np.empty(8, np.uint32)
    phrases = np.zeros((LONG_PHRASE + 1) << 3, np.int64)
    loose_line = settings[k.LOOSE_LINE]
    blob_run = settings[k.BLOB_RUN]
    duplicate_line = settings[k.DUPLICATE_LINE]
    keep_indent = settings[k.KEEP_INDENT]

    for text in range(len(starts) - 1):
        start = starts[text]
        end = starts[text + 1]
        stamp = np.uint32(first_stamp + text)
        row = counts[text]
        for column in range(len(row)):
            row[column] = 0
        for entry in range(256):
            histogram[entry] = 0
        unit_count = 0
        line_count = 0
        distinct = 0
        word_hash = _SEED
        word_chars = 0
        run_chars = 0
        run_digits = 0
        run_alnum = 0
        last_digit = start - 100
        number_digits = 0
        line_hash = _SEED
        line_chars = 0
        line_start = start
        line_end_kind = 0
        line_end_point = np.uint32(0)
        line_bars = 0
        line_first = np.uint32(0)
        line_urls = 0
        last_han = start - 9
        hans = 0
        even = 0
        rare = 0
        was_pair = np.int64(0)
        pair_count = 0
        pair_hits = 0
        far_hits = 0
        for entry in range(8):
            recent[entry] = 0
        phrase = 0
        phrase_bound = 0
        phrase_before = 0
        before_kind = 0
        first_kept = -1
        first_line = start
        last_kept = start
        repaired = False
        aside_until = start
        line_aside = 0
        at = start
        while at <= end:
            # One step behind the end: a line feed that is not there closes the last word and line.
            if at < end:
                point = points[at]
                kind = table[point]
                histogram[kind] += 1
            else:
                point = np.uint32(10)
                kind = np.uint8(t.NEWLINE)
            of_class = kind & t.CLASS_MASK
            if t.LATIN_LOWER <= of_class <= t.DIGIT:
                if stamps[point] != stamp:
                    stamps[point] = stamp
                    distinct += 1
                line_hash = (line_hash ^ np.uint64(point)) * _PRIME
                if of_class == t.LATIN_UPPER and point < 128:
                    word_hash = (word_hash ^ np.uint64(point | np.uint32(32))) * _PRIME
                else:
                    word_hash = (word_hash ^ np.uint64(point)) * _PRIME
                if of_class == t.DIGIT:
                    run_digits += 1
                    if at - last_digit > 3:
                        number_digits = 0
                    number_digits += 1
                    last_digit = at
                    if number_digits > row[k.LONGEST_NUMBER]:
                        row[k.LONGEST_NUMBER] = number_digits
                elif point >= 0xC2 and point <= 0xF4 and at + 1 < end:
                    after_kind = table[points[at + 1]]
                    after_class = after_kind & t.CLASS_MASK
                    if after_class != t.HAN and after_kind & t.CONTINUATION:
                        row[k.MOJIBAKE_PAIRS] += 1
                    elif after_class in (t.REMOVE, t.JOINER):
                        row[k.SPLIT_PAIRS] += 1  # may become a pair when that character is gone
                word_chars += 1
                run_chars += 1
                run_alnum += 1
                line_chars += 1
                line_aside += at < aside_until
                line_end_kind = of_class
                before_kind = kind
                last_kept = at + 1
                if first_kept < 0:
                    first_kept = at
                    first_line = line_start
                at += 1
                continue
            if of_class == t.REMOVE:
                repaired = True
                at += 1
                continue
            if of_class == t.JOINER:
                if before_kind & t.CAN_JOIN:
                    before_kind = t.MARK
                    last_kept = at + 1
                else:
                    repaired = True
                at += 1
                continue
            before_kind = t.HAN if of_class == t.HAN else kind  # the flags of Han have other meanings

            # Everything below ends a word.
            if word_chars > 0 and at < aside_until:
                word_hash = _SEED
                word_chars = 0
            elif word_chars > 0:
                unit = _mixed(word_hash)
                units[unit_count] = unit
                unit_sizes[unit_count] = word_chars
                unit_count += 1
                row[k.WORDS] += 1
                row[k.UNIT_CHARS] += word_chars
                slot = unit & _FUNCTION_MASK
                while known_words[slot] != _ZERO:
                    if known_words[slot] == unit:
                        if word_marks[slot] == SPAM_WORD:
                            row[k.SPAM_WORDS] += 1
                        else:
                            row[k.FUNCTION_WORDS] += 1
                        break
                    slot = (slot + _ONE) & _FUNCTION_MASK
                if 0 < run_digits < word_chars:
                    row[k.BROKEN_WORDS] += _is_broken(points, at - word_chars, at, table)
                word_hash = _SEED
                word_chars = 0
                if unit_count == WINDOW_UNITS:
                    unit_count = _close_window(units, unit_sizes, unit_count, settings, keys, tally, row)
            of_run = run_chars > 0 and (point == 43 or point == 45 or point == 47 or point == 61 or point == 95)
            if of_run:
                run_chars += 1  # + - / = _
            elif run_chars > 0:
                if run_chars >= MASK_TOKEN_CHARS and 0 < run_digits < run_alnum:
                    row[k.LONG_TOKENS] += 1
                if (
                    run_chars >= blob_run
                    and at >= aside_until
                    and 10 * run_alnum >= 9 * run_chars
                    and 30 * run_digits >= run_chars
                ):
                    row[k.BLOB_CHARS] += run_chars
                run_chars = 0
                run_digits = 0
                run_alnum = 0

            if t.HAN <= of_class <= t.SINGLE:
                if stamps[point] != stamp:
                    stamps[point] = stamp
                    distinct += 1
                line_hash = (line_hash ^ np.uint64(point)) * _PRIME
                if of_class == t.HAN:
                    adjacent = last_han == at - 1
                    if hans < k.PAIR_HANS:
                        code = han_codes[point] if point < len(han_codes) else np.uint32(0)
                        rare += code == 0
                        was_pair = _is_pair(pairs, recent[(hans - 1) & 7], code)
                        if adjacent:
                            pair_count += 1
                            pair_hits += was_pair
                        far_hits += _is_pair(pairs, recent[(hans - FAR) & 7], code)
                        recent[hans & 7] = code
                    if not adjacent:
                        if last_han == at - 2:
                            between = points[at - 1]
                            class_between = table[between] & t.CLASS_MASK
                            if t.LATIN_LOWER <= class_between <= t.LATIN_UPPER:
                                row[k.NOISE_LETTERS] += 1
                            elif hans < k.PAIR_HANS and between != 10 and (between < 128 or class_between == t.SYMBOL):
                                row[k.PARTED] += was_pair
                            if (class_between == t.SYMBOL and between != 96) or between in (35, 37, 38, 92):
                                row[k.NOISE_SIGNS] += 1  # not Markdown's `; # % & \
                        if phrase > 0 and line_end_kind == t.HAN:
                            even += _close_phrase(phrases, phrase, phrase_bound, phrase_before, BY_SPACE)
                            phrase_before = phrase
                            phrase = 0
                            phrase_bound = 0
                    hans += 1
                    phrase += 1
                    phrase_bound += kind & BINDING
                    last_han = at
                line_chars += 1
                line_aside += at < aside_until
                line_end_kind = of_class
                if at >= aside_until:
                    units[unit_count] = (np.uint64(point) + _ONE) * _MIX
                    unit_sizes[unit_count] = 1
                    unit_count += 1
                    row[k.UNIT_CHARS] += 1
                last_kept = at + 1
                if first_kept < 0:
                    first_kept = at
                    first_line = line_start
            elif of_class == t.SPACE:
                pass
            elif of_class == t.NEWLINE:
                if point == 13:
                    repaired = True
                    if at + 1 < end and points[at + 1] == 10:
                        at += 1
                        histogram[t.NEWLINE] += 1
                elif point != 10:
                    repaired = True
                if phrase > 0:
                    even += _close_phrase(phrases, phrase, phrase_bound, phrase_before, BY_LINE_END)
                    phrase_before = phrase
                    phrase = 0
                    phrase_bound = 0
                if line_chars > 0:
                    row[k.LINE_CHARS_MAX] = max(row[k.LINE_CHARS_MAX], at - line_start)
                if line_chars > line_aside:
                    row[k.LINES] += 1
                    ended = line_end_kind == t.SENTENCE_END
                    row[k.STOPPED_LINES] += ended or line_end_kind == t.PUNCTUATION
                    if ended:
                        row[k.ENDED_LINES] += 1
                        # … ⋯ ‥ or the end of an ASCII ellipsis
                        if line_end_point == 0x2026 or line_end_point == 0x22EF or line_end_point == 0x2025:
                            row[k.ELLIPSIS_LINES] += 1
                        if line_chars >= PROSE_LINE_CHARS:
                            row[k.PROSE_CHARS] += max(0, line_chars - line_urls)
                    elif line_chars < loose_line:
                        row[k.LOOSE_CHARS] += line_chars
                    if line_bars > 0:
                        if line_first == 124 and _is_table_rule(points, line_start, at):
                            row[k.TABLE_RULES] += 1
                        elif line_bars > 2 and not ended and line_chars < MENU_PIECE_CHARS * line_bars:
                            row[k.TABLE_CHARS if line_first == 124 else k.MENU_CHARS] += line_chars
                    row[k.LINE_CHARS] += line_chars
                    if line_chars - line_aside >= duplicate_line:
                        lines[line_count] = line_hash
                        line_sizes[line_count] = line_chars
                        line_count += 1
                        if line_count == WINDOW_LINES:
                            row[k.DUPLICATE_LINE_CHARS] += _duplicate_line_chars(lines, line_sizes, line_count, keys)
                            line_count = 0
                line_hash = _SEED
                line_chars = 0
                line_aside = 0
                line_bars = 0
                line_urls = 0
                line_first = np.uint32(0)
                line_end_kind = 0
                line_start = at + 1
            else:
                if stamps[point] != stamp:
                    stamps[point] = stamp
                    distinct += 1
                line_hash = (line_hash ^ np.uint64(point)) * _PRIME
                if line_chars == 0:
                    line_first = point
                if at >= aside_until and not keep_indent and _may_open(point, line_chars):
                    aside_until = max(aside_until, _aside_end(points, at, end))
                    for place in range(at, aside_until):
                        class_aside = table[points[place]] & t.CLASS_MASK
                        row[k.ASIDE_CHARS] += class_aside >= t.HAN
                        row[k.ASIDE_LATIN] += t.LATIN_LOWER <= class_aside <= t.LATIN_UPPER
                        row[k.ASIDE_LETTERS] += t.HAN <= class_aside <= t.LETTER
                        row[k.ASIDE_DIGITS] += class_aside == t.DIGIT
                        row[k.ASIDE_SYMBOLS] += t.SENTENCE_END <= class_aside <= t.SYMBOL
                line_chars += 1
                line_aside += at < aside_until
                last_kept = at + 1
                if first_kept < 0:
                    first_kept = at
                    first_line = line_start
                if phrase > 0:
                    by = BY_SENTENCE_END if of_class == t.SENTENCE_END else BY_SIGN
                    even += _close_phrase(phrases, phrase, phrase_bound, phrase_before, by)
                    phrase_before = phrase
                    phrase = 0
                    phrase_bound = 0
                if kind & t.SIGN:
                    if at >= aside_until:
                        line_bars += point > 127 or (point == 124 and not _is_maths_bar(points, at, start, end))
                    if (
                        start < at < end - 1
                        and table[points[at - 1]] & t.CLASS_MASK == t.LATIN_LOWER
                        and table[points[at + 1]] & t.CLASS_MASK == t.LATIN_LOWER
                        and not (_ends(table, points, at - 2, start, end) and _ends(table, points, at + 2, start, end))
                    ):
                        row[k.BROKEN_WORDS] += 1
                elif (point == 62 or point == 47) and start < at < end - 1:  # > / between spaces
                    line_bars += points[at - 1] == 32 and points[at + 1] == 32
                if kind & t.CLOSER == 0:
                    line_end_kind = of_class
                    line_end_point = point
                if of_class == t.SENTENCE_END:
                    after = table[points[at + 1]] & t.CLASS_MASK if at + 1 < end else t.NEWLINE
                    if point == 46:
                        if at >= start + 2 and points[at - 1] == 46 and points[at - 2] == 46:
                            line_end_point = np.uint32(0x2026)
                        if after < t.LATIN_LOWER or after == t.PUNCTUATION:
                            row[k.SENTENCES] += 1
                        elif (
                            at >= start + 3
                            and points[at - 1] == 119
                            and points[at - 2] == 119
                            and points[at - 3] == 119
                        ):
                            address = 3 + _url_end(points, at, end) - at
                            row[k.URL_CHARS] += address
                            line_urls += address
                    elif after != t.SENTENCE_END:
                        row[k.SENTENCES] += 1
                elif point == 58:
                    if at + 2 < end and points[at + 1] == 47 and points[at + 2] == 47:
                        address = min(at - start, 5) + _url_end(points, at, end) - at
                        row[k.URL_CHARS] += address
                        line_urls += address
                elif point == 64 and at > start:
                    before_class = table[points[at - 1]] & t.CLASS_MASK
                    if t.LATIN_LOWER <= before_class <= t.PUNCTUATION and _is_email_at(points, at, end):
                        row[k.EMAILS] += 1
            if unit_count == WINDOW_UNITS:
                unit_count = _close_window(units, unit_sizes, unit_count, settings, keys, tally, row)
            at += 1

        if unit_count > 0:
            _close_window(units, unit_sizes, unit_count, settings, keys, tally, row)
        if line_count > 1:
            row[k.DUPLICATE_LINE_CHARS] += _duplicate_line_chars(lines, line_sizes, line_count, keys)
        row[k.DISTINCT] = distinct
        row[k.EVEN_CHARS] = even
        _add_phrases(phrases, row)
        row[k.RARE_HANS] = rare
        row[k.PAIRS] = pair_count
        row[k.PAIR_HITS] = pair_hits
        row[k.FAR_PAIRS] = max(0, min(hans, k.PAIR_HANS) - FAR)
        row[k.FAR_HITS] = far_hits
        for entry in range(256):
            number = histogram[entry]
            if number:
                row[entry & t.CLASS_MASK] += number
                if entry & t.CLASS_MASK == t.HAN:
                    if entry & t.FUNCTION_HAN:
                        row[k.FUNCTION_HANS] += number
                        if entry & t.CLASSICAL_HAN:
                            row[k.CLASSICAL_HANS] += number
                        if entry & t.MODERN_HAN:
                            row[k.MODERN_HANS] += number
                    elif entry & t.SPAM_HAN:
                        row[k.SPAM_HANS] += number
                    if entry & t.GBK_SUSPECT:
                        row[k.GBK_SUSPECTS] += number
        ascii_chars = 0
        for place in range(start, end):
            ascii_chars += (points[place] > 32) & (points[place] < 127)
        row[k.ASCII] = ascii_chars
        row[k.BYTES_IN] = _utf8_bytes(points, start, end)
        if first_kept < 0:
            first_kept = last_kept
        elif keep_indent:
            first_kept = first_line
        row[k.KEEP_FROM] = first_kept - start
        row[k.KEEP_TO] = last_kept - start
        row[k.BYTES_OUT] = (
            row[k.BYTES_IN] - _utf8_bytes(points, start, first_kept) - _utf8_bytes(points, last_kept, end)
        )
        if repaired:
            row[k.CHANGED] = 2
        elif first_kept > start or last_kept < end:
            row[k.CHANGED] = 1


@njit(f"int64({_U32}, int64, int64, Array(uint8, 1, 'C', readonly=True), uint32[::1])", cache=True, nogil=True)
def compact(points, start, end, table, kept):  # type: ignore[no-untyped-def]
    """Write the repaired code points of one text to `kept` and return how many there are."""
    count = 0
    before_kind = 0
    for at in range(start, end):
        point = points[at]
        kind = table[point]
        of_class = kind & t.CLASS_MASK
        if of_class == t.REMOVE:
            continue
        if of_class == t.NEWLINE:
            if point == 13 and at + 1 < end and points[at + 1] == 10:
                continue
            point = np.uint32(10)
        elif of_class == t.JOINER:
            if before_kind & t.CAN_JOIN == 0:
                continue
            kind = np.uint8(t.MARK)
        before_kind = t.HAN if of_class == t.HAN else kind
        kept[count] = point
        count += 1
    return count


@njit(f"void({_U32}, int64[::1], uint64, uint64, uint64[::1], boolean[::1])", cache=True, nogil=True)
def find_beginnings(points, starts, shift, down, beginnings, out):  # type: ignore[no-untyped-def]
    """Set `out` for the texts that hold the first characters of a phrase; `shift` to `beginnings` are `beginnings_of`.

    A window is a sum of its characters, each shifted; those that left it are shifted out of the 64 bits.
    """
    for text in range(len(out)):
        found = False
        window = _ZERO
        for at in range(starts[text], starts[text + 1]):
            window = (window << shift) + np.uint64(points[at])
            found |= beginnings[(window * _MIX) >> down] == window
        out[text] = found


@cache
def beginnings_of(phrases: tuple[str, ...]) -> tuple[np.uint64, np.uint64, Array]:
    """Bits by which a window of the first 2 to 8 characters is shifted, and the hash table of those of the phrases."""
    every_bit = (1 << 64) - 1
    size = min(8, *map(len, phrases))
    shift = -(-64 // size)
    windows = set()
    for phrase in phrases:
        window = 0
        for character in phrase[:size]:
            window = ((window << shift) + ord(character)) & every_bit
        windows.add(window)
    bits = 8
    places: dict[int, int] = {}
    while len(places) < len(windows):  # no two in one place
        bits += 1
        places = {(window * int(_MIX) & every_bit) >> (64 - bits): window for window in windows}
    table = np.zeros(1 << bits, np.uint64)
    table[list(places)] = list(places.values())
    return np.uint64(shift), np.uint64(64 - bits), table


@cache
def word_table(functions: tuple[str, ...], spam: tuple[str, ...]) -> tuple[Array, Array]:
    """The open hash table of function and spam words that `scan` looks into, and the mark of each place."""
    table = np.zeros(FUNCTION_SLOTS, np.uint64)
    marks = np.zeros(FUNCTION_SLOTS, np.uint8)
    for word in (*functions, *spam):
        unit = _word_unit(word)
        slot = unit % FUNCTION_SLOTS
        while table[slot]:
            slot = (slot + 1) % FUNCTION_SLOTS
        table[slot] = unit
        marks[slot] = SPAM_WORD if word in spam else 1
    return table, marks


def _word_unit(word: str) -> int:
    """The hash that `scan` gives to a word, in plain Python."""
    every_bit = (1 << 64) - 1
    value = int(_SEED)
    for character in word:
        value = (value ^ ord(character)) * int(_PRIME) & every_bit
    value ^= value >> 32
    value = value * int(_MIX) & every_bit
    return value ^ (value >> 32)
