"""Ctrl-C, SIGTERM and SIGHUP (a closed terminal) as a request that the loop reads, not as an exception in a step.

One cause often sends several signals: a service manager signals a launcher and its processes at once, a shell whose
terminal has closed forwards SIGHUP while the system sends it too. Signals within a second are therefore one request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from zero2all.common.language import translate as t
from zero2all.common.signals import stop_signals_to

TOGETHER_SECONDS = 1.0
"""Signals that follow the first within this time have the same cause."""


class StopRequest:
    """Set by a signal, read at every step. A second Ctrl-C or SIGTERM after that second stops at once."""

    requested = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = 0.0

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        now = self._clock()
        if self.requested:
            if number == signal.SIGHUP or now - self._first < TOGETHER_SECONDS:
                return
            raise KeyboardInterrupt
        self.requested, self._first = True, now
        if os.environ.get("RANK", "0") != "0":
            return  # only rank 0 prints
        text = t(f"{signal.Signals(number).name}: stopping after this step (send it again to stop at once)")
        with suppress(OSError):  # not print(): the signal may have interrupted one
            os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn signals into a request while the block runs."""
    request = StopRequest()
    with stop_signals_to(request):
        yield request
