"""The valid split: a record is held out when its key falls below `valid_share`.

The key is a hash of the folded letters and digits (`dedup/fold.py`). The choice depends on the text only, so it is the
same in every build, and a text can never be on both sides, in whatever width, punctuation or simplified or traditional
characters. A source of at least 20 records holds out at least one (the one with the smallest key), a smaller one none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MIN_RECORDS_FOR_VALID = 20
"""A source with fewer records holds none out; one with at least as many holds out at least one."""


@dataclass(frozen=True)
class Split:
    """Which records of one source are held out."""

    below: int
    """Records whose key, read as a fraction of 2^64, lies below this number are held out."""

    def is_valid(self, keys: np.ndarray) -> np.ndarray:
        """True where a record is held out."""
        held_out: np.ndarray = keys < np.uint64(self.below)
        return held_out


class SplitChoice:
    """Sees the keys of all kept records of a source and then says how it is split."""

    def __init__(self, valid_share: float) -> None:
        self._below = int(valid_share * (1 << 64))
        self._kept = self._held_out = 0
        self._smallest = (1 << 64) - 1

    def look(self, keys: np.ndarray) -> None:
        """Take some kept records into account."""
        if len(keys):
            self._kept += len(keys)
            self._held_out += int((keys < np.uint64(self._below)).sum())
            self._smallest = min(self._smallest, int(keys.min()))

    def result(self) -> Split:
        """The split of this source."""
        if not self._below or self._kept < MIN_RECORDS_FOR_VALID:
            return Split(0)
        return Split(self._below if self._held_out else self._smallest + 1)
