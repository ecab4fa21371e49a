"""`z2a board`: watch runs in the browser."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_address, add_flags, add_verb, default_work
from zero2all.common.errors import BadInputError
from zero2all.common.language import translate as t


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    board = add_verb(
        verbs,
        "board",
        "watch runs in the browser, here or on other machines",
        "z2a board my-workspace\n  z2a board runs ssh://me@gpu-box/home/me/work/runs",
        _board,
    )
    board.add_argument(
        "places",
        nargs="*",
        default=[str(default_work() or ".")],
        metavar="PATH",
        help="folders that contain runs, at any depth, or ssh://[user@]host/path (default: Z2A_WORK, or here)",
    )
    add_address(board, "port (default: the first free one from 6106)")
    add_flags(
        board,
        ("--open", bool, False, "open the page in the browser"),
        ("--fetch-charts", bool, False, "fetch the chart library of the page with npm, once, and stop"),
    )


def _board(arguments: argparse.Namespace) -> None:
    if arguments.fetch_charts:
        from zero2all.track.chart_library import CHART_LIBRARY, fetch_charts

        print(t(f"fetched {CHART_LIBRARY}") if fetch_charts() else t("The chart library is there already."))
        return
    _require_folders(arguments.places)
    from zero2all.track.server import Board, BoardOptions

    options = BoardOptions(arguments.host, arguments.port, arguments.token, arguments.allow_host)
    board = Board(arguments.places, options)
    for note in board.notes():
        print(t(note))
    print(t(f"The board is at {board.url}   (Ctrl-C ends it)"), flush=True)
    if arguments.open:
        import webbrowser

        webbrowser.open(board.url)
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to end it
        board.serve()


def _require_folders(places: list[str]) -> None:
    """A typing mistake would give an empty board."""
    missing = [place for place in places if "://" not in place and not Path(place).expanduser().exists()]
    if missing:
        raise BadInputError(
            f"There is no folder {', '.join(missing)}. Give folders that contain runs, such as a workspace, or make "
            f"them first."
        )
