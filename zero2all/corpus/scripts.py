"""Which script a text is written in, from the first bytes of its UTF-8 characters.

The middle of a long text stands for the whole. Only the larger scripts have a name; the rest is `other`. A text with
more than a tenth of kana among its Han and kana is Japanese, though most of its letters may be Han.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from zero2all.corpus.dedup.signatures import Encoded, encode

SCRIPTS = ("none", "han", "latin", "kana", "hangul", "cyrillic", "arabic", "devanagari", "greek", "other")
"""Names of the numbers `scripts_of` returns."""

SAMPLED_BYTES = 1200

NONE, HAN, LATIN, KANA, HANGUL, CYRILLIC, ARABIC, DEVANAGARI, GREEK, OTHER = range(len(SCRIPTS))


def scripts_of(texts: Sequence[str]) -> np.ndarray:
    """(n,) uint8: the number in `SCRIPTS` of the script that most letters in the middle of each text belong to."""
    return scripts_of_encoded(encode(texts))


def scripts_of_encoded(encoded: Encoded) -> np.ndarray:
    """`scripts_of` for texts that are encoded already."""
    from zero2all.corpus.script_kernel import find_scripts

    out = np.empty(encoded.offsets.size - 1, np.uint8)
    find_scripts(encoded.buffer, encoded.offsets, _classes(), SAMPLED_BYTES, len(SCRIPTS), out)
    return out


@cache
def _classes() -> np.ndarray:
    """For each possible byte, the script of the character it begins; NONE where it begins no letter."""
    table = np.zeros(256, np.uint8)
    ranges = {
        LATIN: [(0x41, 0x5A), (0x61, 0x7A), (0xC3, 0xC9)],
        GREEK: [(0xCE, 0xCF)],
        CYRILLIC: [(0xD0, 0xD3)],
        ARABIC: [(0xD8, 0xDB)],
        OTHER: [(0xD4, 0xD7), (0xDC, 0xDF), (0xE1, 0xE1)],
        HAN: [(0xE4, 0xE9)],
        HANGUL: [(0xEA, 0xED)],
    }
    for script, pairs in ranges.items():
        for first, last in pairs:
            table[first : last + 1] = script
    return table
