"""What the dedup stage can be told, and what every number of it means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

VALUES = 256
"""Minhash values of a signature, one byte each. The estimate of a Jaccard of 0.8 has a standard deviation of 0.025."""

Unit = Literal["character", "word", "token"]


@dataclass(frozen=True)
class Shingle:
    """What a text is cut into before two texts are compared; see `fold.py` for the exact definition."""

    unit: Unit
    """character: code points without white space; word: runs of letters and digits; token: words and signs."""
    length: int
    """Units in one shingle."""


@dataclass(frozen=True)
class DedupConfig:
    """How duplicates are found."""

    exact: bool = True
    """Drop records whose text equals that of another record, white space aside."""
    near: Literal["all", "held_out", "off"] = "all"
    """all: of every group of similar records the best stays, so whatever is held out has no near duplicate in train;
    held_out: only train records similar to a held-out one are dropped; off: similar records stay, and some of them may
    be on both sides of the split."""
    jaccard: float = 0.8
    """Records whose shingle sets are at least this similar are duplicates (size of intersection over union)."""
    bands: int = 16
    """Two records are compared when at least one band of their signatures is equal."""
    rows: int = 6
    """Values in a band. 16 bands of 6 bring together 99.2 % of the pairs at Jaccard 0.8, 1.2 % of those at 0.3."""
    character_ngram: int = 5
    """Characters in a shingle of the zh channel."""
    word_ngram: int = 3
    """Words in a shingle of the en channel and of every channel without a rule of its own."""
    token_ngram: int = 5
    """Tokens in a shingle of the code channel."""

    def problems(self) -> list[str]:
        """Everything wrong with this config, one sentence each."""
        found = []
        if self.near not in ("all", "held_out", "off"):
            found.append(f"near is {self.near!r}; expected all, held_out or off")
        if not 0.3 <= self.jaccard <= 1:
            found.append(f"jaccard is {self.jaccard}; expected 0.3 to 1")
        if self.bands < 1 or self.rows < 1 or self.bands * self.rows > VALUES:
            found.append(f"bands x rows is {self.bands} x {self.rows}; expected a product of 1 to {VALUES}")
        lengths = {name: getattr(self, name) for name in ("character_ngram", "word_ngram", "token_ngram")}
        return found + [f"{name} is {n}; expected 1 to 32" for name, n in lengths.items() if not 1 <= n <= 32]

    def shingle(self, channel: str) -> Shingle:
        """How texts of `channel` are cut."""
        if channel == "zh":
            return Shingle("character", self.character_ngram)
        if channel == "code":
            return Shingle("token", self.token_ngram)
        return Shingle("word", self.word_ngram)

    @property
    def needed_matches(self) -> int:
        """Equal values of two signatures from which they are duplicates.

        The least estimate accepted is two standard deviations below `jaccard`, so that 98 % of the pairs at exactly
        that similarity are; unequal minima agree in 1 byte of 256.
        """
        accepted = self.jaccard - 2 * math.sqrt(self.jaccard * (1 - self.jaccard) / VALUES)
        return math.ceil(VALUES * (accepted + (1 - accepted) / 256))


def jaccard_estimate(matches: int) -> float:
    """The Jaccard similarity estimated from the number of equal values."""
    return max(0.0, (matches / VALUES - 1 / 256) / (1 - 1 / 256))
