"""Amounts of text and memory as people write them: `2GB`, `500 MB`, `1.5GiB`, or a plain number of bytes."""

from __future__ import annotations

import re

from zero2all.common.errors import BadInputError

_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int | None:
    """The number of bytes that `text` says, or None. KB, MB and GB are powers of 1000, KiB, MiB and GiB of 1024."""
    if isinstance(text, int):
        return text if text > 0 else None
    found = _AMOUNT.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        return None
    amount = int(float(found[1]) * _UNITS[found[2].lower()])
    return amount if amount > 0 else None


class TooFewPiecesError(BadInputError):
    """The text does not have enough pieces for the vocabulary that was asked for."""

    def __init__(self, message: str, largest: int) -> None:
        super().__init__(message)
        self.largest = largest
        """The most ids this text can support."""
