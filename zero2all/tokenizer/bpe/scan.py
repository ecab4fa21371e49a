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
    for kind, ranges in ((LETTER, _LETTERS), (NUMBER, _NUMBERS), (SPACE, _SPACES)):
        place = 0
        for item in ranges.split():
            gap, _, length = item.partition(".")
            start = place + int(gap, 16)
            place = start + int(length or "1", 16)
            kinds[start:place] = kind
    kinds[[0x0A, 0x0D]] = NEWLINE
    kinds[0xD800:0xE000] = BREAK
    return kinds


# Ranges as hexadecimal numbers, "gap.length" or, for a single code point, "gap"; the gap counts from the last range.
_SPACES = """
9.5 12 64 1a 15df 97f.b 1d.2 5 2f fa0
"""
_NUMBERS = """
30.a 78.2 5 2.3 5a1.a 86.a c6.a 19c.a 76.a 4.6 6c.a 76.a 76.a 2.6 6e.d 73.a 8.7 67.a 68.7 7.13 6d.a 60.a 76.a 46.14
10c.a 46.a 2cf.14 371.3 ef.a 6.a 16.a 12c.a 80.b a5.a 6.a b6.a 56.a 86.a 6.a 416 3.6 6.a c6.33 2.5 2d6.3c 4e.16 276.1e
569 309 19.9 e.3 157.4 8a.a 1e.8 1.f 20.a 27.f 7360.a bc.a 140.6 9a.a 26.a c6.a 16.a 56.a 196.a 5316.a 1ed.2d c.39
11.2 155.1b 24.4 1d 8 86.5 ca.a 3ae.8 19.7 27.9 4b.5 16.6 a0.2 2.10 2.2e 40.9 34.2 1e.3 4b.5 68.8 18.8 29.7 14a.6 30.a
6.a 116.1f 9e.a 2a.4 70.7 86.1e 80.a 3c.a 90.a 7.14 fb.a 156.a 76.a 176.a 66.a 6.14 4c.c 1a4.13 5d.a 296.a 56.1d e3.a
46.a 1a6.a 66.15 42b.6f 3cc1.a 926.a 56.a 86.a 1.7 20e.a 106.17 5e59.a 5c6.14 c.14 6c.19 455.32 940.a 1a6.a 1f6.a f7.a
2cc.9 80.a 317.3b 1.3 1.4 4c.2d 1.f 3c2.d ae3.a
"""
_LETTERS = """
41.1a 6.1a 2f a 4 5.17 1.1f 1.1ca 4.c e.5 7 1 81.5 1.2 2.4 1 6 1.3 1 1.14 1.53 1.8b 8.a6 1.26 2 6.29 47.1b 4.4 2d.2b
23.2 1.63 1 f.2 7.2 a.3 2 10 1.1e 1d.59 b 18.21 9.2 4 5.16 4 9 3 17.19 7.b 5.18 1.6 11.2a 3a.36 3 12 7.a f.10 4.8 2.2
2.16 1.7 1 3.4 3 10 d.2 1.3 e.2 a 8.6 4.2 2.16 1.7 1.2 1.2 1.2 1f.4 1 13.3 10.9 1.3 1.16 1.7 1.2 1.5 3 12 f.2 17 b.8
2.2 2.16 1.7 1.2 1.5 3 1e.2 1.3 f 11 1.6 3.3 1.4 3.2 1 1.2 3.2 3.3 3.c 16 34.8 1.3 1.17 1.10 3 1a.3 2 2.2 1e 4.8 1.3
1.17 1.a 1.5 3 1f.2 1.2 f.2 11.9 1.3 1.29 2 10 5.3 8.3 18.6 5.12 3.18 1.9 1 2.7 3a.30 1.2 c.7 3a.2 1 1.5 1.18 1 1.a
1.2 9 2.5 1 15.4 20 3f.8 1.24 1b.5 73.2b 14 10.6 4.4 3 3.2 7.3 4.d c 11.26 1 5 2.2b 1.14d 1.4 2.7 1 1.4 2.29 1.4 2.21
1.4 2.7 1 1.4 2.f 1.39 1.4 2.43 25.10 10.56 2.6 3.26c 2.11 1.1a 5.4b 6.8 7.12 d.13 e.12 e.d 1.3 f.34 23 4 43.59 7.5
2.22 1 5.46 a.1f 31.1e 2.5 b.2c 4.1a 36.17 9.35 52 5d.2f 11.8 36.1e d.2 a.2c 1a.24 29.3 a.24 2.b 5.2b 2.3 29.4 1.6 1.2
3 5.c0 40.116 2.6 2.26 2.6 2.8 1 1 1 1.1f 2.35 1.7 1 3.3 1.7 3.4 2.6 4.d 5.3 1.7 74 d 10.d 65 4 2.a 1 3.5 6 1 1 1.4
1.b 2.4 5.5 4 34.2 a7b.e5 6.4 3.2 c.26 1 5 2.38 7 10.17 9.7 1.7 1.7 1.7 1.7 1.7 1.7 1.7 50 1d5.2 2a.5 5.2 4.56 6.3
1.5a 1.4 5.2b 1.5e 11.20 30.10 200.19c0 40.568d 43.2e 2.10d 3.10 a.2 14.2f 10.1f 2.46 31.9 2.67 2.43 2.2 1 1.8 15.10
1.3 1.4 1.17 1d.34 e.32 3e.6 3 1.2 b.1c a.17 19.1d 7.2f 1c 10.5 1.a a.5 1.29 17.3 1.8 14.17 3 3.32 1 3.2 2.5 2 1 18.3
2.b 7.3 c.6 2.6 2.6 9.7 1.7 1.2b 1.e 6.73 1d.2ba4 c.17 4.31 2104.16e 2.6a 26.7 c.5 5 1.a 1.d 1.5 1 1.2 1.2 1.6c 21.16b
12.40 2.36 28.c 74.5 1.87 24.1a 6.1a b.59 3.6 2.6 2.6 2.3 23.c 1.1a 1.13 1.2 1.f 2.e 22.7b 185.1d 3.31 2f.20 d.14 1.8
6.26 a.1e 2.24 4.8 30.9e 12.24 4.24 4.28 8.34 c.b 1.f 1.7 1.2 1.b 1.f 1.7 1.2 3.34 c.137 9.16 a.8 18.6 1.2a 1.9 45.6 2
1.2c 1.2 3 2.17 a.17 9.1f 41.13 1.2 a.16 a.1a 46.38 6.2 40 f.4 1.3 1.1d 2a.1d 3.1d 23.8 1.1c 1b.36 a.16 a.13 d.12
6e.49 37.33 d.33 d.24 26.1c 9.17 fa.2a 6.2 10.3 3b.1d a 8.16 2a.12 2e.15 1b.17 c.35 39.2 2 d.2d 20.19 1a.24 1d 2 8.23
3 c.30 e.4 15 1 23.12 1.19 13.2 3f.7 1 1.4 1.f 1.a 7.2f 26.8 2.2 2.16 1.7 1.2 1.5 3 12 c.5 1e.a 1 2 1.26 1 19 1 2c.35
12.4 14.3 1e.30 14.2 1 b8.2f 29.4 24.30 14 3b.2b d 47.1b 25.7 b9.2c 74.40 1f.8 2 2.8 1.2 1.18 f 1 5e.8 2.27 10 1 1c
a.28 7 15 b.2e 13 12.49 c7.21 1f.9 1.25 11 31.1e 70.7 1.2 1.26 15 19.6 1.2 1.20 e 147.13 f 1.d 1.22 7c 4f.39a e6.c4
a4c.61 f.430 11.6 19.f9b 5.247 1ab9.1e 6e2.239 7.1f 11.4f 11.1e 12.30 10.4 1f.15 5.13 1b0.2d d3.40 80.4b 5 42.d 40.2 1
1c.17f8 8.4d6 29.a 22e7.4 1.7 1.2 1.123 f 1d.3 2 e.4 8.18c 904.6b 5.d 3.9 7.a 1766.55 1.47 1.2 2 2.2 2.4 1.c 1 1.7
1.41 1.4 2.8 1.7 1.1c 1.4 1.5 1 3.7 1.154 2.19 1.19 1.1f 1.19 1.1f 1.19 1.1f 1.19 1.1f 1.19 1.8 734.1f 6.6 105.3e
92.2d a.7 10 141.1e 12.2c 1e4.1c e4.1e 2 1ef.7 1.4 1.2 1.f 1.c5 3b.44 7 4b4.4 1.1b 1.2 1 2 1.a 1.4 1 1 6 4 1 1 1.3 1.2
1 2 1 1 1 1 1.2 1 2.4 1.7 1.4 1.4 1 1.a 1.11 5.3 1.5 1.11 1144.a6e0 20.103a 6.de 2.1682 e.1d31 f.26e 9a2.21e 5e2.134b
5.1060
"""
