"""Where the ranks of a supervised command print, so that it looks like one program in the foreground.

What a rank prints goes through pipes; the first one gets a terminal of its own for its bar, as large as the real one.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from contextlib import ExitStack, suppress


def output(stream: int, number: int, stack: ExitStack) -> tuple[int, int]:
    """Where rank `number` prints: a pipe, or for the first rank of a command in a terminal another terminal, so that it
    still draws its bar. The reading end is closed with the stack."""
    if number == 0 and os.isatty(stream):
        read, write = os.openpty()
        tty.setraw(write)
        copy_size(stream, write)
    else:
        read, write = os.pipe()
    stack.callback(os.close, read)
    return read, write


def is_one_terminal() -> bool:
    """Whether standard output and errors are the same terminal."""
    return os.isatty(1) and os.isatty(2) and os.ttyname(1) == os.ttyname(2)


def copy_size(source: int, target: int) -> None:
    """Give a terminal the size of another; nothing where one of them is none."""
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def write_all(target: int, data: bytes) -> None:
    """Write until all is written, or nobody reads it any more."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except OSError:
            return
