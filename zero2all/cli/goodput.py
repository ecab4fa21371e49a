"""`z2a goodput`: where the time of a run went."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.runs import add_run, open_run
from zero2all.cli.verb import Subparsers, add_verb
from zero2all.common.language import padded
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.track.goodput import Goodput

BAR_COLUMNS = 40
BLOCKS = " ▏▎▍▌▋▊▉█"


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "goodput",
        "where the time of a run went: useful steps, and the rest by cause",
        "z2a goodput my-run --work my-workspace",
        _goodput,
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _goodput(arguments: argparse.Namespace) -> None:
    from zero2all.common.errors import BadInputError
    from zero2all.track.goodput import run_goodput
    from zero2all.track.reader import RunReader

    with open_run(arguments.run, arguments) as run:
        found = run_goodput(RunReader(run.folder))
        if not found.starts:
            raise BadInputError(f"There are no metrics of training in {run.folder}, so there is no time to add up.")
    if arguments.json:
        from zero2all.common.jsonio import dumps_pretty

        print(dumps_pretty(found.as_json()).decode(), end="")
        return
    print_goodput(found)


def print_goodput(found: Goodput) -> None:
    """The shares by cause, with bars."""
    print(
        t(
            f"goodput {found.goodput:.1%}: {found.seconds['steps']:,.1f} s of surviving steps in "
            f"{found.total_seconds:,.1f} s"
        )
    )
    print(
        t(
            f"starts {found.starts}, failures with a page {found.incidents}, steps {found.steps:,}, "
            f"lost and repeated {found.lost_steps:,}"
        )
    )
    for cause, seconds in found.seconds.items():
        if seconds > 0:
            share = seconds / found.total_seconds
            print(f"  {padded(t(cause), 12)} {seconds:>12,.1f} s {share:>7.1%} {_bar(share)}")
    print(t(f"of the steps, {found.data_wait_seconds:,.1f} s waited for data"))
    print_stopped(found)


def print_stopped(found: Goodput) -> None:
    """Time that is not part of the account, where there is any."""
    if found.stopped_seconds:
        print(t(f"not counted: {found.stopped_seconds:,.1f} s between an end and the next start"))


def _bar(share: float) -> str:
    eighths = round(share * BAR_COLUMNS * 8)
    return "█" * (eighths // 8) + BLOCKS[eighths % 8].strip()
