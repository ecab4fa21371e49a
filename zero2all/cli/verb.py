"""How a verb is declared: a text above the function that does it, which is also its help.

    @verb('''
        corpus show: print records of a source, or samples of what a rule dropped

        source?                     name of the source (default: all)
        --work
        --split train|valid =train  which split (default train)
        --count N:int>=1 =3         records of each source (default 3)

        z2a corpus show news --count 3 --work my-workspace
        ''')
    def _show(arguments): …

First the words and what the verb does, then a table of its arguments, then examples and notes. A line of the table has
a name, what its value looks like, its default after `=`, and after two spaces its help, which deeper lines continue:

- a flag without a value is a switch;
- `?` behind a name: the value may be left out; `+`: one or more values; `*`: any number of words, or a flag that may be
  repeated; `!`: a flag that is required; `/word`: what the handler calls it;
- a value is a choice (`train|valid`), or a word in capitals with a type from TYPES or a number with its bounds
  (`N:int>=1`, `X:float>0..1`); `out` and `outdir` are checked before the verb begins;
- of consecutive lines that begin with `|` one may be given (`|!`: must be given);
- a line without help names arguments of SHARED; `--section.field` means that the verb takes fields of the config;
- an optional RUN is the only run of the workspace where none is named.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zero2all.cli.parser import VERB, Parser
from zero2all.common.errors import UsageError
from zero2all.common.progress import scaled

if TYPE_CHECKING:
    from zero2all.common.workspace import Workspace

WORK_VARIABLE = "Z2A_WORK"
STAMP_NAME = "workspace.json"  # as in common/workspace.py, which a usage error need not load
LARGEST_WHOLE = (1 << 62) - 1  # whatever is counted is counted in 64 bits, and sums of two such numbers still are
LAST_PORT = 65535
Subparsers = Any  # what argparse's add_subparsers returns; it has no public name

EXAMPLE = "example:"
OVERRIDES_HELP = """\
Any config field can be set here and overrides the file:
  --optim.lr_max 3e-4 --data.mixture '{en: 2, zh: 1}'
