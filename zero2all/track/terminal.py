"""A run in the terminal, live, until the person has seen enough.

Twice a second the reader is asked for what is new; a frame is drawn when there was something, when the window changed
its size, or when a second has passed. It draws on the terminal's second screen, so what was there before comes back.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from zero2all.track.frame import frame
from zero2all.track.reader import RunReader

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_SECONDS = 1.0
LOOK_SECONDS = 0.5
REST_PER_FRAME = 4
"""Pauses are this many times as long as a frame took: a run of a million rows must not keep a core busy."""


def print_frame(reader: RunReader, console: Console, note: str = "") -> None:
    """Print one picture as large as the terminal (80 x 24 where there is none) and be done."""
    size = console.size
    for line in frame(reader, size.width, size.height - 1, time.time(), note):  # one line for the prompt
        console.print(line, soft_wrap=True)


def watch(
    reader: RunReader,
    console: Console,
    note: Callable[[], str] = str,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Show the run until Ctrl-C or `q`. `note` is asked before each frame for a remark, e.g. about the connection."""
    from rich.console import Group
    from rich.live import Live

    drawn_at, drawn_size, cost = 0.0, (0, 0), 0.0
    with _single_keys() as pressed, Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        pending = True
        while True:
            is_new = reader.refresh()
            size = (console.size.width, console.size.height)
            began = time.monotonic()
            pending |= is_new or size != drawn_size or began - drawn_at >= REDRAW_SECONDS
            if pending and began - drawn_at >= REST_PER_FRAME * cost:
                live.update(Group(*frame(reader, *size, time.time(), note())), refresh=True)
                drawn_at, drawn_size, pending = time.monotonic(), size, False
                cost = drawn_at - began
            if pressed(look_seconds) in ("q", "Q"):
                return


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key for some seconds; without a terminal to read from it only waits."""
    if not sys.stdin.isatty():
        yield _only_wait
        return
    import termios
    import tty

    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)

    def pressed(seconds: float) -> str:
        if not select.select([handle], [], [], seconds)[0]:
            return ""
        key = os.read(handle, 64)
        if not key:  # the terminal is gone
            raise KeyboardInterrupt
        return key[:1].decode("latin-1")

    tty.setcbreak(handle)
    try:
        yield pressed
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
