"""The thread that writes checkpoints in the background, and what it reports.

It runs one job at a time. Nothing is raised into the loop: every save ends as a SaveResult, which the loop collects
with `poll` and turns into events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zero2all.common.errors import AnomalyError, DiskError


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    step: int
    folder: Path | None  # the committed checkpoint; None when the save failed or was skipped
    problem: str | None = None  # why there is no checkpoint; None when there is one
    was_skipped: bool = False
    """Skipped, because the save before was still being written (`when_busy="skip"`)."""
    is_refused: bool = False  # not written, because the state is not finite
    total_bytes: int = 0  # bytes of tensors, of all ranks
    stall_seconds: float = 0.0
    """How long the loop waited: for the other ranks, the copy, and the save before."""
    write_seconds: float = 0.0  # how long writing and committing took, in the background
    ended_at: float = 0.0
    """When that ended, in seconds since the epoch; the loop learns of it up to a step later."""
    deleted_steps: list[int] = field(default_factory=list)  # what retention deleted after this commit
    notes: list[str] = field(default_factory=list)  # problems that did not fail the save itself


class SaveTicket:
    """A save under way."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._done = threading.Event()
        self.result: SaveResult | None = None
        """How it ended; None while it is being written."""

    def wait(self, timeout_seconds: float | None = None) -> SaveResult | None:
        """Wait for the result; None after the timeout."""
        self._done.wait(timeout_seconds)
        return self.result

    def finish(self, result: SaveResult) -> None:
        """Set the result."""
        self.result = result
        self._done.set()

    def folder(self) -> Path:
        """Wait for the committed folder. DiskError when the save failed, AnomalyError when the state is not finite."""
        result = self.wait()
        assert result is not None, "waiting without a timeout ends with a result"
        if result.is_refused:
            raise AnomalyError(
                f"The checkpoint of step {self.step} was not saved: {result.problem}. Run the same command again to "
                f"continue from the checkpoint before."
            )
        if result.folder is None:
            raise DiskError(
                f"The checkpoint of step {self.step} was not saved: {result.problem}. Incomplete files were removed. "
                f"If the disk is full, free some space. Run the same command again to continue from the one before."
            )
        return result.folder


class Writer:
    """Runs one job at a time in a background thread. Its methods are called by one thread."""

    def __init__(self) -> None:
        self._results: deque[SaveResult] = deque()
        self._ticket: SaveTicket | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._ticket is not None and self._ticket.result is None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False after the timeout."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return not self.is_busy

    def submit(self, ticket: SaveTicket, job: Callable[[], SaveResult]) -> None:
        """Start a job; the one before must have ended."""
        assert not self.is_busy, "the save before is still being written"
        self._ticket = ticket
        self._thread = threading.Thread(target=self._run, args=(ticket, job), name="checkpoint-writer", daemon=True)
        self._thread.start()

    def enter(self, ticket: SaveTicket, result: SaveResult) -> None:
        """Finish a ticket, with or without a job."""
        self._results.append(result)
        ticket.finish(result)

    def poll(self) -> list[SaveResult]:
        """The results since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def _run(self, ticket: SaveTicket, job: Callable[[], SaveResult]) -> None:
        started = time.monotonic()
        try:
            result = job()
        except BaseException as error:  # a job reports expected failures; this is a bug, and must not be lost
            problem = f"{type(error).__name__}: {error}"
            result = SaveResult(ticket.step, None, problem, write_seconds=time.monotonic() - started)
        self.enter(ticket, result)
