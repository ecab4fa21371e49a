"""How a verb is declared: one line of help, an example, its arguments, and the function that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.language import translate

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace

LARGEST_WHOLE = (1 << 62) - 1  # whatever is counted is counted in 64 bits, and sums of two such numbers still are
LAST_PORT = 65535
Subparsers = Any  # what argparse's add_subparsers returns; it has no public name

OVERRIDES_HELP = """\
Any field of the config can be set here, over what its file says:
  --optim.lr_max 3e-4 --data.mixture '{en: 2, zh: 1}'
All fields, what they mean and what they are now:
  z2a train CONFIG --print-config"""


def add_verb(
    verbs: Subparsers,
    name: str,
    summary: str,
    example: str,
    handler: Callable[[argparse.Namespace], int | None],
    takes_overrides: bool = False,
) -> argparse.ArgumentParser:
    """Register a verb; the handler gets the parsed arguments and returns an exit code (None is 0)."""
    notes = f"{OVERRIDES_HELP}\n\n" if takes_overrides else ""
    parser = _parser(verbs, name, summary, f"{notes}example:\n  {example}")
    parser.set_defaults(handler=handler, verb=parser, takes_overrides=takes_overrides)
    return parser


def add_group(verbs: Subparsers, name: str, summary: str, example: str) -> Subparsers:
    """Register a word with verbs of its own, such as `z2a corpus`."""
    parser = _parser(verbs, name, summary, f"example:\n  {example}")
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def _parser(verbs: Subparsers, name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
    looks = {"help": summary, "description": summary, "epilog": epilog, "formatter_class": HelpFormatter}
    parser: argparse.ArgumentParser = verbs.add_parser(name, **looks, allow_abbrev=False)
    return parser


def add_work(parser: argparse.ArgumentParser) -> None:
    """The workspace flag that every stage has."""
    parser.add_argument("--work", type=Path, default=Path(), metavar="DIR", help="workspace folder (default: here)")


def add_output(parser: argparse.ArgumentParser, flag: str, is_folder: bool = False, **details: Any) -> None:
    """A flag that names a file or folder to write. Before the verb begins, `main` checks that this can be done."""
    action = parser.add_argument(flag, type=_named_path, metavar="DIR" if is_folder else "FILE", **details)
    parser.set_defaults(outputs=(*(parser.get_default("outputs") or ()), (action.dest, flag, is_folder)))


def _named_path(text: str) -> Path:
    """A path that somebody wrote: an unset variable of the shell would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path names nothing to write")
    return Path(text)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a path that the verb could not write to, before hours of work end there."""
    from zero2all.common.workspace import require_output

    for name, flag, is_folder in getattr(arguments, "outputs", ()):
        if (path := getattr(arguments, name)) is not None:
            require_output(path, flag, is_folder)


def workspace_of(arguments: argparse.Namespace, create: bool = False) -> Workspace:
    """The workspace that --work names."""
    from zero2all.common.workspace import open_workspace

    return open_workspace(arguments.work, create=create)


def whole(minimum: int, maximum: int = LARGEST_WHOLE) -> Callable[[str], int]:
    """A type for add_argument: a whole number from `minimum` to `maximum`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            bounds = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected a whole number, {bounds}")
        return value

    return read


def real(minimum: float, maximum: float | None = None, is_open: bool = False) -> Callable[[str], float]:
    """A type for add_argument: a number from `minimum` to `maximum`; `is_open`: the minimum itself is none."""
    bounds = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"
    if is_open:
        bounds = f"above {minimum:g}" + ("" if maximum is None else f" and at most {maximum:g}")

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        is_above = minimum < value if is_open else minimum <= value
        if not (is_above and value < float("inf") and (maximum is None or value <= maximum)):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a number, {bounds}")
        return value

    return read


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are written, gives the longest verb a place on the line of its help, and translates."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help and translate(action.help)

    def add_text(self, text: str | None) -> None:
        """A description, or an example with its notes."""
        super().add_text(text and translate(text))

    def start_section(self, heading: str | None) -> None:
        """Such as `options`."""
        super().start_section(heading and translate(heading))

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """The first line."""
        super().add_usage(usage, actions, groups, translate("usage: ") if prefix is None else prefix)

    def add_argument(self, action: argparse.Action) -> None:
        """Also count the width of a verb's indented name, which argparse forgets."""
        super().add_argument(action)
        for verb in self._iter_indented_subactions(action):
            width = len(self._format_action_invocation(verb)) + self._current_indent
            self._action_max_length = max(self._action_max_length, width)
