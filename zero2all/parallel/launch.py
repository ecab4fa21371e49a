"""Starts one process per GPU of this machine, where torchrun has not done so.

Our own few lines instead of torchrun, because of how a run ends: torchrun turns every exit code into 1 and gives its
processes 30 seconds after SIGTERM. Here a signal is forwarded once, a save may take as long as it needs, and the
command ends with the exit code of the process that failed first.

Each process holds the reading end of a pipe whose other end only the command has: if the command is killed, the pipe
closes, and the processes stop as after a signal. Linux's parent-death signal would not work: it is sent once for every
thread of the dying parent, and a second signal means "stop at once".
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

import psutil

from zero2all.common.errors import PeerFailureError, PreemptedError, UsageError
from zero2all.common.progress import say
from zero2all.common.signals import stop_signals_to
from zero2all.parallel.config import ParallelConfig

LAUNCHER_PIPE = "ZERO2ALL_LAUNCHER_PIPE"
COMMAND_STARTED = "ZERO2ALL_COMMAND_STARTED"
"""File descriptor of a pipe that closes when the command that started this process ends."""
STORE_SOCKET = "ZERO2ALL_STORE_SOCKET"
"""File descriptor of the socket on which rank 0 waits for the others."""
GRACE_SECONDS = 60.0
"""How long the others may continue after one has failed; they may be waiting for it forever."""
ENDS_IN_TIME = (None, 0, PreemptedError.exit_code)
"""Exit codes after which the others may take as long as they need: after a signal all of them save."""
POLL_SECONDS = 0.05
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "A user sent it, or the system because memory ran out.",
    signal.SIGABRT: "NCCL sends it when another process has died or does not answer within parallel.timeout_seconds.",
}


def local_processes(config: ParallelConfig) -> int:
    """How many processes to start on this machine: as configured, else one per GPU, else one."""
    if "LOCAL_RANK" in os.environ:  # this process was started by torchrun or by us
        return 1
    if config.processes == 1 or (config.processes == "auto" and config.device == "cpu"):
        return 1
    import torch

    gpus = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.processes == "auto":
        return max(1, gpus)
    if config.device == "cuda" and config.processes > gpus:
        raise UsageError(
            f"parallel.processes is {config.processes}, but this machine has {gpus} GPUs in all, and each process "
            f"needs one. Set it to auto or to at most {gpus}."
        )
    return config.processes


def run_processes(processes: int, words: list[str], grace_seconds: float = GRACE_SECONDS) -> int:
    """Run `z2a WORDS…` in `processes` processes that form one group; returns the exit code of the command."""
    command = [sys.executable, "-m", "zero2all", *words]
    ends, held = os.pipe()  # no process inherits `held`
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 inherits it, so that no other program takes the port
    shared = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        LAUNCHER_PIPE: str(ends),
        COMMAND_STARTED: str(command_started()),
    }
    started: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for process in started:
            _send(process, number)

    try:
        with stop_signals_to(pass_on):
            for rank in range(processes):
                if asked:  # between two starts
                    break
                env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                inherited = [ends]
                if rank == 0:
                    env[STORE_SOCKET] = str(listener.fileno())
                    inherited.append(listener.fileno())
                # A group of its own: Ctrl-C in a terminal reaches the whole group, and would arrive twice.
                started.append(subprocess.Popen(command, env=env, process_group=0, pass_fds=inherited))
            listener.close()
            if asked and started:  # it came while the last one was being started, so that one did not get it
                _send(started[-1], asked[0])
            code = _wait(started, grace_seconds, asked)
        for line in unusual_ends([_own_code(process, asked) for process in started], grace_seconds):
            say(f"z2a: {line}")
        if asked and len(started) < processes:
            return _stopped_by(asked[0])
        return code
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(ends)
        os.close(held)
        listener.close()


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        process.send_signal(number)


def _own_code(process: subprocess.Popen[bytes], asked: Sequence[int]) -> int | None:
    """The exit code of a process. If our signal killed it, it was still loading and had nothing to save."""
    code = process.returncode
    return _stopped_by(-code) if code is not None and -code in asked else code


def _stopped_by(number: int) -> int:
    return 128 + number if number == signal.SIGINT else PreemptedError.exit_code


def command_started() -> float:
    """When this process began (seconds of the clock), or the one that started it by `run_processes`."""
    return float(os.environ.get(COMMAND_STARTED) or psutil.Process().create_time())


def end_with_launcher() -> None:
    """In a process that `run_processes` started: stop (and so save) if the command itself is killed."""
    number = os.environ.pop(LAUNCHER_PIPE, None)  # not for processes that this one starts
    if number is None:
        return
    pipe = int(number)
    os.set_inheritable(pipe, False)
    threading.Thread(target=_stop_at_end_of, args=(pipe,), name="z2a-launcher", daemon=True).start()


def _stop_at_end_of(pipe: int) -> None:
    while os.read(pipe, 1):  # nothing is ever written to it
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def unusual_ends(codes: Sequence[int | None], grace_seconds: float) -> list[str]:
    """Messages about processes that could not report themselves. `codes` by rank, None for one that still runs."""
    lines = []
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            killed = f"Rank {rank} was killed by {name}."
            lines.append(f"{killed} {SIGNAL_HINTS[-code]}" if -code in SIGNAL_HINTS else killed)
    silent = [str(rank) for rank, code in enumerate(codes) if code is None]
    if silent:
        lines.append(f"Rank {', '.join(silent)} did not end within {grace_seconds:g} s and was killed.")
    if lines:
        lines.append(
            "What was saved is intact. Run the same command again: it continues from the newest checkpoint, or starts "
            "over if there is none."
        )
    return lines


def _wait(started: list[subprocess.Popen[bytes]], grace_seconds: float, asked: Sequence[int]) -> int:
    """Wait for all, and once one has failed only so long for the others; the code of the first that failed, or 0."""
    first_failure: int | None = None
    deadline = float("inf")
    # A list, because any() would look no further than the first that runs, and learn nothing of those behind it.
    while None in [process.poll() for process in started] and time.monotonic() < deadline:
        failed = [code for process in started if (code := _own_code(process, asked)) not in ENDS_IN_TIME]
        if failed and first_failure is None:
            first_failure, deadline = _cause(failed), time.monotonic() + grace_seconds
        time.sleep(POLL_SECONDS)
    codes = [code for process in started if (code := _own_code(process, asked))]
    failure = first_failure or (_cause(codes) if codes else 0)
    return failure if failure >= 0 else 128 - failure  # killed by a signal, as a shell says it


def _cause(codes: Sequence[int]) -> int:
    """Of processes that ended between two looks, one that did not end because of another."""
    return next((code for code in codes if code != PeerFailureError.exit_code), codes[0])
