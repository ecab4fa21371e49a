"""From host memory to a committed checkpoint, by all ranks together.

Every rank writes and fsyncs its files into one temporary folder and reports to the others what it wrote, or why it
failed. Only when all ranks have written all of the plan does rank 0 add the index, the record and, last, the sealed
manifest, and rename the folder; then it reports that. Readers ignore the temporary folder, so a rank that fails or dies
at any point leaves the existing checkpoints unchanged.

A process that was suspended in here while another took over the run commits nothing: the new holder has deleted its
temporary folder, so no file can be created in it, and there is nothing to rename.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import LostRunError, UserError, exceeded_limit, is_disk_full
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
    problem: str | None = None,
    written: Callable[[], None] = lambda: None,
) -> Path:
    """Write a staged snapshot and commit it; every rank calls it and gets the folder, or raises SaveError.

    `attempt` is the same on all ranks and names the temporary folder. `fence` is checked before every file and
    before the rename. `problem` is an earlier failure of this rank: then nothing is committed. `written` is called once
    this rank's data is on the disk, or has failed.
    """
    partial = partial_folder(run, staged.step, attempt)
    try:
        own = _write_own(partial, staged, problem, fence)
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


def _write_own(partial: Path, staged: Staged, problem: str | None, fence: Fence) -> dict[str, Any]:
    """Write this rank's files; returns their sizes and checksums, or why they could not be written. Never raises."""
    if problem is not None:
        return {"problem": problem}
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
    """What rank 0 decided. It has committed or not, whatever happens to the others."""
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
