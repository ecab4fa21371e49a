"""A hint which step was committed last: nothing is opened because of it, but a missing checkpoint is noticed."""

from __future__ import annotations

from pathlib import Path

from zero2all.common.errors import UserError
from zero2all.common.files import write_atomic
from zero2all.train.checkpoints import documents
from zero2all.train.checkpoints.layout import LATEST_NAME, checkpoints_folder


def note_latest(run: Path, step: int | None) -> None:
    """Write the step that was committed last. Without the file nothing is known; with it, a run that has no checkpoint
    has lost one. None removes the hint."""
    path = checkpoints_folder(run) / LATEST_NAME
    if step is None:
        path.unlink(missing_ok=True)
    else:
        write_atomic(path, documents.dump({"step": step}))


def latest_noted(run: Path) -> int | None:
    """The step of the hint; None when there is none or it cannot be read."""
    try:
        hint = documents.parse(documents.read_limited(checkpoints_folder(run) / LATEST_NAME), LATEST_NAME)
        return int(hint["step"])
    except (OSError, UserError, TypeError, ValueError, KeyError):
        return None
