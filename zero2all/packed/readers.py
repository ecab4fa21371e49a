"""Calls of one function in processes of their own, for reading beside a trainer that needs Python's lock all the time.

    reading = ReaderProcesses(read_step, on_problem=print)
    reading(first_token)                     # read_step(first_token), in an idle process or a new one

A process and the trainer share a socket and nothing else, so nothing can be left behind: the process ends when the
socket does. One that was killed is replaced and asked again; after RETRIES deaths in a row the run ends with an error.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import zero2all
from zero2all.common.engine import ONE_THREAD
from zero2all.common.errors import BadInputError

RETRIES = 3
START = "import sys; from zero2all.packed.readers import serve; serve(*map(int, sys.argv[1:]))"


class ReadersEndedError(RuntimeError):
    """Raised by a call that `close` has overtaken."""


class ReaderProcesses:
    """A function that runs in other processes; as many threads as like may call it at once, each has its own."""

    def __init__(self, function: Callable[[int], Any], on_problem: Callable[[str], None], niceness: int = 0) -> None:
        """`function` is pickled; `on_problem` is told in a sentence when a process had to be replaced."""
        self._frozen, self._on_problem, self._niceness = pickle.dumps(function), on_problem, niceness
        self._idle: deque[_Process] = deque()
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._deaths = 0

    def __call__(self, argument: int) -> Any:
        """What the function returns, or raises."""
        while True:
            process = self._take()
            try:
                answer = process.ask(argument)
            except (EOFError, OSError):
                self._bury(process)
                continue
            self._deaths = 0
            self._idle.append(process)
            if isinstance(answer, Exception):
                raise answer
            return answer

    def close(self) -> None:
        """End the processes; calls that are under way fail."""
        with self._lock:
            self._closed = True
            processes, self._all = self._all, set()
        for process in processes:
            process.end()

    def _take(self) -> _Process:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        with self._lock:
            if self._closed:
                raise ReadersEndedError("the reading processes were ended")
            process = _Process(self._frozen, self._niceness)
            self._all.add(process)
            return process

    def _bury(self, process: _Process) -> None:
        with self._lock:
            self._all.discard(process)
            if self._closed:
                raise ReadersEndedError("the reading processes were ended")
            self._deaths += 1
            deaths = self._deaths
        how = process.end()
        if deaths > RETRIES:
            raise BadInputError(
                f"Reader processes ended {deaths} times in a row without a batch ({how}). The machine has "
                "most likely run out of memory: lower data.readers or data.prefetch_steps, or set "
                "data.reader_kind to thread. Run the same command again to continue from the last checkpoint."
            )
        self._on_problem(f"a reader process ended ({how}); another one takes over")


class _Process:
    def __init__(self, frozen: bytes, niceness: int) -> None:
        self._connection, theirs = Pipe()
        package = str(Path(zero2all.__file__).parent.parent)
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        # A group of its own: Ctrl-C in a terminal is for the trainer, which then ends us.
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, str(theirs.fileno()), str(niceness)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self._frozen: bytes | None = frozen

    def ask(self, argument: int) -> Any:
        if self._frozen is not None:
            self._connection.send_bytes(self._frozen)
            self._frozen = None
        self._connection.send(argument)
        return self._connection.recv()

    def end(self) -> str:
        """End it, where it has not ended; returns how it did. A thread that waits for its answer learns of it."""
        code = self._process.poll()
        if code is None:
            self._process.kill()
            code = self._process.wait()
        names = {int(number): number.name for number in signal.Signals}
        return names.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"


def serve(number: int, niceness: int) -> None:
    """In a reading process: answer until the trainer is gone."""
    os.nice(niceness)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these are for the trainer
        signal.signal(signal_number, signal.SIG_IGN)
    connection = Connection(number)
    try:
        function = pickle.loads(connection.recv_bytes())
        while True:
            argument = connection.recv()
            try:
                answer = function(argument)
            except Exception as error:
                answer = error
            connection.send(answer)
    except (EOFError, OSError):
        os._exit(0)
