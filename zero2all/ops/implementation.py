"""What the registry knows about one way to compute an operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def runs_anywhere(device: str) -> str | None:
    """The probe of an implementation that needs nothing but torch."""
    del device
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of one operator."""

    name: str
    function: Callable[..., Any]
    probe: Callable[[str], str | None] = runs_anywhere
    """Given the device type ('cpu', 'cuda'): None when it can run there, else the reason why not."""
