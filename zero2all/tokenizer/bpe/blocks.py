"""Documents to arrays of code points, in blocks of bounded size. What is repaired or removed is counted here.

A block is code points as uint32, with `DOCUMENT_END` behind every document. A document longer than a block is handed
over in stretches that end where a line ends and the next begins with something visible: no pre-token crosses such a
place, so the pre-tokens are those of the whole document. Only a text without any such place has to be in memory whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numba import njit

from zero2all.tokenizer.bpe.categories import DOCUMENT_END
from zero2all.tokenizer.text import well_formed

BLOCK_CHARACTERS = 1 << 15
"""A block holds about this many: 256 KB as code points, little enough to be reused from the heap."""

Normalisation = Literal["none", "nfc", "nfkc"]

_SAFE_PLACE = re.compile(r"\n(?=[!-~\u4e00-\u9fff])")
_END = chr(DOCUMENT_END)


@dataclass
class BlockReader:
    """Turns documents into blocks; may be used by several threads at once."""

    normalisation: Normalisation = "none"
    forbidden: Sequence[str] = ()
    """Strings that spell a control token. Each is taken out, and what stood on its sides is not read as neighbours."""
    _spelled: re.Pattern[str] | None = field(init=False, default=None)
    _mark: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if self.forbidden:
            longest_first = sorted(self.forbidden, key=lambda name: (-len(name), name))
            self._spelled = re.compile("|".join(re.escape(name) for name in longest_first))
            self._mark = _common_start(self.forbidden)

    def codes(self, texts: list[str]) -> tuple[np.ndarray, Counter[str]]:
        """The block of these documents, and what was done to them."""
        done: Counter[str] = Counter()
        codes = _encoded(texts)
        # Surrogates other than our own marks at the ends mean that a document needs repair.
        if _surrogates(codes) != len(texts):
            repaired = [well_formed(text) for text in texts]
            done["repaired_documents"] = sum(new is not old for new, old in zip(repaired, texts, strict=True))
            texts = repaired
            codes = _encoded(texts)
        if self.normalisation != "none" or self._spelled is not None:
            prepared = list(self._prepared(texts, done))
            if done["changed"]:
                codes = _encoded(prepared)
        del done["changed"]
        return codes, done

    def _prepared(self, texts: list[str], done: Counter[str]) -> Iterator[str]:
        for given in texts:
            text = given
            # Control strings go first and last: normalising may spell one anew (NFKC makes < of a full-width ＜).
            if self._spelled is not None and self._mark in text and self._spelled.search(text):
                text, found = self._spelled.subn(_END, text)
                done["control_strings_removed"] += found
            if self.normalisation != "none":
                form: Literal["NFC", "NFKC"] = "NFC" if self.normalisation == "nfc" else "NFKC"
                normal = text if text.isascii() else unicodedata.normalize(form, text)
                if normal != text:
                    done["normalised_documents"] += 1
                    text = normal
                    if self._spelled is not None and self._mark in text and self._spelled.search(text):
                        text, found = self._spelled.subn(_END, text)
                        done["control_strings_removed"] += found
            done["changed"] += text is not given
            yield text


def batches(texts: Iterable[str], characters: int = BLOCK_CHARACTERS) -> Iterator[tuple[list[str], int]]:
    """Documents gathered to about `characters` characters, and how many of them begin in the batch.

    The stretches of a long document count as one document: the first of them.
    """
    batch: list[str] = []
    held = begun = 0
    for text in texts:
        begun += 1
        for stretch in _stretches(text, characters) if len(text) > 4 * characters else (text,):
            batch.append(stretch)
            held += len(stretch)
            if held >= characters:
                yield batch, begun
                batch, held, begun = [], 0, 0
    if batch:
        yield batch, begun


def _stretches(text: str, characters: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        place = _SAFE_PLACE.search(text, start + characters)
        end = place.end() if place else len(text)
        yield text[start:end] if start or end < len(text) else text
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
    return np.frombuffer(_END.join([*texts, ""]).encode("utf-32-le", "surrogatepass"), np.uint32)


def _common_start(names: Sequence[str]) -> str:
    """What all names begin with: one fast search for it tells most texts clean."""
    start = min(names, key=len)
    while not all(name.startswith(start) for name in names):
        start = start[:-1]
    return start
