"""What dedup makes of a character: which ones count as the same (folding), and which class each has.

Folded are
- full-width and half-width forms, vertical and small punctuation, compatibility and radical forms of Han: to what NFKC
  makes of them;
- punctuation of Chinese and Western typesetting: 。 is a full stop, 「 a quotation mark, — a hyphen;
- traditional Han characters: to the simplified ones (`han_forms.txt`), also where one stands for several.

Only signatures and the choice of what is held out see folded text. Two texts are compared by their shingles, runs of
consecutive units:

    character (zh)   the code points of the folded text, white space left out, A-Z lower-cased; shingles of 5
    word (en, rest)  maximal runs of letters and digits of the folded text, A-Z lower-cased; a Han, kana or Hangul
                     character is a word of its own; signs and white space only separate; shingles of 3
    token (code)     as word but not folded, with the case kept, `_` counted as a letter, and every sign a token;
                     shingles of 5

A text with fewer units, but at least one, has one shingle: all of them. The similarity of two texts is the Jaccard
index of their shingle sets. `benchmarks/shingles.py` has the same in plain Python.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from zero2all.common.files import package_text

WIDTHS = ((0x2E80, 0x2FE0), (0xF900, 0xFB00), (0xFE10, 0xFE70), (0xFF00, 0xFFF0))
"""Blocks of characters that have another shape only: radicals, compatibility Han, vertical, small, full, half width."""
PUNCTUATION = {
    ".": "。…⋯‥",
    ",": "、",
    '"': "“”„‟«»「」『』〝〞",
    "'": "‘’‚‛",
    "-": "—–―‐‑−─",
    "<": "《〈‹",
    ">": "》〉›",
    "[": "【〔〖",
    "]": "】〕〗",
    "·": "•‧・",
    "~": "〜",
}


def fold(text: str) -> str:
    """`text` with every character folded."""
    return text.translate(_by_point())


@cache
def fold_table() -> np.ndarray:
    """(65536,) uint16: what each character of the first plane becomes. All others stay as they are."""
    table = np.arange(1 << 16, dtype=np.uint16)
    for point, folded in _by_point().items():
        table[point] = folded
    table.flags.writeable = False
    return table


def simplified_of() -> dict[int, int]:
    """Code point of a traditional Han character, or variant -> that of its simplified form.

    `han_forms.txt` has a word for each simplified character: the character, then its traditional forms. The pairs are
    those on which two converters agree, OpenCC (Apache 2.0) and zhconv, and a few variants of old books.
    """
    words = package_text("zero2all.corpus", "han_forms.txt").split()
    return {ord(form): ord(word[0]) for word in words for form in word[1:]}


@cache
def _by_point() -> dict[int, int]:
    folded = {}
    for first, end in WIDTHS:
        for point in range(first, end):
            plain = unicodedata.normalize("NFKC", chr(point))
            if len(plain) == 1 and plain != chr(point) and ord(plain) < 1 << 16:
                folded[point] = ord(plain)
    for sign, others in PUNCTUATION.items():
        folded.update(dict.fromkeys(map(ord, others), ord(sign)))
    folded.update(simplified_of())
    return {point: folded.get(target, target) for point, target in folded.items()}


SPACE, SIGN, LETTER, ALONE = range(4)
"""Classes of characters: separates, is a sign, is part of a word, is a word of its own."""

SPACE_RANGES = [(0x09, 0x0D), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
SPACE_RANGES += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
"""White space as `str.split` sees it."""

ALONE_RANGES = [(0x2E80, 0x2FDF), (0x3040, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xAC00, 0xD7AF)]
ALONE_RANGES += [(0xF900, 0xFAFF), (0x20000, 0x3FFFF)]
"""Han, kana, bopomofo, Hangul."""

SIGN_RANGES = [(0x80, 0xA9), (0xAB, 0xB4), (0xB6, 0xB9), (0xBB, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7), (0x2000, 0x2BFF)]
SIGN_RANGES += [(0x3000, 0x303F), (0xFE10, 0xFE6F), (0xFF00, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40)]
SIGN_RANGES += [(0xFF5B, 0xFF65), (0x1F000, 0x1FAFF)]
"""Punctuation, symbols, emoji."""


@cache
def class_table() -> np.ndarray:
    """(65536,) uint8: the class of every character of the first plane, the same for words and tokens but for `_`."""
    table = np.full(1 << 16, LETTER, np.uint8)
    for kind, ranges in ((SIGN, SIGN_RANGES), (ALONE, ALONE_RANGES)):
        for first, last in ranges:
            table[first : last + 1] = kind
    table[:0x80] = [LETTER if chr(code).isalnum() else SIGN for code in range(0x80)]
    for first, last in SPACE_RANGES:
        table[first : last + 1] = SPACE
    table.flags.writeable = False
    return table
