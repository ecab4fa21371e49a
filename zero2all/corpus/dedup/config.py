"""What the dedup stage can be told, and what every number of it means."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

VALUES = 256
"""Minhash values of a signature, one byte each. The estimate of a Jaccard of 0.8 has a standard deviation of 0.025."""

Unit = Literal["character", "word", "token"]
ANCHORS: dict[Unit, tuple[int, int]] = {"character": (16, 24), "word": (7, 6), "token": (12, 12)}
"""Units in a gram, and how many consecutive grams give one anchor, the least hash of them: two texts with a common run
of gram + window - 1 units (39 characters, 12 words, 23 tokens) have a common anchor."""


@dataclass(frozen=True)
class Shingle:
    """What a text is cut into before two texts are compared; see `fold.py` for the exact definition."""

    unit: Unit
    """character: code points without white space; word: runs of letters and digits; token: words and signs."""
    length: int
    """Units in one shingle."""


@dataclass(frozen=True)
class Passages:
    """What is done with passages that stand in the text before, also within one record."""

    min_chars: int | None = None
    """Passages of at least so many characters, equal character for character, are cut out of all records but the first.
    None: they stay. Costs three times the CPU time of the rest of the build. A record
    of which fewer than 50 characters are left is dropped."""


@dataclass(frozen=True)
class DedupConfig:
    """How duplicates are found."""

    exact: bool = True
    """Drop records whose text equals that of another record, white space aside."""
    near: Literal["all", "held_out", "off"] = "all"
    """all: of every group of similar records the best stays; held_out: they stay; off: they stay, and what is held out
    may share text with train. With the first two, a record that shares text with train is not held out."""
    jaccard: float = 0.8
    """Records whose shingle sets are at least this similar are duplicates (size of intersection over union)."""
    character_jaccard: float = 0.86
    """The same for the zh channel, whose short shingles make any two texts more alike."""
    bands: int = 16
    """Two records are compared when at least one band of their signatures is equal."""
    rows: int = 6
    """Values in a band. 16 bands of 6 bring together 99.2 % of the pairs at Jaccard 0.8, 1.2 % of those at 0.3."""
    character_ngram: int = 2
    """Characters in a shingle of the zh channel. A changed character breaks as many shingles: with 5 % of them changed
    here and there, shingles of 5 leave a similarity of 0.65, of 2 one of 0.85."""
    word_ngram: int = 3
    """Words in a shingle of the en channel and of every channel without a rule of its own."""
    token_ngram: int = 5
    """Tokens in a shingle of the code channel."""
    passages: Passages = field(default_factory=Passages)
    """Repeated passages within records that stay."""

    def problems(self) -> list[str]:
        """Everything wrong with this config, one sentence each."""
        found = []
        if self.near not in ("all", "held_out", "off"):
            found.append(f"near is {self.near!r}; expected all, held_out or off")
        least = {name: getattr(self, name) for name in ("jaccard", "character_jaccard")}
        found += [f"{name} is {value}; expected 0.3 to 1" for name, value in least.items() if not 0.3 <= value <= 1]
        if self.bands < 1 or self.rows < 1 or self.bands * self.rows > VALUES:
            found.append(f"bands x rows is {self.bands} x {self.rows}; expected a product of 1 to {VALUES}")
        shortest = self.passages.min_chars
        if shortest is not None and not 20 <= shortest <= 1 << 20:
            found.append(f"passages.min_chars is {shortest}; expected 20 to {1 << 20}")
        lengths = {name: getattr(self, name) for name in ("character_ngram", "word_ngram", "token_ngram")}
        return found + [f"{name} is {n}; expected 1 to 32" for name, n in lengths.items() if not 1 <= n <= 32]

    @property
    def signs(self) -> bool:
        """Whether near duplicates are dropped, which takes signatures."""
        return self.near == "all"

    def shingle(self, channel: str) -> Shingle:
        """How texts of `channel` are cut."""
        if channel == "zh":
            return Shingle("character", self.character_ngram)
        if channel == "code":
            return Shingle("token", self.token_ngram)
        return Shingle("word", self.word_ngram)

    def needed(self, channel: str) -> tuple[int, float]:
        """Equal values of two signatures, and length of the shorter text by that of the longer, from which on records
        of `channel` are duplicates.

        The least estimate accepted is two standard deviations below `jaccard`, so that 98 % of the pairs at exactly
        that similarity are; unequal minima agree in 1 byte of 256. Pages of one kind often have the same short
        shingles, but not the same length.
        """
        is_short = self.shingle(channel).unit == "character"
        jaccard = self.character_jaccard if is_short else self.jaccard
        accepted = jaccard - 2 * math.sqrt(jaccard * (1 - jaccard) / VALUES)
        return math.ceil(VALUES * (accepted + (1 - accepted) / 256)), 0.89 if is_short else 0.0


def jaccard_estimate(matches: int) -> float:
    """The Jaccard similarity estimated from the number of equal values."""
    return max(0.0, (matches / VALUES - 1 / 256) / (1 - 1 / 256))
