"""Ranks that start warm: a process that has imported torch and the trainer, and forks a rank for each order.

To import them takes seconds of a core, in every rank, at every restart. This way it happens once in a command. The
process is started as a rank would be, with one variable more; it never touches a GPU, and holds nothing but modules, so
a rank that it forks is as clean as a new one. It ends when its socket closes, that is with the supervisor.

The parent of a rank is this process, so it reports their exit codes. Where it is gone, the supervisor kills its ranks
and starts another; where it cannot be started, ranks start cold.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from zero2all.resilience.diagnosis import process_state

WARM = "Z2A_WARM"
"""In the environment of that process: its socket, and the module to import."""
LONGEST_MESSAGE = 64
MOST_DESCRIPTORS = 16
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.1


class Warm:
    """The supervisor's side."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], module: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self.codes = ours, dict[int, int]()
        self._answers: list[int] = []
        """0 after the imports, then the process id of each rank. Kept: a signal handler may take one in."""
        self.is_lost = False
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**environment, WARM: f"{theirs.fileno()},{module}"},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.pid = self._process.pid

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until the modules are imported. If that fails, takes too long, or lasts until `is_over`, the process is
        given up."""
        end = time.monotonic() + seconds
        while self._answer() is None and not self.is_lost:
            if is_over() or time.monotonic() > end:
                self.close()

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int], seconds: float
    ) -> WarmRank | None:
        """Start a rank: the command line after the program's name, its whole environment, and its descriptors, ours by
        the number that it expects. None: no answer in time."""
        order = os.memfd_create("order")
        with suppress(OSError), os.fdopen(order, "wb") as file:
            file.write(json.dumps([list(words), dict(environment), list(descriptors)]).encode())
            file.flush()
            socket.send_fds(self._socket, [b"start"], [order, *descriptors.values()])
            end = time.monotonic() + seconds
            while not self.is_lost and time.monotonic() < end:
                if (found := self._answer()) is not None:
                    return WarmRank(self, found)
        self.close()
        return None

    def _answer(self) -> int | None:
        if not self._answers:
            self.collect(POLL_SECONDS)
        return self._answers.pop(0) if self._answers else None

    def collect(self, seconds: float = 0.0) -> None:
        """Read its messages: which ranks have started and ended. If somebody stopped it (SIGSTOP), continue it: it
        starts the ranks and sees them end."""
        if not self.is_lost and process_state(self.pid) == "T":
            os.kill(self.pid, signal.SIGCONT)
        while not self.is_lost and select.select([self._socket], [], [], seconds)[0]:
            try:
                text = self._socket.recv(LONGEST_MESSAGE)
            except OSError:
                text = b""
            if not text:
                self.is_lost = True
                return
            pid, *code = map(int, text.split())
            if code:
                self.codes[pid] = code[0]
            else:
                self._answers.append(pid)
            seconds = 0.0

    def close(self) -> None:
        """End the process. Ranks that still run are left alone."""
        self.is_lost = True
        self._socket.close()
        self._process.kill()
        self._process.wait()


class WarmRank:
    """A rank that was forked, with what the supervisor needs of subprocess.Popen."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm, self.pid = warm, pid
        self.returncode: int | None = None

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit code, minus the signal if one killed it; None while it runs."""
        if self.returncode is None:
            self._warm.collect(seconds)
            if self._warm.is_lost and self.pid not in self._warm.codes:
                with suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
                self._warm.codes[self.pid] = -signal.SIGKILL
            self.returncode = self._warm.codes.get(self.pid)
        return self.returncode

    def wait(self) -> int:
        """The exit code, once it has ended."""
        while (code := self.poll(POLL_SECONDS)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def serve() -> None:
    """Import, then fork a rank for each order; returns in the rank, which goes on as if it had just been started."""
    number, module = os.environ.pop(WARM).split(",")
    orders = socket.socket(fileno=int(number))
    _name("z2a warm")
    # It ends with the supervisor. A rank gets what is sent to it from its first moment, when it takes signals again.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        import_module(module)
    except BaseException:  # a rank that starts cold will say it
        os._exit(1)
    gc.freeze()  # a collection in a rank would copy the pages of all these objects
    orders.send(b"0")
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([orders.fileno(), woken], [], [])[0]
        with suppress(OSError):
            os.read(woken, 4096)
        _report_ends(orders)
        if orders.fileno() not in ready:
            continue
        text, descriptors, *_ = socket.recv_fds(orders, LONGEST_MESSAGE, MOST_DESCRIPTORS)
        if not text:
            os._exit(0)
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(woken)
            os.close(wake)
            orders.close()
            _become(descriptors)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        with suppress(OSError):
            os.setpgid(pid, pid)  # here too: it is in its group when the supervisor knows it
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(b"%d" % pid)


def _report_ends(orders: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            orders.send(b"%d %d" % (ended[0], os.waitstatus_to_exitcode(ended[1])))


def _become(descriptors: Sequence[int]) -> None:
    """Take over command line, environment and descriptors of the order, which is the first descriptor."""
    with suppress(OSError):
        os.setpgid(0, 0)
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        words, environment, numbers = json.loads(file.read())
    free = max([2, *numbers, *descriptors]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors[1:]]
    for descriptor in descriptors[1:]:
        os.close(descriptor)
    for source, number in zip(moved, numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    _name(f"z2a rank {environment['RANK']}")


def end(code: int) -> NoReturn:
    """The end of a rank, without the half second in which Python takes all its modules apart."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _name(name: str) -> None:
    """Set what `top` and `ps` show: all ranks share one command line."""
    with suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)
