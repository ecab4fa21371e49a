"""Which run a word of the command line means: a name in the workspace, a run's folder, or an ssh:// address."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.verb import add_work, workspace_of
from zero2all.common.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from zero2all.track.mirror import Mirror

RUN_HELP = "name of a run in the workspace, a run's folder, or ssh://[user@]host[:port]/path/to/run"


@dataclass(frozen=True)
class OpenRun:
    """A run that can be read on this machine, as long as it is open."""

    folder: Path
    is_remote: bool
    connection: Callable[[], str]  # what to tell a person about the connection; empty for a run on this machine


def add_run(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The argument that names a run (or several), and the workspace flag."""
    if several:
        parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN_HELP)
    else:
        parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_work(parser)


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
                f"{mirror.url} cannot be reached: {mirror.state.removeprefix('broken: ')}. Try `ssh {host}` in a "
                f"terminal: what it asks there (a password, a new host key) cannot be asked here, so set up a key or "
                f"an agent, and check the path."
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
