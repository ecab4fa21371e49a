"""Runs a program that a model wrote, so that it harms nothing: limits on time, memory, files, processes and network.

    run_program("assert 1 + 1 == 2", SandboxLimits())  # -> passed

The program runs in a Python of its own (`sandbox_child.py` says what is refused there, and by whom), with an empty
environment, in an empty temporary folder, in a session of its own that is killed when its time is up. What comes back
is one of OUTCOMES, whatever the program does: no text that it made, which could hold what it read.

What it can still do: use one core for some seconds, and lie about having passed. Its tests run in the same process as
itself, as HumanEval has it, so it can replace what they compare, or find the secret that marks our own verdict: no
check within one process can be hidden from the code beside it. Nothing is run unless it was asked for (`--run-code`);
for programs from a stranger, use a virtual machine.
"""

import builtins
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zero2all.common import jsonio
from zero2all.evals.items import Item

CHILD = Path(__file__).with_name("sandbox_child.py")
MOST_VERDICT_BYTES = 4096
EXCEPTIONS = {
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
OUTCOMES = {"passed", "out of memory", "out of time", "ended early", *(f"failed: {name}" for name in EXCEPTIONS)}


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 5.0
    """By the clock."""
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30


def program_of(item: Item, completion: str) -> str:
    """A completion of HumanEval with what stands before it and its tests."""
    return f"{item.question}{completion}\n\n{item.extra['test']}\n\ncheck({item.extra['entry_point']})\n"


def run_program(program: str, limits: SandboxLimits, without: Collection[str] = ()) -> str:
    """One of OUTCOMES. `without`: protections to do without, as on a machine that has them not, for tests: landlock,
    namespace, seccomp."""
    return _run(program, limits, without)[0]


def protection(without: Collection[str] = ()) -> dict[str, str]:
    """What keeps a program in on this machine. files: landlock or namespace (the kernel); calls: seccomp (the kernel);
    audit hook (Python, which stops no attacker) in place of what is missing."""
    _, files, calls = _run("", SandboxLimits(seconds=60), without)
    return {"files": files, "calls": calls}


def is_isolated(found: dict[str, str]) -> bool:
    """Whether the kernel does it all."""
    return not {"audit hook", "unknown"} & set(found.values())


def _run(program: str, limits: SandboxLimits, without: Collection[str]) -> tuple[str, str, str]:
    secret = secrets.token_hex(16)
    given = {
        "program": program.encode("utf-8", "replace").decode(),  # half a surrogate pair cannot be sent
        "secret": secret,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": MOST_VERDICT_BYTES,
        "without": list(without),
    }
    is_late = False
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder, tempfile.TemporaryFile() as verdict:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=verdict,  # a file that can only grow to some bytes: a pipe could be flooded
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(jsonio.dumps_line(given), limits.seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)  # with all it started: the session has its number
                child.wait()
        verdict.seek(0)
        said = verdict.read(MOST_VERDICT_BYTES)
    outcome, *protected = said.decode("utf-8", "replace").removeprefix(secret).split("|")
    if said.startswith(secret.encode()) and outcome in OUTCOMES and len(protected) == 2:
        return outcome, protected[0], protected[1]
    if is_late or child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):  # the kernel's words for processor time
        return "out of time", "unknown", "unknown"
    return "ended early", "unknown", "unknown"