All fields with their meaning and value:
  z2a train CONFIG --print-config"""


Handler = TypeVar("Handler", bound=Callable[[argparse.Namespace], int | None])
LINE = re.compile(
    r"(?P<either>\|!? )?(?P<name>[\w.-]+)(/(?P<dest>\w+))?(?P<many>[?+*]*)(?P<required>!?)"
    r"( (?P<value>\S.*?))??( =(?P<default>\S*))?\s{2,}(?P<help>.*)"
)
NUMBER = re.compile(r"(int|float)((>=?)([\d.]+?)(\.\.([\d.]+))?)?")
NO_VALUE: dict[str, Any] = {"None": None, "()": (), "[]": []}
TAKES_FIELDS, WORK_FLAG = "--section.field", "--work"
SHARED: dict[str, list[str]] = {}
"""Arguments of several verbs, which name them without a help: lines of tables by the name of one or of all."""


@dataclass(frozen=True)
class Verb:
    """What `verb` declares; without a handler, a word with verbs below it."""

    words: list[str]
    summary: str
    table: list[str]
    example: str
    handler: Callable[[argparse.Namespace], int | None] | None
    usage: str | None = None
    defaults: Mapping[str, Any] | None = None
    renamed: Mapping[str, str] | None = None  # verbs of before, of a word with verbs below it -> what does it now


DECLARED: dict[str, list[Verb]] = {}
"""By first word: the verbs of the files that were imported."""


def verb(
    text: str, usage: str | None = None, defaults: Mapping[str, Any] | None = None
) -> Callable[[Handler], Handler]:
    """Declare the verb that a function does; it gets the parsed arguments and returns an exit code (None is 0)."""

    def declare(handler: Handler) -> Handler:
        head, table, example = textwrap.dedent(text).strip().split("\n\n", 2)
        _declare(head, list(_joined_lines(table)), example, handler, usage, defaults)
        return handler

    return declare


def group(text: str, renamed: Mapping[str, str] | None = None) -> None:
    """Declare a word with verbs of its own, such as `z2a corpus`: what they do, and an example; `renamed`: its verbs of
    before -> the command that does it now."""
    head, example = textwrap.dedent(text).strip().split("\n\n", 1)
    _declare(head, [], example, None, None, None, renamed)


def _declare(head: str, table: list[str], example: str, handler: Any, *more: Any) -> None:
    words, _, summary = " ".join(head.split()).partition(": ")
    shown = re.sub(r"(?m)^z2a ", "  z2a ", example).lstrip()
    DECLARED.setdefault(words.split()[0], []).append(Verb(words.split(), summary, table, shown, handler, *more))


def _joined_lines(table: str) -> Iterator[str]:
    """The lines of a table, each with those that continue it."""
    return (re.sub(r"\n\s+", " ", line) for line in re.split(r"\n(?! )", textwrap.dedent(table).strip()))


def add_declared(verbs: Subparsers, word: str) -> None:
    """Add the verbs that begin with this word to a parser."""
    inner = verbs
    for each in sorted(DECLARED[word], key=lambda each: each.handler is not None):  # the word itself first
        takes_fields = TAKES_FIELDS in each.table
        epilog = f"{OVERRIDES_HELP}\n\n" if takes_fields else ""
        parser: Parser = inner.add_parser(
            *each.words[-1:], help=each.summary, description=each.summary, epilog=f"{epilog}{EXAMPLE}\n  {each.example}"
        )
        if each.handler is None:
            parser.renamed = dict(each.renamed or {})
            inner = parser.add_subparsers(title="verbs", metavar=VERB, required=True)
            continue
        parser.set_defaults(handler=each.handler, takes_overrides=takes_fields, reads_config=takes_fields)
        add_table(parser, [line for line in each.table if line != TAKES_FIELDS])
        parser.set_defaults(**(each.defaults or {}))
        parser.usage = each.usage


def share(table: str, name: str | None = None) -> None:
    """Arguments that several verbs have: they name each without its help, or all of the table by its name."""
    for line in _joined_lines(table):
        SHARED.setdefault(name or line.split()[0], []).append(line)


def _expanded(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if "  " in line or line == WORK_FLAG:
            yield line
        else:
            for name in line.split():
                yield from _expanded([name] if name == WORK_FLAG else SHARED[name])


def add_table(parser: Parser, table: Iterable[str]) -> None:
    """Add the arguments of a table, whose lines are whole."""
    either: Any = None
    for line in _expanded(table):
        if line == WORK_FLAG:
            add_work(parser)
            continue
        found = LINE.fullmatch(line)
        assert found is not None, f"{parser.prog}: {line!r} is no line of a table of arguments"
        if not found["either"]:
            either = None
        elif either is None:
            either = parser.add_mutually_exclusive_group(required="!" in found["either"])
        _add_argument(parser, either or parser, found)


def _add_argument(parser: Parser, to: Any, found: re.Match[str]) -> None:
    name, many, value, default = found["name"], found["many"], found["value"] or "", found["default"]
    is_flag = name.startswith("--")
    details: dict[str, Any] = {"help": found["help"]}
    details |= {"dest": found["dest"]} if found["dest"] else {}
    details |= {"required": True} if found["required"] else {}
    metavar, _, kind = value.rpartition(":")
    read = _type_of(kind)
    if default is not None:
        details["default"] = NO_VALUE[default] if default in NO_VALUE else (read or str)(default)
    if is_flag and not value:
        to.add_argument(name, action="store_true", **details)
        return
    if "+" in many or many == "?" or (many and not is_flag):
        details |= {"nargs": many[0], **({"const": ""} if is_flag and many == "?" else {})}
    if is_flag and "*" in many:
        details = {"default": [], **details, "action": "extend" if "+" in many else "append"}
    if "|" in value and value == value.lower():
        details["choices"] = tuple(value.split("|"))
    elif value:
        details["metavar"] = metavar if read else value
    if kind in ("out", "outdir"):
        details["metavar"] = "DIR" if kind == "outdir" else "FILE"
    action = to.add_argument(name, **details, **({"type": read} if read else {}))
    if kind in ("out", "outdir"):  # before the verb begins, `main` checks that it can be written
        outputs = (*(parser.get_default("outputs") or ()), (action.dest, name, kind == "outdir"))
        parser.set_defaults(outputs=outputs)
    if not is_flag and many and value.startswith("RUN"):
        parser.set_defaults(run_argument=action.dest)


def _type_of(name: str) -> Callable[[str], Any] | None:
    """The type that a table calls so; None: it is no type, but the end of a word such as HOST:PORT."""
    number = NUMBER.fullmatch(name)
    if number is None:
        assert name in TYPES or name != name.lower() or not name.isidentifier(), f"there is no type {name}"
        return TYPES.get(name)
    least, most = number[4], number[6]
    if number[1] == "int":
        return whole(*(int(bound) for bound in (least, most) if bound is not None))
    return real(float(least), None if most is None else float(most), is_open=number[3] == ">")


def step_or_best(text: str) -> int | str:
    """A type for a flag: a step, or `best`."""
    return text if text == "best" else whole(0)(text)


def node_counts(text: str) -> tuple[int, int]:
    """A type for a flag: machines, N or MIN:MAX."""
    from zero2all.parallel.nodes import read_counts

    try:
        return read_counts(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text[:100]!r}, expected a number of machines, such as 4, or the least and the most, such as 2:4"
        ) from None


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


def _named_path(text: str) -> Path:
    """A path that somebody wrote: an unset variable of the shell would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def write_json_result(path: Path | None, value: object) -> bool:
    """Write what `--json` asks for; returns whether it took standard output, where nothing else may be printed."""
    if path is None:
        return False
    if str(path) != "-":
        from zero2all.common.files import write_json

        write_json(path, value)
        return False
    print_json(value)
    return True


