"""Running a program with all its descendants under observation: CPU time, wall time, summed memory.

Memory is the proportional set size (PSS) of every process of the tree, added up five times a second: a page that n
processes share counts 1/n for each, so the sum is what the machine really gives. CPU time is user + system time of the
whole tree, exact: descendants whose parent has gone come to this process (`PR_SET_CHILD_SUBREAPER`), which waits for
them. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.2
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Usage:
    """What a program took."""

    cpu_seconds: float
    """User + system, all processes."""
    wall_seconds: float
    peak_pss_bytes: int
    """Highest sum over all processes."""
    peak_processes: int
    """Processes at that moment."""
    output: str
    """Standard output and standard error."""


class ProgramFailedError(Exception):
    """It ended with an error."""


def run_measured(
    command: Sequence[str],
    log: Path,
    environment: dict[str, str] | None = None,
    on_sample: Callable[[float, int], None] | None = None,
) -> Usage:
    """Run a program to its end; `on_sample` hears (seconds since the start, summed PSS)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    process = start_group(command, log, environment)
    peak = processes = 0
    try:
        while not _has_ended(process, SAMPLE_SECONDS):
            sizes = [pss_bytes(pid) for pid in members(process.pid)]
            if sum(sizes) > peak:
                peak, processes = sum(sizes), len(sizes)
            if on_sample is not None:
                on_sample(time.monotonic() - started, sum(sizes))
    except BaseException:
        kill_group(process)
        raise
    wall = time.monotonic() - started
    _wait_for_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    output = log.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        raise ProgramFailedError(f"{' '.join(command)} ended with {process.returncode}:\n{output[-4000:]}")
    return Usage(cpu, wall, peak, processes, output)


def _has_ended(process: subprocess.Popen[bytes], wait_seconds: float) -> bool:
    try:
        process.wait(wait_seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def start_group(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of a process group and session of its own."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a program and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while members(process.pid):  # until the kernel has taken all of them away, nothing may look at their files
        _wait_for_orphans()
        time.sleep(0.01)


def members(session: int) -> list[int]:
    """The processes of a session."""
    return [pid for pid, _, of_session in _processes() if of_session == session]


def workers_of(session: int) -> list[int]:
    """The processes of a session that have no children and are not its leader: those that do the work."""
    found = [(pid, parent) for pid, parent, of_session in _processes() if of_session == session]
    parents = {parent for _, parent in found}
    return [pid for pid, _ in found if pid != session and pid not in parents]


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 when it has just gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return 0


def _processes() -> Iterator[tuple[int, int, int]]:
    """(pid, parent, session) of every process that has not ended."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            with open(entry / "stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != b"Z":
            yield int(entry.name), int(fields[1]), int(fields[3])


def _wait_for_orphans() -> None:
    """Take over the CPU time of descendants that outlived their parent for a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.02)
