"""Runs a program that a model wrote, so that it harms nothing: limits on time, memory, files, processes and network.

    run_program("assert 1 + 1 == 2", Limits())  # -> passed

The program runs in a Python of its own (`sandbox_child.py` says what is refused there, and by whom), without our
environment variables, in an empty temporary folder, in a session of its own that is killed when its time is up. What it
can still do: read files that we may read (it has no way to send them anywhere), use one core for some seconds, and
lie about having passed, if it searches the memory of its own process for the secret. So nothing is run unless it was
asked for (`--run-code`); for programs from a stranger, use a virtual machine.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from zero2all.common import jsonio

CHILD = Path(__file__).with_name("sandbox_child.py")
MOST_VERDICT_BYTES = 4096


@dataclass(frozen=True)
class Limits:
    """What a program may use."""

    seconds: float = 5.0
    """By the clock."""
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30


def run_program(program: str, limits: Limits) -> str:
    """passed, or in words how it failed: `failed: AssertionError: …`, `out of time`, `out of memory`, `ended early`."""
    return _run(program, limits).get("outcome", "ended early")


def protection() -> str:
    """What keeps a program in on this machine: seccomp (the kernel) or audit hook (Python)."""
    return _run("", Limits()).get("protection", "none")


def _run(program: str, limits: Limits) -> dict[str, str]:
    secret = secrets.token_hex(16)
    given = {
        "program": program.encode("utf-8", "replace").decode(),  # half a surrogate pair cannot be sent
        "secret": secret,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            assert child.stdin is not None, "it was opened as a pipe"
            child.stdin.write(jsonio.dumps_line(given))
            child.stdin.close()
            said, is_late = _read(child, limits.seconds)
        finally:
            _end(child)
    if said.startswith(secret.encode()):
        words: dict[str, str] = jsonio.loads(said.removeprefix(secret.encode()))
        return words
    if is_late or child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):  # the kernel's words for processor time
        return {"outcome": "out of time"}
    return {"outcome": f"ended early with code {child.returncode}"}


def _read(child: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
    """What it says before it ends, at most some bytes; and whether its time ran out."""
    assert child.stdout is not None, "it was opened as a pipe"
    said, deadline = b"", time.monotonic() + seconds
    while len(said) < MOST_VERDICT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
            return said, True
        block = os.read(child.stdout.fileno(), MOST_VERDICT_BYTES)
        if not block:
            return said, False
        said += block
    return said, False


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill it and all it started, if it still lives."""
    try:
        child.wait(0.2)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # the session's number is that of its first process
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
