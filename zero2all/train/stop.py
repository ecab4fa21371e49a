"""Ctrl-C and SIGTERM as a request that the loop reads, and not as an exception in the middle of a step."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """Set by a signal, read at every step. The second signal is not held back."""

    requested = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """What Python calls when the signal comes."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if os.environ.get("RANK", "0") != "0":
            return  # of several processes one speaks
        text = f"\n{signal.Signals(number).name}: stopping after this step (again to stop at once)\n"
        with suppress(OSError):  # past Python's buffers, which may be in the middle of a print
            os.write(sys.stderr.fileno(), text.encode())


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request while the block runs; only the main thread may do so."""
    request = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, request) for number in numbers]
    except ValueError:  # not the main thread: whoever started us handles signals
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
