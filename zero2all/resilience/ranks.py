"""The ranks of one attempt as processes of this machine: start them, signal them, pass on what they print, end them.

Nothing survives the supervisor: each rank stops (and saves) when its pipe closes, and a small guard process, which
waits for the same, kills after GUARD_SECONDS what is still there: ranks that are stopped or hang. Linux's parent-death
signal would leave no time for a save.

What a rank prints goes through pipes; the first one gets a terminal of its own for its bar, as large as the real one,
so that the command looks like one program in the foreground.
"""

import fcntl
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import tty
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO

from zero2all.resilience.heartbeat import HEARTBEAT, Slots, heartbeat_file
from zero2all.resilience.warm import WarmRank

GUARD_SECONDS = 4.0
KEPT_LINES = 200
REAL_PYTHON = sys.executable
GUARD = """
import os, sys, time
os.read(int(sys.argv[1]), 1)
end, groups = time.monotonic() + float(sys.argv[2]), [int(word) for word in sys.argv[3:]]
def send(group, number):
    try: os.killpg(group, number)
    except OSError: return False
    return True
while time.monotonic() < end and any([send(group, 0) for group in groups]): time.sleep(0.05)
for group in groups: send(group, 9)
"""

Environment = tuple[Mapping[str, str], Sequence[int]]
"""Variables of one rank, RANK among them, and descriptors that it inherits."""
StartWarm = Callable[[Sequence[str], Mapping[str, str], Mapping[int, int]], WarmRank | None]
"""(command, variables, descriptors) -> a rank forked from a warm process, or None: start a new one."""


@dataclass
class Rank:
    """One started process."""

    name: int
    """Its number among all machines; in `RankProcesses` it is known by its place on this one."""
    process: subprocess.Popen[bytes] | WarmRank
    pipe: int
    stacks: IO[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    beats: int = -1
    """At the last look."""
    ended: float = 0.0


class RankProcesses(list[Rank]):
    """The processes that were started, by their place on this machine; the stack ends them."""

    def __init__(self, count: int, stack: ExitStack) -> None:
        super().__init__()
        self._stack, self._file = stack, heartbeat_file(count)
        stack.callback(os.close, self._file)
        self.slots = Slots(self._file, count)
        stack.callback(self.slots.close)
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._targets: dict[int, tuple[Rank, int]] = {}
        """By the descriptor that is read here: the rank that writes into it, and where that goes."""
        stack.callback(self.end)

    def start(
        self, command: Sequence[str], environment: Environment, streams: Sequence[int], start_warm: StartWarm
    ) -> None:
        """Start the next rank; what it prints on `streams` is read here and passed on."""
        (variables, inherited), number = environment, len(self)
        ends, held = os.pipe()
        self._stack.callback(os.close, held)
        stacks = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        outputs = [_output(stream, number, self._stack) for stream in streams]
        descriptors = (self._file, number, ends, stacks.fileno())
        variables = {
            "TORCH_FR_BUFFER_SIZE": "2000",  # torch's flight recorder, for the page of a hang
            **os.environ,
            **variables,
            HEARTBEAT: ",".join(map(str, descriptors)),
        }
        kept = [*inherited, self._file, ends, stacks.fileno()]
        prints = {stream: write for stream, (_, write) in zip(streams, outputs, strict=True)}
        if tuple(streams) == (2,) and number == 0 and _is_one_terminal():
            prints[1] = prints[2]  # or what it prints on both could come in another order
        process = start_warm(command, variables, {**{each: each for each in kept}, **prints}) or subprocess.Popen(
            command,
            env=variables,
            stderr=prints.get(2),
            stdout=prints.get(1),
            process_group=0,  # Ctrl-C in a terminal reaches the whole group, and would arrive twice
            pass_fds=kept,
        )
        os.close(ends)
        rank = Rank(int(variables["RANK"]), process, held, stacks)
        for target, (read, write) in zip(streams, outputs, strict=True):
            os.close(write)
            self._selector.register(read, selectors.EVENT_READ)
            self._targets[read] = (rank, target)
        self.append(rank)

    def start_guard(self, others: Sequence[int]) -> None:
        """Start the guard; `others`: processes that must not survive either."""
        ends, held = os.pipe()
        self._stack.callback(os.close, held)
        words = [str(ends), str(GUARD_SECONDS), *(str(pid) for pid in [*(rank.process.pid for rank in self), *others])]
        guard = subprocess.Popen(
            [REAL_PYTHON, "-IS", "-c", GUARD, *words],
            pass_fds=[ends],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ends)
        self._stack.callback(guard.wait)
        self._stack.callback(guard.kill)

    def living(self) -> list[Rank]:
        """Those that have not ended."""
        return [rank for rank in self if rank.process.poll() is None]

    def send_signal(self, number: int) -> None:
        """To all that live."""
        for rank in self.living():
            rank.process.send_signal(number)

    def _signal_groups(self, number: int) -> None:
        """To all that live, with the processes that they started."""
        for rank in self.living():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)

    def resize(self) -> None:
        """The window has another size: tell the rank that draws the bar."""
        for read, (_, target) in self._targets.items():
            _copy_size(target, read)

    def suspend(self) -> None:
        """Ctrl-Z: the ranks are not in the terminal's process group, so they are stopped and continued from here."""
        self._signal_groups(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_groups(signal.SIGCONT)

    def drain(self, seconds: float) -> None:
        """Pass on what the ranks print, and keep the last lines."""
        while ready := self._selector.select(seconds):
            for key, _ in ready:
                rank, target = self._targets[key.fd]
                try:
                    data = os.read(key.fd, 1 << 16)
                except OSError:  # the other side of a terminal is gone
                    data = b""
                if not data:
                    self._selector.unregister(key.fd)
                    continue
                _write_all(target, data)
                text = data.decode(errors="replace").replace("\r", "\n")
                if rank.lines and not rank.lines[-1].endswith("\n"):
                    text = rank.lines.pop() + text
                rank.lines.extend(text.splitlines(keepends=True))
            if seconds:
                return

    def end(self) -> None:
        """SIGKILL to what is left, with the processes that it started."""
        self._signal_groups(signal.SIGKILL)
        for rank in self:
            rank.process.wait()


def _output(stream: int, number: int, stack: ExitStack) -> tuple[int, int]:
    """Where rank `number` prints: a pipe, or for the first rank of a command in a terminal another terminal, so that it
    still draws its bar. The reading end is closed with the stack."""
    if number == 0 and os.isatty(stream):
        read, write = os.openpty()
        tty.setraw(write)
        _copy_size(stream, write)
    else:
        read, write = os.pipe()
    stack.callback(os.close, read)
    return read, write


def _is_one_terminal() -> bool:
    """Whether standard output and errors are the same terminal."""
    return os.isatty(1) and os.isatty(2) and os.ttyname(1) == os.ttyname(2)


def _copy_size(source: int, target: int) -> None:
    """Give a terminal the size of another; nothing where one of them is none."""
    with suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def _write_all(target: int, data: bytes) -> None:
    """Write until all is written, or nobody reads it any more."""
    while data:
        try:
            data = data[os.write(target, data) :]
        except OSError:
            return
