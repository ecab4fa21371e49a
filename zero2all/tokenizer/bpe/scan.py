r"""The pretoken pattern as native code (numba; import this module only where it runs).

The alternatives of `config.PRETOKEN_PATTERN`, tried in this order at every place:

    (?i:'s|'t|'re|'ve|'m|'ll|'d)      an English ending
    [^\r\n\p{L}\p{N}]?\p{L}+          letters, with one character before them, no line end and no number
    \p{N}                             one digit
     ?[^\s\p{L}\p{N}]+[\r\n]*         punctuation and symbols, with a space before and line ends behind
    \s*[\r\n]+                        white space up to the last line end in it
    \s+(?!\S)                         white space but for its last character, or up to the end of the text
    \s+                               that last character

A document is an array of code points that ends with `DOCUMENT_END`, so looking one place ahead is always allowed.
"""

from functools import cache

import numpy as np
from numba import njit

from zero2all.common.files import package_text
from zero2all.tokenizer.text import BREAK_CHARACTER

_APOSTROPHE = ord("'")
_BLANK = ord(" ")
_LONG_S = 0x17F
"""ſ, which equals s when case is ignored."""


@njit(cache=True, nogil=True)
def pretoken_end(codes, at, kinds):  # type: ignore[no-untyped-def]
    """Where the pretoken that begins at `at` (not at a document's end) ends."""
    code = codes[at]
    kind = kinds[code]
    following = codes[at + 1]
    if code == _APOSTROPHE:
        letter = following | 0x20
        if following < 128:
            if letter == 115 or letter == 116 or letter == 109 or letter == 100:  # s, t, m, d
                return at + 2
            if letter == 114 or letter == 118 or letter == 108:  # re, ve, ll
                second = codes[at + 2] | 0x20
                if second == (108 if letter == 108 else 101) and codes[at + 2] < 128:
                    return at + 3
        elif following == _LONG_S:
            return at + 2
    if kind == LETTER or (kinds[following] == LETTER and kind != NEWLINE and kind != NUMBER):
        end = at + 1
        while kinds[codes[end]] == LETTER:
            end += 1
        return end
    if kind == NUMBER:
        return at + 1
    if kind == OTHER or (code == _BLANK and kinds[following] == OTHER):
        end = at + 1
        while kinds[codes[end]] == OTHER:
            end += 1
        while kinds[codes[end]] == NEWLINE:
            end += 1
        return end
    end = at
    after_newline = at
    while kinds[codes[end]] == SPACE or kinds[codes[end]] == NEWLINE:
        end += 1
        if kinds[codes[end - 1]] == NEWLINE:
            after_newline = end
    if after_newline > at:
        return after_newline
    if kinds[codes[end]] == BREAK or end == at + 1:
        return end
    return end - 1


def pretokens(text: str) -> list[str]:
    """The pretokens of one text, by the scanner that the trainer runs over whole blocks."""
    codes = np.frombuffer((text + BREAK_CHARACTER).encode("utf-32-le", "surrogatepass"), np.uint32)
    found, start = [], 0
    while start < len(text):
        end = pretoken_end(codes, start, character_kinds())
        found.append(text[start:end])
        start = end
    return found


# Which code points are letters, numbers and white space, as the encoders see it.
#
# Which code points are letters changes with the version of Unicode, and a trainer that disagrees with the encoders
# would learn pieces that they can never produce. So this is the table of the regex engine of the `tokenizers` library
# (a test compares all code points), not Python's `unicodedata`, whose version depends on the interpreter.


OTHER, LETTER, NUMBER, SPACE, NEWLINE, BREAK = range(6)
"""The kinds that the pattern tells apart. SPACE is white space except line ends; BREAK ends a document."""

DOCUMENT_END = ord(BREAK_CHARACTER)
"""Stands after each document in an array of code points."""

CODE_POINTS = 0x110000


@cache
def character_kinds() -> np.ndarray:
    """The kind of every code point, as bytes."""
    kinds = np.full(CODE_POINTS, OTHER, np.uint8)
    # Ranges as hexadecimal numbers, "gap.length", or "gap" for a single code point; the gap counts from the last range.
    tables = package_text(__package__, "character_ranges.txt").split("\n\n")
    for kind, ranges in zip((LETTER, NUMBER, SPACE), tables, strict=True):
        place = 0
        for item in ranges.split():
            gap, _, length = item.partition(".")
            start = place + int(gap, 16)
            place = start + int(length or "1", 16)
            kinds[start:place] = kind
    kinds[[0x0A, 0x0D]] = NEWLINE
    kinds[0xD800:0xE000] = BREAK
    return kinds
