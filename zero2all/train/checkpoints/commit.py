"""From host memory to a committed checkpoint, by all ranks together.

Every rank writes and fsyncs its files into one temporary folder and reports to the others what it wrote, or why it
failed. Only when all ranks have written all of the plan does rank 0 add the index, the record and, last, the sealed
manifest, and rename the folder; then it reports that. Readers ignore the temporary folder, so a rank that fails or dies
at any point leaves the existing checkpoints unchanged.

A process that was suspended in here while another took over the run commits nothing: the new holder has deleted its
temporary folder, so no file can be created in it, and there is nothing to rename.

A thread does this in the background (`Writer`), one save at a time. Nothing is raised into the loop: every save ends as
a SaveResult, which the loop collects with `poll` and turns into events.
"""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError, DiskError, LostRunError, UserError, exceeded_limit, is_disk_full
from zero2all.common.fault import fault_point
from zero2all.common.files import MANIFEST_NAME, fsync_folder, human_bytes
from zero2all.common.peers import Peers
from zero2all.train.checkpoints.index import index_json
from zero2all.train.checkpoints.layout import (
    INDEX_NAME,
    STATE_NAME,
    checkpoint_folder,
    checkpoints_folder,
    partial_folder,
)
from zero2all.train.checkpoints.manifest import manifest_bytes
from zero2all.train.checkpoints.planning import SaveLayout
from zero2all.train.checkpoints.run_lock import Fence, no_fence
from zero2all.train.checkpoints.snapshot import Staged
from zero2all.train.checkpoints.tensor_file import header_bytes, write_durably

SMALL_FILES_BYTES = 4 << 20
"""Space for manifest, index, record and the file system's own data, beside the tensors."""


class SaveError(Exception):
    """A save that failed; the message says why."""


def bytes_needed(layout: SaveLayout) -> int:
    """Disk space for one checkpoint of this plan: tensors, index (under 300 bytes a box), small files."""
    boxes = sum(len(entry.boxes) + 1 for entry in layout.index.values())
    return layout.total_bytes + 300 * boxes + SMALL_FILES_BYTES


def lack_of_space(run: Path, layout: SaveLayout | None) -> str | None:
    """Why a checkpoint cannot be started now; None when there is enough disk space."""
    assert layout is not None, "planned by now"
    needed, folder = bytes_needed(layout), checkpoints_folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    if free >= needed:
        return None
    return (
        f"not enough disk space for a checkpoint: {human_bytes(needed)} are needed under {folder}, {human_bytes(free)} "
        f"are free"
    )


def commit(
    run: Path,
    staged: Staged,
    attempt: str,
    peers: Peers,
    fence: Fence = no_fence,
    written: Callable[[], None] = lambda: None,
) -> Path:
    """Write a staged snapshot and commit it; every rank calls it and gets the folder, or raises SaveError.

    `attempt` is the same on all ranks and names the temporary folder. `fence` is checked before every file and
    before the rename. `written` is called once this rank's data is on the disk, or has failed.
    """
    partial = partial_folder(run, staged.step, attempt)
    try:
        own = _write_own(partial, staged, fence)
    finally:
        written()
    try:
        reports = _gather(peers, own)
    except SaveError:
        if peers.is_first:
            _clear(partial, fence)
        raise
    problem = _first_problem(reports, staged.layout)
    if peers.is_first:
        if problem is None:
            files = {name: facts for report in reports for name, facts in report["files"].items()}
            problem = _finish(run, partial, staged, files, peers.size, fence)
        if problem is not None:
            _clear(partial, fence)
    verdict = _verdict(peers, problem)
    if verdict is not None:
        raise SaveError(verdict)
    return checkpoint_folder(run, staged.step)


