"""`z2a runs`: the runs of a workspace, and how each stands."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.verb import Subparsers, add_verb, add_work, workspace_of
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.track.status import RunStatus

LOCK_NAME = "lock"
"""Empty once the process that trains has let go of the run."""


@dataclass(frozen=True)
class Run:
    """One run of a workspace."""

    name: str
    state: str
    """new, running, silent, stopped, finished or failed."""
    step: int | None
    steps: int | None
    """The step the run ends with."""
    loss: float | None
    """Of the last training step."""
    held_out_loss: float | None
    """Of the last validation, over all held-out tokens."""
    seconds_ago: float | None
    """Since the last row of its metrics."""
    message: str
    """Why it is in this state, where that needs a sentence."""


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "runs",
        "list the runs of a workspace: state, step, training and held-out loss, size",
        "z2a runs --work my-workspace",
        _runs,
    )
    add_work(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_folders(runs: Path) -> list[Path]:
    """The runs in a `runs` folder, by name."""
    marks = ("config.yaml", "metrics", "checkpoints")
    found = sorted(path for path in runs.glob("*") if path.is_dir())
    return [path for path in found if any((path / mark).exists() for mark in marks)]


def look_at_run(folder: Path) -> Run:
    """How a run stands, from its lock and the head and tail of its metrics."""
    from zero2all.track.listing import last_value, read_status

    status, loss = read_status(folder)
    held_out = last_value(folder, "eval/valid/loss")
    ago = None if status.last_time is None else max(0.0, time.time() - status.last_time)
    state, message = _state(folder, status), status.message
    return Run(folder.name, state, status.last_step, status.total_steps, loss, held_out, ago, message)


def _state(folder: Path, status: RunStatus) -> str:
    if status.state == "finished":
        is_whole = status.total_steps is None or (status.last_step or 0) >= status.total_steps
        return "finished" if is_whole else "stopped"
    if status.state == "stalled":
        return "silent" if _is_locked(folder) else "stopped"
    return {"running": "running", "crashed": "failed"}.get(status.state, "new")


def _is_locked(folder: Path) -> bool:
    try:
        return (folder / LOCK_NAME).stat().st_size > 0
    except OSError:
        return False


def human_age(seconds: float) -> str:
    """7300 -> '2 h ago'."""
    if seconds >= 86_400:
        return t(f"{seconds // 86_400:.0f} d ago")
    if seconds >= 3_600:
        return t(f"{seconds // 3_600:.0f} h ago")
    if seconds >= 60:
        return t(f"{seconds // 60:.0f} min ago")
    return t(f"{seconds:.0f} s ago")


def _runs(arguments: argparse.Namespace) -> None:
    from zero2all.common.files import human_bytes

    folder = workspace_of(arguments).runs
    runs = [(look_at_run(each), _size(each)) for each in run_folders(folder)]
    if arguments.json:
        from zero2all.common.jsonio import dumps_pretty

        print(dumps_pretty([{**asdict(run), "bytes": size} for run, size in runs]).decode(), end="")
        return
    if not runs:
        print(t(f"There are no runs in {folder}. `z2a train CONFIG` starts one."))
        return
    from zero2all.cli.table import print_table

    rows = [["run", "state", "step", "of", "training loss", "held-out loss", "size", "updated"]]
    for run, size in runs:
        counts = ["" if count is None else f"{count:,}" for count in (run.step, run.steps)]
        losses = ["" if loss is None else f"{loss:.4f}" for loss in (run.loss, run.held_out_loss)]
        age = "" if run.seconds_ago is None else human_age(run.seconds_ago)
        rows.append([run.name, t(run.state), *counts, *losses, human_bytes(size), age])
    print_table(rows)
    for run, _ in runs:
        if run.message and run.state in ("failed", "silent"):
            print(f"{run.name}: {t(run.message)}")


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in _files(folder))


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if path.is_file():
                yield path
