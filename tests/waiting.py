"""A test waits for an event, not for a time: the limit is there for a hang only."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    is_so: Callable[[], object], seconds: float = 300.0, why: Callable[[], object] = lambda: "waited too long"
) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + seconds, why()
        time.sleep(0.01)
    return time.monotonic() - begun
