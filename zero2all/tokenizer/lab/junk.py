"""Pieces that are not worth their id: what each sort is, in words and as a rule.

A piece is put into the first sort that fits. Single bytes are never junk: they are what makes every text encodable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

EXAMPLES = 12

DEFINITIONS = {
    "broken": "not valid UTF-8: begins or ends inside a character (beginnings of characters, which a byte-level "
    "vocabulary needs to build them, included)",
    "repeated": "one character, or two in turn, at least 6 times over (----------, 哈哈哈哈哈哈); white space only "
    "beyond 16",
    "web": "part of an address or of markup: http, www., .com, .html, &nbsp;, </div, %E4 and the like",
    "clause": "a whole Chinese clause: at least 8 Han characters",
    "unused": "none of the above, and not once in the text",
}

_REPEATED = re.compile(r"(.)\1{5,}|(..)\2{5,}", re.DOTALL)
_WEB = re.compile(
    r"https?|www\.|\.(?:com|org|net|html?|php|aspx|cn|jpe?g|png)\b|&(?:nbsp|amp|quot|lt|gt|#\d+)|</?[a-z]+|%[0-9A-F]{2}",
    re.IGNORECASE,
)
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
LONGEST_USEFUL_BLANK = 16
CLAUSE_CHARACTERS = 8


def sort_of(piece: bytes, used: int) -> str | None:
    """The sort of junk that a piece is, or None."""
    if len(piece) < 2:
        return None
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return "broken"
    if text.isspace():
        return "repeated" if len(text) > LONGEST_USEFUL_BLANK else None if used else "unused"
    if _REPEATED.search(text):
        return "repeated"
    if _WEB.search(text):
        return "web"
    if len(_HAN.findall(text)) >= CLAUSE_CHARACTERS:
        return "clause"
    return None if used else "unused"


def junk_report(pieces: Mapping[int, bytes], counts: np.ndarray) -> dict[str, dict[str, Any]]:
    """Per sort: pieces, their share of the vocabulary, how many of them were never used, share of all tokens, examples.

    Examples are the pieces with the most bytes (of `unused`, the first by id: those were learned earliest).
    """
    found: dict[str, list[int]] = {sort: [] for sort in DEFINITIONS}
    for number, piece in pieces.items():
        sort = sort_of(piece, int(counts[number]))
        if sort:
            found[sort].append(number)
    tokens = max(1, int(counts.sum()))
    report = {}
    for sort, numbers in found.items():
        shown = sorted(numbers, key=lambda number: (sort != "unused" and -len(pieces[number]), number))[:EXAMPLES]
        report[sort] = {
            "pieces": len(numbers),
            "share_of_vocabulary": len(numbers) / max(1, len(pieces)),
            "never_used": int(sum(counts[number] == 0 for number in numbers)),
            "share_of_tokens": int(sum(int(counts[number]) for number in numbers)) / tokens,
            "examples": [
                {"id": number, "piece": pieces[number].decode("utf-8", "backslashreplace")} for number in shown
            ],
        }
    return report
