"""The valid split: a record is held out when its key falls below `valid_share`.

The key is a hash of the folded letters and digits (`dedup/fold.py`), so the choice depends on the text only, and a text
is never on both sides, in whatever width, punctuation or simplified or traditional characters. A source of at least 20
records holds out at least one (the one with the smallest key), a smaller one none.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def choose_split(valid_share: float, keys_of_segments: Iterable[np.ndarray]) -> Split:
    """The split of a source with these records."""
    below = int(valid_share * (1 << 64))
    records, smallest = 0, (1 << 64) - 1
    for keys in keys_of_segments:
        if len(keys):
            records += len(keys)
            smallest = min(smallest, int(keys.min()))
    if not below or records < MIN_RECORDS_FOR_VALID:
        return Split(0)
    return Split(max(below, smallest + 1))
