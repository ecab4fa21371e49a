"""Moving a checkpoint out of the way without losing it: its folder goes elsewhere, the reason into a text file."""

from __future__ import annotations

import shutil
from pathlib import Path

from zero2all.common.files import PARTIAL_MARK, fsync_folder, write_atomic
from zero2all.train.checkpoints.latest import note_latest
from zero2all.train.checkpoints.layout import DAMAGED, WITHDRAWN, checkpoints_folder, list_checkpoints, step_of
from zero2all.train.checkpoints.run_lock import Fence, no_fence


def quarantine(folder: Path, reason: str) -> Path:
    """Move a damaged checkpoint to `damaged/`, beside earlier ones of the same step; returns its new place."""
    return _move(folder, folder.parent / DAMAGED, reason)


def has_quarantined(run: Path) -> bool:
    """Whether a checkpoint of the run was ever found damaged."""
    return (checkpoints_folder(run) / DAMAGED).exists()


def withdraw_after(run: Path, step: int, reason: str, fence: Fence = no_fence) -> list[int]:
    """Move every checkpoint newer than `step` to `withdrawn/`: for a rollback, which trains those steps again.

    Only for the holder of the run's lock, while no save is under way. Returns the steps that were moved.
    """
    moved = []
    for folder in list_checkpoints(run):
        if step_of(folder) > step:
            fence()
            _move(folder, folder.parent / WITHDRAWN, reason)
            moved.append(step_of(folder))
    if moved:
        fence()
        left = list_checkpoints(run)
        note_latest(run, step_of(left[0]) if left else None)
    return moved


def discard(folder: Path) -> None:
    """Delete a folder: renamed first, so that a crash leaves no partly deleted folder under its name."""
    doomed = folder.with_name(f"{folder.name}{PARTIAL_MARK}trash")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    fsync_folder(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def sweep(run: Path) -> list[str]:
    """Remove what killed saves and deletions have left; only for the holder of the run's lock."""
    leftovers = sorted(checkpoints_folder(run).glob(f"*{PARTIAL_MARK}*"))
    for leftover in leftovers:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    return [leftover.name for leftover in leftovers]


def _move(folder: Path, place: Path, reason: str) -> Path:
    place.mkdir(exist_ok=True)
    target, number = place / folder.name, 1
    while target.exists() or target.is_symlink():
        number += 1
        target = place / f"{folder.name}-{number}"
    folder.rename(target)
    fsync_folder(place)
    fsync_folder(folder.parent)
    write_atomic(target.with_name(f"{target.name}.txt"), f"{reason}\n".encode())
    return target
