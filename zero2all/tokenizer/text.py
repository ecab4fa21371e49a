"""Text as a trainer may read it: UTF-8 can hold it, and nothing in it spells a control token.

A Python string may carry lone surrogates (half an emoji from a broken JSON escape, a byte of a file that was no UTF-8);
`tokenizers` refuses them with a message about types, after hours of packing. Strings that spell a control token are
taken out of training text, or their fragments would become pieces; each leaves a break, so nothing grows together.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.progress import Bar
from zero2all.tokenizer.parts import TextPart


def well_formed(text: str) -> str:
    """`text` itself, or, where it has surrogates, a copy with pairs joined and each lone one turned into U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclass
class CountedText:
    """The training text of all parts as one stream, counting what goes by and what is repaired."""

    parts: Sequence[TextPart]
    forbidden: Sequence[str]
    normalisation: str = "none"
    documents: int = 0
    text_bytes: int = 0
    repaired_documents: int = 0
    control_strings_removed: int = 0
    _spelled: re.Pattern[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.forbidden:
            self._spelled = re.compile("|".join(re.escape(name) for name in self.forbidden))

    def stream(self, bar: Bar) -> Iterator[str]:
        """Every document, cut where a control token was spelled."""
        for part in self.parts:
            for given in part.texts():
                text = well_formed(given)
                self.repaired_documents += text is not given
                size = len(text.encode())
                self.documents += 1
                self.text_bytes += size
                yield from self._clean(text)
                bar.advance(size)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "bytes": self.text_bytes,
            "documents": self.documents,
            "documents_with_repaired_surrogates": self.repaired_documents,
            "control_strings_removed": self.control_strings_removed,
        }

    def _clean(self, text: str) -> Iterable[str]:
        if self.normalisation != "none":
            text = unicodedata.normalize("NFC" if self.normalisation == "nfc" else "NFKC", text)
        if self._spelled is None:
            return (text,)
        pieces = self._spelled.split(text)
        self.control_strings_removed += len(pieces) - 1
        return filter(None, pieces)
