"""What the trainer hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LearnedBpe:
    """A byte-level BPE vocabulary without control tokens."""

    pieces: list[bytes]
    """By place: the 256 bytes (byte b at place b), prefixes of characters, characters, learned pieces."""
    merges: list[tuple[int, int]]
    """Places in `pieces`, in the order of ranks; merge k makes `pieces[256 + k]`."""
    threshold: int
    """Neighbouring characters that occur together fewer times than this were cut apart; 0: nothing was cut."""
    last_count: int
    """How often the pair of the last learned merge occurred; never below `threshold`."""
    exact: bool
    """Proven equal to what training without any cut gives. False only after an explicit `exact=False`."""
    facts: dict[str, Any]
    """What the manifest records: sizes, counts of everything repaired or removed, spills, seconds. All JSON."""