def print_json(value: object) -> None:
    """Print what `--json` without a file asks for."""
    from zero2all.common.jsonio import dumps_pretty

    print(dumps_pretty(value).decode(), end="")


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse a path that the verb could not write to, before hours of work end there."""
    for name, flag, is_folder in getattr(arguments, "outputs", ()):
        if (path := getattr(arguments, name)) is not None:
            from zero2all.common.workspace import require_output

            require_output(path, flag, is_folder)
            if flag == "--json" and not path.parent.is_dir():
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
    with suppress(ValueError):
        if 0 <= (value := scaled(text, SECONDS)) <= LONGEST_SECONDS:
            return value
    raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected {TIME}")


def amount(text: str) -> float:
    """A type for add_argument: tokens/s, FLOPs and the like, also as 1.5T."""
    with suppress(ValueError):
        if (value := scaled(text.upper())) > 0:
            return value
    raise argparse.ArgumentTypeError(f"got {text[:100]!r}, expected {AMOUNT}")


def count(text: str) -> int:
    """A type for add_argument: tokens, parameters and other things that are many, also as 7.5B."""
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


TYPES: dict[str, Callable[[str], Any]] = {
    **{"path": Path, "count": count, "step": step_or_best, "nodes": node_counts},
    **{"out": _named_path, "outdir": _named_path, "named_path": _named_path},
}
"""What tables call the types of values; a file adds those that only its verbs have."""

share("""
    run? RUN                          name of the run (default: the one run of the workspace)
    model? RUN|FOLDER                 name or folder of a run, or a Hugging Face folder (default: the one run of the
        workspace)
    config CONFIG                     a preset or the path of a YAML file, as for `z2a train`
    --json                            print JSON
    --step N|best:step                checkpoint to use: its step, or best: the one with the lowest held-out loss
        (default: the newest)
    --device NAME                     auto, cpu, cuda or cuda:1 (default auto: a GPU where there is one)
    --dtype float32|bfloat16|float16  precision of weights and computation (default: bfloat16 on a GPU, float32 on
        the CPU)
    --weights plain|int8|int4 =plain  int8, int4: keep the weights of linear layers in 8 or 4 bits: less memory,
        slightly worse (default plain: as --dtype says)
    --parallel.tensor/tensor N:int>=1 =1      ranks that share the heads of each block and their cache (default 1)
    --parallel.pipeline/pipeline N:int>=1 =1  ranks that have some of the blocks each (default 1)
    --top-k N:int>=0 =0               sample only from the N most likely tokens (default 0: all)
    --top-p X:float>0..1 =1           sample only from the most likely tokens that together have this probability
        (default 1: all)
    --min-p X:float>=0..1 =0          sample only from tokens at least X times as likely as the most likely one
        (default 0: all)
    --repetition-penalty X:float>=0 =1  above 1: tokens that already occurred become less likely (default 1)
    --stop* TEXT                      end before this text; may be repeated
    --seed N:int>=0 =0                seed of the sampling (default 0); needs a temperature
    --host ADDRESS =127.0.0.1         address to listen on (default: 127.0.0.1); any other address requires a token,
        which is printed
    --token                           require a token on 127.0.0.1 too, for shared machines
    --allow-host* NAME                another host name to accept, such as a proxy's; can be repeated
    --data DIR:path =eval-data        folder with a folder of files for each benchmark (default eval-data)
    --workers N:int>=1                parallel tasks (default: one per core)
    --address ADDRESS                 address of a Ray cluster whose nodes share the workspace (default: start Ray here)
    --endpoint URL                    hub or mirror (default: HF_ENDPOINT, or the hub)
    """)
