"""Which signals ask a program to stop, and how they are handled for a while."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from zero2all.common.errors import PreemptedError

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def stop_signals_to(handler: Handler, interrupts: bool = True) -> Iterator[None]:
    """Let `handler` have SIGTERM, SIGHUP (unless `nohup` ignores it) and, where it `interrupts`, Ctrl-C.

    Only the main thread may handle signals; in another the block runs without.
    """
    numbers = [signal.SIGINT, signal.SIGTERM] if interrupts else [signal.SIGTERM]
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


def end_before_the_start(number: int, _frame: FrameType | None) -> None:
    """End a run that is still loading its libraries; an exception might be caught in the middle of an import."""
    # In a rank the signal may come from the supervisor, which has said why: a deadline, a notice.
    asked = "stopped" if "LOCAL_RANK" in os.environ else f"got {signal.Signals(number).name}"
    text = f"z2a: {asked} before the run had started. Nothing was changed. Run the same command to start it.\n"
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        with suppress(OSError):
            os.write(sys.stderr.fileno(), text.encode())
    os._exit(PreemptedError.exit_code)
