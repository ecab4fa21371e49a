"""Which run a word of the command line means: a name in the workspace, a run's folder, or an ssh:// address."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.run_list import run_folders
from zero2all.cli.verb import add_work, workspace_of
from zero2all.common.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from zero2all.track.mirror import Mirror

RUN_HELP = (
    "name of a run in the workspace, a run's folder, or ssh://[user@]host[:port]/path/to/run (default: the one run of "
    "the workspace)"
)
NAMED_RUNS = 10


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
    """Name the one run of the workspace where the command line names none."""
    argument = getattr(arguments, "run_argument", None)
    if argument is None or getattr(arguments, argument):
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
        from zero2all.track.mirror import Mirror
        from zero2all.track.sidecar import user_cache

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
