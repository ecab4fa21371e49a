"""Text as a trainer may read it: UTF-8 can hold it, and nothing in it spells a control token.

A Python string may carry lone surrogates (half an emoji from a broken JSON escape, a byte of a file that is not UTF-8);
`tokenizers` refuses them with a message about types, after hours of packing. Strings that spell a control token are
removed from training text, or their fragments would become pieces. A removed string leaves a break, so the text on its
two sides never becomes one pretoken.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import human_bytes
from zero2all.common.progress import Bar
from zero2all.tokenizer.parts import TextPart

BREAK_CHARACTER = "\ud800"
"""Stands where a control string was removed. Text cannot hold it: surrogates are repaired first."""


class TooFewPiecesError(BadInputError):
    """The text does not have enough pieces for the vocabulary that was asked for."""

    def __init__(self, vocab_size: int, largest: int, text: dict[str, Any], min_piece_count: int) -> None:
        super().__init__(
            f"This text cannot support a vocabulary of {vocab_size:,} ids: {human_bytes(text['bytes'])} in "
            f"{text['documents']:,} documents have pieces (seen at least {min_piece_count} times) for at most "
            f"{largest} ids. Set --vocab-size to {largest} or less, or build the corpus from more text."
        )
        self.largest = largest
        """The most ids this text can support."""


def require_text(text: dict[str, Any]) -> None:
    """Raise when there is no text to train on."""
    if not text["bytes"]:
        raise BadInputError(
            f"There is no text to train a tokenizer on ({text['documents']:,} documents, 0 bytes). Build a "
            "corpus from text files first with `z2a corpus build NAME=PATH`, and check it with `z2a corpus "
            "show`."
        )


def text_facts(text_bytes: int, counts: Counter[str]) -> dict[str, Any]:
    """What the manifest says about the training text."""
    return {
        "bytes": text_bytes,
        "documents": counts["documents"],
        "documents_with_repaired_surrogates": counts["repaired_documents"],
        "control_strings_removed": counts["control_strings_removed"],
    }


def well_formed(text: str) -> str:
    """`text` itself, or, where it has surrogates, a copy with pairs joined and each lone one turned into U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def is_utf8(piece: bytes) -> bool:
    """Whether these bytes are whole characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


class TextCleaner:
    """Normalises well-formed text and replaces each control string in it by a break. Safe for threads."""

    def __init__(self, normalisation: str, forbidden: Sequence[str]) -> None:
        self._form: Any = None if normalisation == "none" else normalisation.upper()
        self._forbidden: re.Pattern[str] | None = None
        if forbidden:
            self._forbidden = re.compile("|".join(map(re.escape, sorted(forbidden, key=len, reverse=True))))
            # Most texts do not have what all of them begin with, which a fast search shows.
            self._start = os.path.commonprefix(list(forbidden))  # noqa: RUF071 (strings, not paths)

    def clean(self, text: str, counts: Counter[str]) -> str:
        """The clean text, the same object if nothing changed; what was done is added to `counts`."""
        # Before and after normalising, which may spell a control string anew: NFKC turns a full-width ＜ into <.
        text = self._without_forbidden(text, counts)
        if self._form and not text.isascii():
            normal = unicodedata.normalize(self._form, text)
            if normal != text:
                counts["normalised_documents"] += 1
                text = self._without_forbidden(normal, counts)
        return text

    def _without_forbidden(self, text: str, counts: Counter[str]) -> str:
        if self._forbidden is None or self._start not in text:
            return text
        cleaned, found = self._forbidden.subn(BREAK_CHARACTER, text)
        counts["control_strings_removed"] += found
        return cleaned if found else text


class CountedText:
    """The training text of all parts as one stream, for the trainers of the libraries; counts what it repairs."""

    def __init__(self, parts: Sequence[TextPart], forbidden: Sequence[str], normalisation: str = "none") -> None:
        self.parts = parts
        self.expected_bytes = sum(part.size_bytes for part in parts)
        self.text_bytes = 0
        self._cleaner = TextCleaner(normalisation, forbidden)
        self._counts: Counter[str] = Counter()

    def stream(self, bar: Bar) -> Iterator[str]:
        """Every document, cut where a control string was removed."""
        for part in self.parts:
            for given in part.texts():
                text = well_formed(given)
                size = len(text.encode())
                self._counts["repaired_documents"] += text is not given
                self._counts["documents"] += 1
                self.text_bytes += size
                yield from filter(None, self._cleaner.clean(text, self._counts).split(BREAK_CHARACTER))
                bar.advance(size)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return text_facts(self.text_bytes, self._counts)
