"""How a verb is declared: one line of help, an example, its arguments, and the function that does it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.parser import VERB, Parser
from zero2all.common.errors import UsageError

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace

WORK_VARIABLE = "Z2A_WORK"
STAMP_NAME = "workspace.json"  # as in common/workspace.py, which a usage error need not load
LARGEST_WHOLE = (1 << 62) - 1  # whatever is counted is counted in 64 bits, and sums of two such numbers still are
LAST_PORT = 65535
Subparsers = Any  # what argparse's add_subparsers returns; it has no public name

EXAMPLE = "example:"
DEVICES = ("auto", "cpu", "cuda")
CONFIG_HELP = (
    "a preset (quickstart, four-phases, z2all-100m, z2all-1b, llm-zero2all-1b, z2all-moe) or the path of a YAML file"
)
MODEL_HELP = "a preset, a YAML file, a run's folder, or a published model: llama-3.1-8b, mixtral-8x7b, …"
OVERRIDES_HELP = """\
Any config field can be set here and overrides the file:
  --optim.lr_max 3e-4 --data.mixture '{en: 2, zh: 1}'
All fields with their meaning and value:
  z2a train CONFIG --print-config"""


def add_verb(
    verbs: Subparsers,
    name: str,
    summary: str,
    example: str,
    handler: Callable[[argparse.Namespace], int | None],
    takes_overrides: bool = False,
) -> Parser:
    """Register a verb; the handler gets the parsed arguments and returns an exit code (None is 0)."""
    notes = f"{OVERRIDES_HELP}\n\n" if takes_overrides else ""
    parser = _parser(verbs, name, summary, f"{notes}{EXAMPLE}\n  {example}")
    parser.set_defaults(handler=handler, takes_overrides=takes_overrides, reads_config=takes_overrides)
    return parser


def add_group(
    verbs: Subparsers, name: str, summary: str, example: str, renamed: dict[str, str] | None = None
) -> Subparsers:
    """Register a word with verbs of its own, such as `z2a corpus`; `renamed`: its verbs of before -> the command that
    does it now."""
    parser = _parser(verbs, name, summary, f"{EXAMPLE}\n  {example}")
    parser.renamed = renamed or {}
    return parser.add_subparsers(title="verbs", metavar=VERB, required=True)


def _parser(verbs: Subparsers, name: str, summary: str, epilog: str) -> Parser:
    parser: Parser = verbs.add_parser(name, help=summary, description=summary, epilog=epilog)
    return parser


def add_work(parser: argparse.ArgumentParser) -> None:
    """The workspace flag that every stage has."""
    about = f"workspace folder (default: {WORK_VARIABLE}, or the one you are in)"
    default = default_work() or enclosing_workspace() or Path()
    parser.add_argument("--work", type=Path, default=default, metavar="DIR", help=about)


def default_work() -> Path | None:
    """The workspace that the environment names."""
    named = os.environ.get(WORK_VARIABLE)
    return Path(named) if named else None


def enclosing_workspace() -> Path | None:
    """The workspace whose folder `runs`, `corpus` or other is the current folder, at any depth."""
    with suppress(OSError):  # a current folder that was deleted
        if not is_workspace(Path()):
            return next(filter(is_workspace, Path().absolute().parents), None)
    return None


def is_workspace(folder: Path) -> bool:
    """Whether a folder carries the mark of a workspace."""
    return (folder / STAMP_NAME).is_file()


def workspaces_below() -> list[Path]:
    """The workspaces directly below the current folder, the newest first."""
    found = [stamp.parent for stamp in Path().glob(f"*/{STAMP_NAME}")]
    return sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)


def add_flags(parser: argparse.ArgumentParser, *flags: tuple[str, Any, Any, str]) -> None:
    """Flags, each as `--name METAVAR`, its type (bool: a switch; in a list: it may be repeated) or its choices, its
    default and its help."""
    for name, kind, default, about in flags:
        flag, _, metavar = name.partition(" ")
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=about)
        else:
            reads = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
            if isinstance(kind, list):
                reads = {"type": kind[0], "action": "append"}
            parser.add_argument(flag, default=default, metavar=metavar or None, help=about, **reads)


def add_address(parser: argparse.ArgumentParser, port: str, *more: tuple[str, Any, Any, str]) -> None:
    """Where a page is served and who may see it; `port` is the help of --port."""
    host = "address to listen on (default: 127.0.0.1); any other address requires a token, which is printed"
    add_flags(
        parser,
        ("--port N", whole(0, LAST_PORT), None, port),
        ("--host ADDRESS", str, "127.0.0.1", host),
        ("--token", bool, False, "require a token on 127.0.0.1 too, for shared machines"),
        *more,
        ("--allow-host NAME", [str], [], "another host name to accept, such as a proxy's; can be repeated"),
    )


def add_config(parser: argparse.ArgumentParser, about: str = CONFIG_HELP, **details: Any) -> None:
    """The config that a verb takes."""
    parser.add_argument("config", metavar="CONFIG", help=about, **details)


def add_output(parser: argparse.ArgumentParser, flag: str, is_folder: bool = False, **details: Any) -> None:
    """A flag that names a file or folder to write. Before the verb begins, `main` checks that this can be done."""
    action = parser.add_argument(flag, type=_named_path, metavar="DIR" if is_folder else "FILE", **details)
    parser.set_defaults(outputs=(*(parser.get_default("outputs") or ()), (action.dest, flag, is_folder)))


def _named_path(text: str) -> Path:
    """A path that somebody wrote: an unset variable of the shell would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag `--json FILE`, or `-` for standard output; `write_json_result` obeys it."""
    add_output(parser, "--json", help="also write the result as JSON; - prints only that")


def write_json_result(path: Path | None, value: object) -> bool:
    """Write what `--json` asks for; returns whether it took standard output, where nothing else may be printed."""
    if path is None:
        return False
    if str(path) != "-":
        from zero2all.common.files import write_json

        write_json(path, value)
        return False
    from zero2all.common.jsonio import dumps_pretty

    print(dumps_pretty(value).decode(), end="")
    return True


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a path that the verb could not write to, before hours of work end there."""
    for name, flag, is_folder in getattr(arguments, "outputs", ()):
        if (path := getattr(arguments, name)) is not None:
            from zero2all.common.workspace import require_output

            require_output(path, flag, is_folder)
            if flag in ("--json", "--write") and not path.parent.is_dir():
                raise UsageError(f"{flag} {path}: there is no folder {path.parent}. Make it first, or choose another.")


