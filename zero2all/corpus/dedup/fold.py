"""Folding: the characters that mean the same when two texts are compared, and become one.

- Full-width and half-width forms, vertical and small punctuation, compatibility and radical forms of Han: what NFKC
  makes of them.
- Punctuation of Chinese and Western typesetting: 。 is a full stop, 「 a quotation mark, — a hyphen.
- Traditional Han characters become the simplified ones (`han_forms.py`). Where one simplified
  character stands for several traditional ones (发 for 發 and 髮) they all become it.

Only signatures and the choice of what is held out see folded text; what is written is not touched. Code is not folded.
"""

from __future__ import annotations

import unicodedata
from functools import cache

import numpy as np

from zero2all.corpus.han_forms import simplified_of

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
