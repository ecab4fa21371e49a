"""`z2a watch`: a run in the terminal."""

from __future__ import annotations

import argparse

from zero2all.cli.runs import add_run, open_run
from zero2all.cli.verb import Subparsers, add_verb


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    watch = add_verb(
        verbs,
        "watch",
        "watch a run in the terminal, here or on another machine",
        "z2a watch my-run --work my-workspace\n  z2a watch ssh://me@gpu-box/home/me/work/runs/my-run",
        _watch,
    )
    add_run(watch)
    watch.add_argument("--once", action="store_true", help="print one frame and exit (as with output into a pipe)")


def _watch(arguments: argparse.Namespace) -> None:
    import sys
    from contextlib import suppress

    from rich.console import Console

    from zero2all.track.frame import print_frame, watch
    from zero2all.track.reader import RunReader

    with open_run(arguments.run, arguments, take_newest=True) as run:
        reader = RunReader(run.folder)
        console = Console(highlight=False)
        if arguments.once or not sys.stdout.isatty():
            print_frame(reader, console, run.connection())
        else:
            with suppress(KeyboardInterrupt):  # the usual way to stop watching
                watch(reader, console, run.connection)