def workspace_of(arguments: argparse.Namespace, create: bool = False) -> Workspace:
    """The workspace that --work names."""
    from zero2all.common.workspace import open_workspace

    work: Path = arguments.work
    if not create and not is_workspace(work):
        if work == default_work():
            raise UsageError(
                f"{WORK_VARIABLE} is {work}, which is not a workspace (it has no {STAMP_NAME}). Set it to a workspace, "
                f"unset it, or give the folder with --work."
            )
        below = [folder.name for folder in workspaces_below()] if work == Path() else []
        if below:
            raise UsageError(
                f"This folder is not a workspace, but it holds some: {', '.join(below)}. Add --work {below[0]} or set "
                f"{WORK_VARIABLE}."
            )
    return open_workspace(work, create=create)


COUNT = "a whole number of at least 1, such as 8, 4096, 1.1e9 or 7.5B"
AMOUNT = "a number above 0 and at most 1e30, such as 312, 2e12 or 1.5T"

TIME = "a time, such as 60 (seconds), 90s, 10m, 3h or 5d"
LONGEST_SECONDS = 1e10  # three centuries: more is a slip of a unit
SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """A type for add_argument: a time in seconds, also as 10m, 3h or 54d."""
    from zero2all.common.progress import scaled

    with suppress(ValueError):
        if 0 <= (value := scaled(text, SECONDS)) <= LONGEST_SECONDS:
            return value
    raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected {TIME}")


def amount(text: str) -> float:
    """A type for add_argument: tokens/s, FLOPs and the like, also as 1.5T."""
    from zero2all.common.progress import scaled

    with suppress(ValueError):
        if (value := scaled(text.upper())) > 0:
            return value
    raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected {AMOUNT}")


def count(text: str) -> int:
    """A type for add_argument: tokens, parameters and other things that are many, also as 7.5B."""
    from zero2all.common.progress import scaled

    with suppress(ValueError):
        value = round(scaled(text.upper()), 6)
        if value.is_integer() and 1 <= value <= LARGEST_WHOLE:
            return int(value)
    raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected {COUNT}")


def whole(minimum: int = -LARGEST_WHOLE, maximum: int = LARGEST_WHOLE) -> Callable[[str], int]:
    """A type for add_argument: a whole number from `minimum` to `maximum`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value > maximum:
            raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected a whole number, at most {maximum}")
        if value < minimum == -LARGEST_WHOLE:
            raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected a whole number")
        if value < minimum:
            raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected a whole number, at least {minimum}")
        return value

    return read


def real(minimum: float, maximum: float | None = None, is_open: bool = False) -> Callable[[str], float]:
    """A type for add_argument: a number from `minimum` to `maximum`; `is_open`: the minimum itself is none."""
    if is_open:
        bounds = f"above {minimum:g}" if maximum is None else f"above {minimum:g} and at most {maximum:g}"
    else:
        bounds = f"at least {minimum:g}" if maximum is None else f"from {minimum:g} to {maximum:g}"

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
