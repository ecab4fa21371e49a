"""Which signals ask a program to stop, and how they are handled for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def stop_signals_to(handler: Handler) -> Iterator[None]:
    """Let `handler` have Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) while the block runs.

    A SIGHUP that is ignored stays ignored: that is what `nohup` asks for. Only the main thread may handle signals; in
    another the block runs as it is, since whoever started it handles them.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    try:
        before = [signal.signal(number, handler) for number in numbers]
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, old in zip(numbers, before, strict=True):
            signal.signal(number, old)
