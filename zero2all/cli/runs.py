"""The runs of a workspace: which one is meant (by name, folder or ssh:// address), and `z2a runs`, which lists them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_verb, add_work, whole, workspace_of
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.track.mirror import Mirror
    from zero2all.track.status import RunStatus

RUN_HELP = (
    "name of a run in the workspace, a run's folder, or ssh://[user@]host[:port]/path/to/run (default: the one run of "
    "the workspace)"
)
NAMED_RUNS = 10
LOCK_NAME = "lock"
"""Empty once the process that trains has let go of the run."""


def step_or_best(text: str) -> int | str:
    """A type for add_argument: a step, or `best`."""
    return text if text == "best" else whole(0)(text)


STEP = (
    "--step N|best",
    step_or_best,
    None,
    "checkpoint to use: its step, or best: the one with the lowest held-out loss (default: the newest)",
)


@dataclass(frozen=True)
class OpenRun:
    """A run that can be read on this machine, as long as it is open."""

    folder: Path
    is_remote: bool
    connection: Callable[[], str]  # what to tell a person about the connection; empty for a run on this machine


def add_run(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The argument that names a run (or several), here or on another machine, and the workspace flag."""
    add_optional_run(parser, "runs" if several else "run", metavar="RUN", help=RUN_HELP)


def add_run_name(parser: argparse.ArgumentParser) -> None:
    """The argument that names a run of the workspace, and the workspace flag."""
    add_optional_run(parser, "run", metavar="RUN", help="name of the run (default: the one run of the workspace)")


def add_optional_run(parser: argparse.ArgumentParser, name: str, **details: Any) -> None:
    """An argument that may be left out where the workspace has one run; `main` then fills it in."""
    parser.add_argument(name, nargs="*" if name == "runs" else "?", **details)
    parser.set_defaults(run_argument=name)
    add_work(parser)


def fill_in_run(arguments: argparse.Namespace) -> None:
    """Name the one run of the workspace where the command line names none; refuse a workspace in its place."""
    if (argument := getattr(arguments, "run_argument", None)) is None:
        return
    from zero2all.common.workspace import is_folder_name, refuse_workspace

    given = getattr(arguments, argument)
    for name in [given] if isinstance(given, str) else given or ():
        if not (is_folder_name(name) and (arguments.work / "runs" / name).is_dir()):
            refuse_workspace(name)
    if given:
        return
    workspace = workspace_of(arguments)
    names = [folder.name for folder in run_folders(workspace.runs)]
    if not names:
        raise UsageError(f"The workspace {workspace.root.absolute()} has no runs yet: train one with `z2a train`.")
    if len(names) > 1:
        listed = ", ".join(names[:NAMED_RUNS])
        raise UsageError(
            f"The workspace {workspace.root.absolute()} has {len(names)} runs. Name the one you mean: {listed}. `z2a "
            f"runs` says more about them."
        )
    setattr(arguments, argument, names if argument == "runs" else names[0])


@contextmanager
def open_run(word: str, arguments: argparse.Namespace, take_newest: bool = False) -> Iterator[OpenRun]:
    """Find the run; one on another machine is copied and kept up to date. `take_newest` chooses among several."""
    from zero2all.track.ssh import is_address

    if is_address(word):
        from zero2all.track.columns import user_cache
        from zero2all.track.mirror import Mirror

        with Mirror(word, user_cache("mirror")) as mirror:
            _wait_until_copied(mirror)
            yield OpenRun(
                _one_run(mirror.folder, word, take_newest), True, lambda: f"{mirror.address.host}: {mirror.state}"
            )
        return
    folder = Path(word)
    if not (folder / "metrics").is_dir():
        folder = workspace_of(arguments).existing_run(word)
    yield OpenRun(folder, False, str)


def _wait_until_copied(mirror: Mirror) -> None:
    from zero2all.common.progress import say

    waited = 0
    while not mirror.wait_synced(0.2):
        waited += 1
        if mirror.state.startswith("broken: "):
            host = mirror.address.host
            raise BadInputError(
                f"{mirror.url} cannot be reached: {mirror.state.removeprefix('broken: ')}. Try `ssh "
                f"{host}` in a terminal. If it asks for a password or a new host key, set up a key or "
                "an agent. Check the path too."
            )
        if waited == 10:
            say(f"copying the metrics of {mirror.url}")


def _one_run(folder: Path, url: str, take_newest: bool) -> Path:
    from zero2all.track.reader import find_runs

    runs = find_runs([folder])
    if not runs:
        raise BadInputError(f"There are no runs in {url}. Give a runs folder, a workspace or one run there.")
    if len(runs) > 1 and not take_newest:
        names = ", ".join(run.name for run in runs[:10])
        raise UsageError(f"{url} has {len(runs)} runs: {names}. Add the name of one to the address.")
    return max(runs, key=lambda run: run.status.last_time or 0.0).folder


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
    return {"crashed": "failed", "unknown": "new"}.get(status.state, status.state)


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
    from zero2all.common.files import folder_bytes, human_bytes

    folder = workspace_of(arguments).runs
    runs = [(look_at_run(each), folder_bytes(each)) for each in run_folders(folder)]
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
