"""Shingles and exact similarities in plain Python: what the kernels of `zero2all.corpus.dedup` are compared with."""

from __future__ import annotations

from functools import cache

from zero2all.corpus.dedup.config import DedupConfig, Shingle
from zero2all.corpus.dedup.fold import ALONE, ALONE_RANGES, LETTER, SIGN, SIGN_RANGES, SPACE, SPACE_RANGES, fold


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
