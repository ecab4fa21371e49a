"""Starts a run on a list of hosts over ssh: one command on each, their output here, one exit code.

ssh without a terminal forwards no signals, so the far side runs a few lines of shell that read the names of signals
from their input and pass them on. Before them comes the secret of the run, because every user of a host sees the words
of its commands. When this program ends, however it ends, that input closes, and the far command gets SIGTERM: it saves
and ends.
"""

import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

from zero2all.common.errors import PreemptedError, UsageError
from zero2all.common.progress import say
from zero2all.common.secret import VARIABLE
from zero2all.common.signals import stop_signals_to

CANNOT_CONNECT = 255
"""ssh's own exit code."""
GRACE_SECONDS = 60.0
"""How long the others have to save and end when one host has failed, before they are told to stop at once."""
POLL_SECONDS = 0.1
FAR_PROGRAM = """\
IFS= read -r {variable}; export {variable}; exec 3<&0; cd {folder} || exit 3; {command} </dev/null 3<&- & pid=$!;
(while read -r name <&3; do kill -s "$name" $pid; done; kill -s TERM $pid) 2>/dev/null & reader=$!; exec 3<&-;
wait $pid; code=$?; kill $reader 2>/dev/null; exit $code"""


def run_on_hosts(commands: Mapping[str, Sequence[str]], folder: str, ssh: Sequence[str], secret: str) -> int:
    """Run one command on each host, in `folder`, with the secret in its environment; returns the exit code of the first
    that failed, or 0. `ssh`: the words that come before the host."""
    started: dict[str, subprocess.Popen[str]] = {}
    readers: list[threading.Thread] = []

    def tell(name: str) -> None:
        for process in started.values():
            assert process.stdin is not None
            with suppress(OSError):  # it has ended
                os.write(process.stdin.fileno(), f"{name}\n".encode())  # a signal may come in the middle of another

    def pass_on(_number: int, _frame: FrameType | None) -> None:
        # Shells start background commands with Ctrl-C ignored; for a run SIGTERM means the same.
        tell("TERM")

    with stop_signals_to(pass_on):
        for host, command in commands.items():
            values = {"folder": shlex.quote(folder), "command": shlex.join(command), "variable": VARIABLE}
            program = FAR_PROGRAM.format(**values).replace("\n", " ")
            words = [*ssh, "--", host, f"exec sh -c {shlex.quote(program)}"]
            pipe = subprocess.PIPE
            try:
                # A group of its own: Ctrl-C in a terminal would end ssh, and the far side with it.
                process = subprocess.Popen(
                    words,
                    stdin=pipe,
                    stdout=pipe,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    process_group=0,
                )
            except OSError as error:
                raise UsageError(
                    f"{words[0]} cannot be started: {error.strerror}. Install the OpenSSH client."
                ) from error
            assert process.stdin is not None
            with suppress(OSError):  # it has ended, and says why
                os.write(process.stdin.fileno(), f"{secret}\n".encode())
            started[host] = process
            assert process.stdout is not None
            readers.append(threading.Thread(target=_show, args=(host, process.stdout), daemon=True))
            readers[-1].start()
        code = _wait(started, tell)
    for reader in readers:
        reader.join(1.0)
    return code


def _show(host: str, lines: IO[str]) -> None:
    """What a host prints, with its name before each line."""
    for line in lines:
        print(f"{host}: {line}", end="", flush=True)


def _wait(started: dict[str, subprocess.Popen[str]], tell: Callable[[str], None]) -> int:
    """Wait for all hosts; once one has failed, ask the others to stop, and after a while to stop at once."""
    first, deadline, asked = 0, float("inf"), 0
    running = dict(started)
    while running:
        for host, process in list(running.items()):
            if (code := process.poll()) is None:
                continue
            del running[host]
            code = code if code >= 0 else 128 - code
            if code == CANNOT_CONNECT:
                say(f"z2a: ssh could not connect to {host}, or lost the connection. Its message is above.")
            first = first or code
            if code not in (0, PreemptedError.exit_code) and running and deadline == float("inf"):
                say(f"z2a: {host} ended with code {code}. The other hosts are asked to stop.")
                deadline = time.monotonic()
        if running and time.monotonic() >= deadline:
            tell("TERM")
            asked += 1
            deadline = time.monotonic() + GRACE_SECONDS
            if asked > 2:  # twice means at once: whoever is still there hangs
                for process in running.values():
                    process.kill()
        time.sleep(POLL_SECONDS)
    return first
