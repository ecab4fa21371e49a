"""Documents to arrays of code points, in blocks of bounded size. What is repaired or removed is counted here.

A block is code points as uint32, with `DOCUMENT_END` after every document. A document longer than a block is cut into
chunks that end where a line ends and the next begins with something visible: no pretoken crosses such a place, so the
pretokens are those of the whole document. Only a text without any such place has to be in memory whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numba import njit

from zero2all.tokenizer.text import BREAK_CHARACTER, TextCleaner, well_formed

BLOCK_CHARACTERS = 1 << 15
"""Characters of a block, about: 256 KB as code points, little enough to be reused from the heap."""

_SAFE_PLACE = re.compile(r"\n(?=[!-~\u4e00-\u9fff])")


class BlockReader:
    """Turns documents into blocks; may be used by several threads at once.

    `forbidden` are the control tokens: a string that spells one is removed, and the text on its two sides is not read
    as neighbours.
    """

    def __init__(self, normalisation: str = "none", forbidden: Sequence[str] = ()) -> None:
        self._cleaner = TextCleaner(normalisation, forbidden)

    def codes(self, texts: list[str]) -> tuple[np.ndarray, Counter[str]]:
        """The block of these documents, and what was done to them."""
        counts: Counter[str] = Counter()
        codes = _encoded(texts)
        # Surrogates other than our own marks at the ends mean that a document needs repair.
        if _surrogates(codes) != len(texts):
            repaired = [well_formed(text) for text in texts]
            counts["repaired_documents"] = sum(new is not old for new, old in zip(repaired, texts, strict=True))
            texts = repaired
            codes = _encoded(texts)
        cleaned = [self._cleaner.clean(text, counts) for text in texts]
        if any(new is not old for new, old in zip(cleaned, texts, strict=True)):
            codes = _encoded(cleaned)
        return codes, counts


def batches(texts: Iterable[str], characters: int = BLOCK_CHARACTERS) -> Iterator[tuple[list[str], int]]:
    """Documents in batches of about `characters` characters, and how many of them begin in each batch.

    The chunks of a long document count as one document: the first of them.
    """
    batch: list[str] = []
    held = begun = 0
    for text in texts:
        begun += 1
        for chunk in _chunks(text, characters) if len(text) > 4 * characters else (text,):
            batch.append(chunk)
            held += len(chunk)
            if held >= characters:
                yield batch, begun
                batch, held, begun = [], 0, 0
    if batch:
        yield batch, begun


def _chunks(text: str, characters: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        place = _SAFE_PLACE.search(text, start + characters)
        end = place.end() if place else len(text)
        yield text[start:end]
        start = end


@njit(cache=True, nogil=True)
def _surrogates(codes):  # type: ignore[no-untyped-def]
    """How many code points of a block are surrogates."""
    found = 0
    for code in codes:
        found += (code >> np.uint32(11)) == np.uint32(0xD800 >> 11)
    return found


@njit(cache=True, nogil=True)
def utf8_bytes(codes):  # type: ignore[no-untyped-def]
    """The size of a block in UTF-8, document ends counted as if they were text."""
    size = 0
    for code in codes:
        size += 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)
    return size


def _encoded(texts: list[str]) -> np.ndarray:
    return np.frombuffer(BREAK_CHARACTER.join([*texts, ""]).encode("utf-32-le", "surrogatepass"), np.uint32)