def _write_own(partial: Path, staged: Staged, fence: Fence) -> dict[str, Any]:
    """Write this rank's files; returns their sizes and checksums, or why they could not be written. Never raises."""
    if staged.problem is not None:
        return {"problem": staged.problem}
    written = []
    try:
        fence()
        partial.mkdir(parents=True, exist_ok=True)
        files = {}
        for plan, buffer in staged.files:
            fence()
            fault_point("file", staged.step)
            written.append(partial / plan.name)
            files[plan.name] = write_durably(partial / plan.name, header_bytes(plan.infos), buffer)
        fsync_folder(partial)
    except Exception as error:
        if not isinstance(error, LostRunError):
            for path in written:  # free the space at once: the others may still be writing
                with suppress(OSError):  # else removed with the rest of the folder
                    path.unlink()
        return {"problem": _why(error)}
    return {"files": files}


def _first_problem(reports: list[dict[str, Any]], layout: SaveLayout) -> str | None:
    """How the reports differ from the plan."""
    for rank, report in enumerate(reports):
        if report.get("problem") is not None:
            return str(report["problem"]) if len(reports) == 1 else f"rank {rank}: {report['problem']}"
    written = {name: facts["bytes"] for report in reports for name, facts in report["files"].items()}
    if written != layout.file_bytes:
        wrong = sorted(written.items() ^ layout.file_bytes.items())
        return f"the files written differ from the plan: {', '.join(str(each) for each in wrong[:4])}"
    return None


def _finish(
    run: Path, partial: Path, staged: Staged, files: dict[str, dict[str, Any]], world_size: int, fence: Fence
) -> str | None:
    """Complete the folder and rename it; returns why that failed."""
    final = checkpoint_folder(run, staged.step)
    try:
        fence()
        for name, facts in files.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != facts["bytes"]:
                return f"{name} of another rank is not in {partial}; the run must be on a disk that all ranks share"
        files[INDEX_NAME] = write_durably(
            partial / INDEX_NAME, jsonio.dumps_exact(index_json(staged.layout.index), None)
        )
        files[STATE_NAME] = write_durably(partial / STATE_NAME, staged.record)
        manifest = manifest_bytes(staged.step, world_size, files, staged.details)
        fault_point("manifest", staged.step)
        write_durably(partial / MANIFEST_NAME, manifest)
        fsync_folder(partial)
        fence()
        if final.exists():
            return f"{final} exists already, and a committed checkpoint is never overwritten"
        fault_point("rename", staged.step)
        partial.rename(final)
        fault_point("renamed", staged.step)
        fsync_folder(final.parent)
    except Exception as error:
        return _why(error)
    return None


def _verdict(peers: Peers, problem: str | None) -> str | None:
    """Rank 0's decision: what is wrong, or None: committed. Rank 0 keeps to it even if other ranks fail meanwhile."""
    try:
        verdict: str | None = _gather(peers, problem)[0]
    except SaveError:
        if peers.is_first and problem is None:
            return None
        raise
    return verdict


def _gather(peers: Peers, value: Any) -> list[Any]:
    try:
        return peers.gather(value)
    except Exception as error:
        raise SaveError(f"a rank has died, or did not finish its part of the save in time ({error})") from error


def _clear(partial: Path, fence: Fence) -> None:
    """Remove a failed save; if another process holds the run now, that one removes it."""
    try:
        fence()
    except LostRunError:
        return
    shutil.rmtree(partial, ignore_errors=True)


def _why(error: Exception) -> str:
    """An exception as a sentence."""
    if isinstance(error, UserError | SaveError):
        return str(error)
    if limit := exceeded_limit(error):
        return limit
    if is_disk_full(error):
        return f"the disk is full ({type(error).__name__}: {error})"
    return f"the save failed ({type(error).__name__}: {error})"


# ---- in the background ----


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

    def wait(self) -> SaveResult:
        """Wait for the result."""
        self._done.wait()
        assert self.result is not None, "it is set before"
        return self.result

    def finish(self, result: SaveResult) -> None:
        """Set the result."""
        self.result = result
        self._done.set()

    def folder(self) -> Path:
        """Wait for the committed folder. DiskError when the save failed, AnomalyError when the state is not finite."""
        result = self.wait()
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
