"""Whether a run is still going, judged from its files and, on the same machine, from the process that wrote them.

- *finished*: the writer said so (`end` event, reason `done` or `exit`).
- *crashed*: it said that it failed; or it said nothing, and its process is gone from this machine.
- *running*: it wrote a row not long ago.
- *stopped*: it was asked to stop, and saved its state; the same command continues it.
- *stalled*: it has been silent for longer than a minute and than ten median steps.
- *unknown*: there is nothing to judge by.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "stopped", "stalled", "finished", "crashed", "unknown"]

SILENCE_SECONDS = 60.0
SILENCE_STEPS = 10
CLOCK_DIFFERENCE_SECONDS = 600.0  # how far the clocks of two machines may be apart before a running run looks silent
SAME_PROCESS_SECONDS = 5.0


@dataclass(frozen=True)
class RunStatus:
    """The status of a run."""

    state: State = "unknown"
    last_step: int | None = None
    last_time: float | None = None  # seconds since the epoch, by the clock of the machine that trains
    last_tokens: int | None = None
    total_steps: int | None = None  # `train.steps` of the run's config; None when it has none
    attempt: int | None = None  # the latest start of the training process
    message: str = ""  # why it is in this state, in one sentence for people; empty while it runs


@dataclass(frozen=True)
class Evidence:
    """What the files of the latest attempt say."""

    header: dict[str, Any]
    """Data of the `segment` event: host, pid, process_start, pid_namespace."""
    end: dict[str, Any] | None
    """Data of the `end` event if that is the last line."""
    last_time: float | None
    modified: float
    """When the file was last written, by the clock of this machine."""
    median_step_seconds: float | None = None
    alive: bool | None = None
    """Whether the process still ran *before* the file was read, so that the file is whole. None: unknown."""


def judge(evidence: Evidence, now: float | None = None) -> tuple[State, str]:
    """The state, and why."""
    if evidence.end is not None:
        return _ended(evidence.end)
    now = time.time() if now is None else now
    silence = max(0.0, now - evidence.modified)
    if evidence.alive is False:
        pid = evidence.header.get("pid")
        return "crashed", f"Process {pid} has ended without closing the run."
    if evidence.alive is None and evidence.last_time is not None:  # a fresh copy of old files is not a running run
        silence = max(silence, now - evidence.last_time - CLOCK_DIFFERENCE_SECONDS)
    if silence > max(SILENCE_SECONDS, SILENCE_STEPS * (evidence.median_step_seconds or 0.0)):
        from zero2all.common.progress import human_seconds  # the writer of metrics loads little

        return "stalled", f"No new row for {human_seconds(silence)}."
    return "running", ""


def _ended(end: dict[str, Any]) -> tuple[State, str]:
    reason, message = str(end.get("reason", "done")), str(end.get("message") or "")
    if reason == "done":
        return "finished", message
    if reason == "exit":
        return "finished", message or "The program ended without closing the run."
    if reason == "preempted":
        return "stopped", message or "Stopped on request. Start the same command again to continue."
    return "crashed", message or f"The run ended: {reason}."


def is_writer_alive(header: dict[str, Any]) -> bool | None:
    """Whether the process that wrote the file still runs; None when that cannot be known from here."""
    pid, started = header.get("pid"), header.get("process_start")
    if type(pid) is not int or pid <= 0 or header.get("host") != os.uname().nodename:
        return None
    if header.get("pid_namespace") != pid_namespace():
        return None  # a container: the same number means another process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return None
    except OSError:
        pass  # it is there, but not ours
    begun = process_start(pid)
    if begun is None:
        return None
    if begun == 0.0:
        return False  # a zombie: it ended, and its parent has not looked yet
    # A process that began after this file was opened only inherited the number.
    return not (isinstance(started, int | float) and begun > started + SAME_PROCESS_SECONDS)


def process_start(pid: int) -> float | None:
    """When a process began, in seconds since the epoch; 0 for one that is dead but not collected; None: unknown."""
    import psutil

    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def pid_namespace() -> str | None:
    """What tells the process numbers of one container from those of another; None where there is no such thing."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
