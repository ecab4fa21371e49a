"""Signals to a program at a moment that it finds itself: a test that watches from outside may come too late."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def signal_when(is_time: Callable[[], bool], number: int = signal.SIGKILL, after: float = 0.0) -> None:
    """Send this process a signal, once, `after` seconds after its first file operation at which it is time. SIGKILL
    goes to all processes of its session if it leads one."""
    is_looking = False

    def look(event: str, _arguments: object) -> None:
        nonlocal is_looking
        if is_looking or not event.startswith(("open", "os.")):
            return
        is_looking, is_now = True, False  # looking is a file operation too
        with suppress(FileNotFoundError):
            is_now = is_time()
        is_looking = is_now
        if is_now:
            time.sleep(after)
            if number == signal.SIGKILL and os.getsid(0) == os.getpid():
                os.killpg(0, number)
            os.kill(os.getpid(), number)

    sys.addaudithook(look)


def signal_in_step(count: int, number: int, after: float = 0.0) -> None:
    """Send this process, which will train, a signal in its step number `count`, or `after` seconds after the step
    began, however few there are left."""
    from zero2all.train import trainer

    step, calls = trainer.train_step, itertools.count(1)

    def counted(*given: Any, **options: Any) -> Any:
        call = next(calls)
        if call == count and after:
            threading.Thread(target=lambda: (time.sleep(after), os.kill(os.getpid(), number)), daemon=True).start()
        elif call == count or (after and call == count + 4):
            os.kill(os.getpid(), number)
        return step(*given, **options)

    trainer.train_step = counted
