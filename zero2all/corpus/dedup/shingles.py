"""What a shingle is, in plain Python: the definition the kernels are tested against, and exact similarities.

    character (zh)   the code points of the folded text, white space left out, A-Z lower-cased; shingles of 5
    word (en, rest)  maximal runs of letters and digits of the folded text, A-Z lower-cased; a Han, kana or Hangul
                     character is a word of its own; signs and white space only separate; shingles of 3
    token (code)     as word but not folded, with the case kept, `_` counted as a letter, and every sign a token;
                     shingles of 5

What folding is stands in `fold.py`: one width, one set of punctuation, simplified Han.

The shingle set of a text is the set of all runs of so many consecutive units. A text with fewer units, but at least
one, has one shingle: all of them. The similarity of two texts is the Jaccard index of their sets. Texts of channels
cut differently are never compared.
"""

from __future__ import annotations

from functools import cache

from zero2all.corpus.dedup.config import DedupConfig, Shingle
from zero2all.corpus.dedup.fold import fold

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
def character_class(code: int) -> int:
    """The class of a code point, the same for words and tokens but for `_`."""
    if any(first <= code <= last for first, last in SPACE_RANGES):
        return SPACE
    if code < 0x80:
        return LETTER if chr(code).isalnum() else SIGN
    if any(first <= code <= last for first, last in ALONE_RANGES):
        return ALONE
    return SIGN if any(first <= code <= last for first, last in SIGN_RANGES) else LETTER


def units_of(text: str, shingle: Shingle) -> list[str]:
    """The characters, words or tokens of a text."""
    if shingle.unit != "token":
        text = fold(text)
    if shingle.unit == "character":
        return [_lower(char) for char in text if character_class(ord(char)) != SPACE]
    units: list[str] = []
    word = ""
    for char in text:
        kind = LETTER if shingle.unit == "token" and char == "_" else character_class(ord(char))
        if kind == LETTER:
            word += _lower(char) if shingle.unit == "word" else char
            continue
        if word:
            units.append(word)
            word = ""
        if kind == ALONE or (kind == SIGN and shingle.unit == "token"):
            units.append(char)
    return [*units, word] if word else units


def shingle_set(text: str, channel: str, config: DedupConfig | None = None) -> set[tuple[str, ...]]:
    """The shingles of a text."""
    shingle = (config or DedupConfig()).shingle(channel)
    units = units_of(text, shingle)
    if 0 < len(units) < shingle.length:
        return {tuple(units)}
    return {tuple(units[at : at + shingle.length]) for at in range(len(units) - shingle.length + 1)}


def jaccard(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> float:
    """Size of the intersection over size of the union; 0 when both are empty."""
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def _lower(char: str) -> str:
    return char.lower() if "A" <= char <= "Z" else char
