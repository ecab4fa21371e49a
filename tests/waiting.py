"""A test waits for an event, not for a time: the limit is there for a hang only."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any


def wait_until(is_so: Callable[[], object], seconds: float = 300.0, why: Callable[[], object] = str) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() < begun + seconds, f"waited too long {why()}"
        time.sleep(0.01)
    return time.monotonic() - begun


def in_threads(work: Callable[[Any], object], each: Iterable[Any], seconds: float = 300.0) -> None:
    """Do something for each at the same time, and wait for all."""
    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in each]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), seconds, lambda: "somebody waits for ever")
