"""Repair, drop reasons and exact duplicates.

Repair only ever removes characters, so bytes in = bytes kept + bytes repaired + bytes dropped can be checked.
Duplicates are found by the xxh3_128 of the text with its white space collapsed, over the whole build and in the
order the sources were given: the first copy stays. The set of digests costs 83 to 97 bytes of memory a document
(tracemalloc, 0.5 to 1.4 million digests, Python 3.11).
"""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

DIGEST_BYTES = 16
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]+")
"""Control characters but newline and tab, lone surrogates, byte order marks and non-characters."""


def repair(text: str) -> str:
    """`text` with one kind of line end, no unwanted characters, and no white space at either end."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return UNWANTED.sub("", text).strip()


def text_digest(text: str) -> bytes:
    """Names a text: equal for texts that differ only in white space."""
    return xxhash.xxh3_128_digest(" ".join(text.split()).encode())


class Cleaner:
    """Decides on one repaired text at a time, and remembers which texts were kept."""

    def __init__(self, min_chars: int) -> None:
        self.min_chars = min_chars
        self._kept: set[bytes] = set()

    def drop_reason(self, text: str, digest: bytes) -> str | None:
        """Why this repaired text is not kept; None when it is, and then a second copy will be a duplicate."""
        if not text:
            return "empty"
        if len(text) < self.min_chars:
            return "too_short"
        if digest in self._kept:
            return "duplicate"
        self._kept.add(digest)
        return None

    def restore(self, digests_file: Path) -> None:
        """Remember the texts of a source that an earlier run finished."""
        with open(digests_file, "rb") as file:
            while piece := file.read(DIGEST_BYTES << 16):
                self._kept.update(piece[at : at + DIGEST_BYTES] for at in range(0, len(piece), DIGEST_BYTES))
