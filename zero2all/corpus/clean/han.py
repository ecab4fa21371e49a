"""Which Han characters go together: 24,000 frequent pairs, by which text that is no language is recognised.

`han_pairs.txt` has a line per character: the character, then those that often follow it, in simplified forms. They are
the pairs with the greatest b · (log2(b / expected) − 0.5), b being the weighted mean of their shares in Tang and Song
verse (the chinese-poetry collection; weight 1.6), classical and modern prose (NiuTrans' Classical-Modern; 1.3 and 0.9)
and the words of a dictionary with their frequencies (jieba's; 0.8). All three are under the MIT licence; only counts
were taken.

In running text 25 % (verse) to 45 % (modern prose) of neighbouring characters are such a pair, and 3 to 6 % of
characters six places apart. In text whose characters were drawn at random the two shares are the same.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np

from zero2all.common.files import package_text
from zero2all.corpus.dedup.fold import simplified_of

Array = np.ndarray[Any, np.dtype[Any]]

CODES = 0xA000
"""Characters from here on have no pairs."""
PAIR_BITS = 20
COMMON = 800


@cache
def pair_tables() -> tuple[Array, Array]:
    """Code point -> random number, the same for both forms of a character, 0 if it is in no pair; and the pairs.

    The pairs are a set of bits: the number of a pair is the upper `PAIR_BITS` bits of (31 · first + second) mod 2³².
    """
    lines = package_text(__package__, "han_pairs.txt").splitlines()
    codes = np.zeros(CODES, np.uint32)
    firsts = [line[0] for line in lines for _ in line[1:]]
    seconds = [follower for line in lines for follower in line[1:]]
    members = np.array(sorted({ord(character) for character in firsts + seconds}), np.uint64)
    codes[members] = _random(members)
    forms = simplified_of()
    codes[list(forms)] = codes[list(forms.values())]
    one, two = (codes[[ord(character) for character in half]].astype(np.uint64) for half in (firsts, seconds))
    places = ((one * np.uint64(31) + two) & np.uint64(0xFFFF_FFFF)) >> np.uint64(32 - PAIR_BITS)
    pairs = np.zeros(1 << PAIR_BITS, bool)
    pairs[places] = True
    return codes, np.packbits(pairs, bitorder="little")


def pair_evidence(text: str) -> list[float]:
    """For each character of a text how much it looks like Han in running text, for Han: 1.2 in a frequent pair, 0.5
    one of the `COMMON` characters with most of them, -0.3 another one, -1 one without any."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes, pairs = pair_tables()
    places = np.minimum(points, CODES - 1)
    code = codes[places].astype(np.uint64)
    pair = ((code[:-1] * np.uint64(31) + code[1:]) & np.uint64(0xFFFF_FFFF)) >> np.uint64(32 - PAIR_BITS)
    is_pair = (pairs[pair >> np.uint64(3)] >> (pair & np.uint64(7)).astype(np.uint8)) & 1
    is_pair = (is_pair > 0) & (code[:-1] > 0) & (code[1:] > 0)
    evidence = np.where(code > 0, np.where(_is_common()[places], 0.5, -0.3), -1.0)
    evidence[:-1][is_pair] = 1.2
    evidence[1:][is_pair] = 1.2
    found: list[float] = evidence.tolist()
    return found


@cache
def _is_common() -> Array:
    lines = package_text(__package__, "han_pairs.txt").splitlines()
    counts = Counter(character for line in lines for character in line[0] * (len(line) - 1) + line[1:])
    common = {ord(character) for character, _ in counts.most_common(COMMON)}
    found = np.zeros(CODES, bool)
    found[list(common)] = True
    forms = simplified_of()
    found[[form for form, simplified in forms.items() if simplified in common]] = True
    return found


def _random(points: Array) -> Array:
    value = (points + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value ^= value >> np.uint64(29)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    return (value >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
