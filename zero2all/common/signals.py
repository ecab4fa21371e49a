"""Which signals ask a program to stop, how they are handled for a while, and the request that a training loop reads.

One cause often sends several signals: a service manager signals a launcher and its processes at once, a shell whose
terminal has closed forwards SIGHUP while the system sends it too. Signals within a second are therefore one request.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType

from zero2all.common.errors import PreemptedError
from zero2all.common.language import translate as t

Handler = Callable[[int, FrameType | None], None] | signal.Handlers
TOGETHER_SECONDS = 1.0
"""Signals that follow the first within this time have the same cause."""


@contextmanager
def signals_to(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Let these handle signals while the block runs. Only the main thread may; in another the block runs without."""
    try:
        before = [signal.signal(number, handler) for number, handler in handlers.items()]
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, old in zip(handlers, before, strict=True):
            signal.signal(number, old)


@contextmanager
def stop_signals_to(handler: Handler, interrupts: bool = True) -> Iterator[None]:
    """Let `handler` have SIGTERM, SIGHUP (unless `nohup` ignores it) and, where it `interrupts`, Ctrl-C."""
    numbers = [signal.SIGINT, signal.SIGTERM] if interrupts else [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with signals_to(dict.fromkeys(numbers, handler)):
        yield


class StopRequest:
    """Set by a signal, read at every step. A second Ctrl-C or SIGTERM after TOGETHER_SECONDS stops at once."""

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
    """Turn signals into a request while the block runs, not into an exception in the middle of a step."""
    request = StopRequest()
    with stop_signals_to(request):
        yield request


def end_before_the_start(number: int, _frame: FrameType | None) -> None:
    """End a run that is still loading its libraries; an exception might be caught in the middle of an import."""
    name = signal.Signals(number).name
    text = t(f"z2a: got {name} before the run had started. Nothing was changed. Run the same command to start it.")
    if "LOCAL_RANK" in os.environ:  # the signal may come from the supervisor, which has said why: a deadline, a notice
        text = t("z2a: stopped before the run had started. Nothing was changed. Run the same command to start it.")
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
    os._exit(PreemptedError.exit_code)
