"""How a verb is declared: one line of help, an example, its arguments, and the function that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace

Subparsers = Any
"""What argparse's add_subparsers returns; it has no public name."""


def add_verb(
    verbs: Subparsers, name: str, summary: str, example: str, handler: Callable[[argparse.Namespace], int | None]
) -> argparse.ArgumentParser:
    """Register a verb; the handler gets the parsed arguments and returns an exit code (None is 0)."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_work(parser: argparse.ArgumentParser) -> None:
    """The workspace flag that every stage has."""
    parser.add_argument("--work", type=Path, default=Path(), metavar="DIR", help="workspace folder (default: here)")


def workspace_of(arguments: argparse.Namespace, create: bool = False) -> Workspace:
    """The workspace that --work names."""
    from zero2all.common.workspace import open_workspace

    return open_workspace(arguments.work, create=create)
