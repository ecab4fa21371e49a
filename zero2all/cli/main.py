"""The entry point: all verbs, and one way to end a command that went wrong."""

import argparse
import dataclasses
import errno
import io
import os
import shlex
import signal
import stat
import sys
import typing
from collections.abc import Container, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from zero2all import __version__
from zero2all.cli.parser import VERB, Parser, closest
from zero2all.cli.terminal import can_show_chinese, print_fitted, show_what_the_encoding_lacks
from zero2all.cli.verb import DECLARED, add_declared, check_outputs, is_workspace
from zero2all.common import language
from zero2all.common.errors import (
    AnomalyError,
    BadInputError,
    DiskError,
    LostRunError,
    PreemptedError,
    RunLockedError,
    UsageError,
    UserError,
    exceeded_limit,
    is_disk_full,
    is_out_of_memory,
)
from zero2all.common.language import translate as t
from zero2all.common.progress import show_log

EPILOG = """\
start here:
  z2a quickstart

help of a verb, with an example:
  z2a train --help

exit codes: 0 done, 1 a bug or a lost process, 2 usage or config, 3 bad input,
            4 disk or memory full, 10 stopped and saved, 12 run stopped itself,
            13 run in use, 14 run taken over, 15 fails every time,
            16 bad machine, 130 interrupted"""
MODULES = {
    **{"help": "overview", "quickstart": "quickstart", "speedrun": "quickstart", "corpus": "corpus"},
    **{"tokenizer": "tokenizer", "pack": "data"},
    **{"data": "data", "train": "train", "launch": "launch", "anneal": "runs", "runs": "runs"},
    **{"chaos": "train", "inspect": "runs", "board": "track", "watch": "track", "plot": "track"},
    **{"track": "track", "eval": "evaluate", "generate": "generate", "chat": "generate", "serve": "generate"},
    **{"export": "exchange", "import": "exchange", "sft": "finetune", "dpo": "finetune", "rl": "finetune"},
    **{"sweep": "experiments", "scaling": "experiments", "mixture": "experiments", "perf": "perf", "doctor": "doctor"},
}
"""The first words of the command line, in the order of the help, and the file of each: only that one is imported."""
REMOVED = {
    "completion": language.message(
        "`z2a completion` was removed. `z2a --help` and `z2a help VERB` show what may be typed."
    ),
    "supervise": language.message(
        "`z2a supervise` was removed. For programs other than `z2a train` use torchrun --max-restarts."
    ),
}
"""First words of before, and what to do now."""
OUT_BEFORE = ("--to", "--write", "--output")
"""What `--out` was called."""
INTERRUPTED = 130
DECIDED_TOGETHER = tuple(error.exit_code for error in (PreemptedError, AnomalyError, RunLockedError, LostRunError))
"""Ends of a training run that all of its processes come to at once."""
WHOLE_SECTIONS = ("stages",)  # sections that are lists, so that they are set as a whole: --stages '[{name: …}]'
REFUSED_PATH_ERRNOS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""A path that cannot be used the way it was given: a matter between the person and their disk."""


def main(words: list[str] | None = None) -> int:
    """Run `z2a WORDS…`; returns the exit code."""
    _open_closed_streams()
    outlive_readers()  # first: it makes new streams where those of a forked rank have become pipes
    show_what_the_encoding_lacks()
    show_log()
    code, message = _run(words)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if words is None else ():
        signal.signal(number, signal.SIG_IGN)  # this is the end, and another Ctrl-C must not change its exit code
    if message:
        with suppress(OSError):  # without a terminal the code still says how it ended
            print_fitted(f"z2a: {language.translate(message)}", sys.stderr)
    _close_dead_streams()
    return code


def _run(words: list[str] | None) -> tuple[int, str]:
    """The exit code, and what to say about it."""
    try:
        is_own_process = words is None
        if is_own_process and signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        words = take_language(sys.argv[1:] if words is None else words)
        if language.language() == "zh" and not can_show_chinese():
            os.environ[language.LANGUAGE_VARIABLE] = "en"  # better than escapes (backslash, u, four digits)
        if not words:
            from zero2all.cli.overview import print_overview

            print_overview()
            return 0, ""
        arguments = parse(words)
        arguments.is_own_process = is_own_process
        if "run_argument" in arguments:
            from zero2all.cli.runs import fill_in_run

            fill_in_run(arguments)
        check_outputs(arguments)
        code = arguments.handler(arguments) or 0
        sys.stdout.flush()  # here, where a full disk can still be reported
        return code, ""
    except UserError as error:
        return _fail_for_person(error)
    except KeyboardInterrupt as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, PreemptedError):  # it was saved before: so the run ended
            cause = cause.__context__
        if cause is not None:
            return _fail_for_person(cause)
        return INTERRUPTED, language.translate(
            "interrupted. Finished work is kept; run the same command again to continue."
        )
    except Exception as error:
        return _fail_for_disk_or_path(error)


def _open_closed_streams() -> None:
    """Started without output streams (`>&-`, some services), write nowhere instead of into the first file we open."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # It takes the lowest free number, which is this one. What we start gets it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


class _Pipe(io.FileIO):
    """A pipe whose reader may leave (`| head`): what is written after that goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Finish the work when nobody reads the output any more, instead of ending halfway."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is not io.TextIOWrapper or not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            continue
        raw = _Pipe(stream.fileno(), "w", closefd=False)
        pipe: Any = raw if stream.write_through else io.BufferedWriter(raw)  # `python -u` has no buffer
        stays = io.TextIOWrapper(
            pipe, stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through
        )
        setattr(sys, name, stays)


def _close_dead_streams() -> None:
    """Send what cannot be written any more (reader or terminal gone) nowhere, or the interpreter ends with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def take_language(words: list[str]) -> list[str]:
    """Obey `--lang LANGUAGE`, wherever it stands, before anything is printed; returns the other words."""
    rest = list(words)
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word == "--":
            break
        if name != "--lang":
            continue
        value = value if equals else "".join(words[place + 1 : place + 2])
        if value not in language.LANGUAGES:
            raise UsageError(f"--lang takes one of: {', '.join(language.LANGUAGES)}; got {value!r}.")
        os.environ[language.LANGUAGE_VARIABLE] = value
        del rest[place : place + (1 if equals else 2)]
        break
    return rest


def split_overrides(words: list[str], flags: Container[str] = ()) -> tuple[list[str], list[str]]:
    """The words for argparse, and the overrides `--section.field VALUE`, whose values it would take for arguments.
    `flags`: those of a verb, which may be named as fields are."""
    plain: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        if word == "--":
            return [*plain, word, *rest], overrides
        if word.startswith("--") and ("." in name or name in WHOLE_SECTIONS) and f"--{name}" not in flags:
            overrides.append(word)
            if not equals and rest and not rest[0].startswith("--"):
                overrides.append(rest.pop(0))
        else:
            plain.append(word)
    return plain, overrides


def build_parser(words: Iterable[str] = MODULES) -> Parser:
    """The whole command line, or the verbs that begin with some words."""
    parser = Parser(prog="z2a", description="From raw text to a language model of your own.", epilog=EPILOG)
    parser.renamed, parser.removed = {"goodput": "z2a perf explain"}, REMOVED
    parser.add_argument("--lang", choices=language.LANGUAGES, help="language of messages (default: your locale's)")
    about = "show the version and exit"
    parser.add_argument("--version", action="version", version=f"z2a {__version__}", help=about)
    verbs = parser.add_subparsers(title="verbs", metavar=VERB, required=True)
    for word in words:
        import_module(f"zero2all.cli.{MODULES[word]}")
        add_declared(verbs, word)
    return parser


def with_verb(words: list[str]) -> list[str]:
    """`eval` and `eval NAME …` as `eval run …`, and `chaos run PLAN …`, its name of before, as `chaos PLAN …`; other
    command lines, and `eval --help`, as they are."""
    if words[:2] == ["chaos", "soak"]:
        raise UsageError("`z2a chaos soak` was removed. `make soak` in a checkout of zero2all does it.")
    if words[:2] == ["chaos", "run"]:
        return ["chaos", *words[2:]]
    if words[:1] != ["eval"]:
        return words
    import_module(f"zero2all.cli.{MODULES['eval']}")
    known = {"-h", "--help", *(each.words[-1] for each in DECLARED["eval"] if each.handler)}
    known |= {name for each in DECLARED["eval"] for name in each.renamed or ()}
    return words if words[1:2] and words[1] in known else ["eval", "run", *words[1:]]


def parse(words: list[str]) -> argparse.Namespace:
    """The arguments of a command line; an error, with the nearest name, where it cannot be understood."""
    plain, overrides = split_overrides(words)
    plain = with_verb(plain)
    parser = build_parser(tuple(plain[:1]) if plain[:1] and plain[0] in MODULES else tuple(MODULES))
    if plain[:1] and plain[0][0] != "-" and plain[0] not in MODULES:
        parser.verb(plain[0])  # which says what there is instead
    verb = parser.find(plain)
    plain, overrides = split_overrides(words, verb.flags)
    plain = with_verb(plain)
    _refuse_unknown_flags(verb, plain)
    reads_config = bool(verb.get_default("reads_config"))
    if reads_config:
        _refuse_unknown_fields(overrides, sections_only=True)
    try:
        arguments, stray = parser.parse_known_args(plain)
    except UsageError as error:
        if reads_config:  # the name is the first mistake: a missing argument is seen sooner
            _refuse_unknown_fields(overrides)
        if plain[0] == "chaos" and "--work" not in words and not is_workspace(verb.get_default("work") or Path()):
            raise UsageError(f"{error} There is no workspace here: name one with --work DIR.") from None
        raise
    if stray:
        if "--work" in verb.flags and is_workspace(Path(stray[0])):
            meant = f"--work {shlex.quote(stray[0])}"
            raise UsageError(
                f"`{verb.prog}` takes no argument `{stray[0]}`. Did you mean `{meant}`? See `{verb.prog} --help`."
            )
        raise UsageError(f"`{verb.prog}` takes no argument `{stray[0]}`. See `{verb.prog} --help`.")
    if overrides and not arguments.takes_overrides:
        raise UsageError(
            f"`{verb.prog}` reads no config, so `{overrides[0]}` cannot be set here. Config fields belong to "
            f"`z2a train` and `z2a quickstart`; for the flags of this verb see `{verb.prog} --help`."
        )
    arguments.overrides, arguments.command_line, arguments.whole_parser = overrides, words, build_parser
    return arguments


def _refuse_unknown_flags(verb: Parser, words: list[str]) -> None:
    """Before argparse looks: it would first complain about something that is missing."""
    for word in words[: words.index("--") if "--" in words else None]:
        flag = word.partition("=")[0]
        if not flag.startswith("--") or flag in verb.flags:
            continue
        meant = "--out" if flag in OUT_BEFORE and "--out" in verb.flags else closest(flag, verb.flags)
        if meant is None and verb.get_default("reads_config"):
            meant = field_for_flag(flag)
        if meant is None:
            raise UsageError(f"`{verb.prog}` has no flag `{flag}`. See `{verb.prog} --help`.")
        raise UsageError(f"`{verb.prog}` has no flag `{flag}`. Did you mean `{meant}`? See `{verb.prog} --help`.")


def _refuse_unknown_fields(overrides: list[str], sections_only: bool = False) -> None:
    if overrides and (problem := unknown_field(overrides, sections_only)):
        raise UsageError(problem)


def _fail_for_person(error: UserError) -> tuple[int, str]:
    is_of_all = error.of_all_ranks or error.exit_code in DECIDED_TOGETHER
    if error.is_said or (is_of_all and os.environ.get("RANK", "0") != "0"):
        return error.exit_code, ""  # the first process says it for all, or the one that started this
    return error.exit_code, str(error)


def _fail_for_disk_or_path(error: Exception) -> tuple[int, str]:
    """End for what the disk, the memory or a limit refused; anything else is a bug of ours and keeps its traceback."""
    if limit := exceeded_limit(error):
        return DiskError.exit_code, language.translate(f"Stopped: {limit}.")
    if is_disk_full(error):
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if isinstance(error, OSError) and error.filename:
            full = language.translate(f"the disk is full, so {error.filename} could not be written ({reason}).")
        else:
            full = language.translate(f"the disk is full ({reason}).")
        again = language.translate(
            "Unfinished files were removed. Free some space and run the same command again to continue."
        )
        return DiskError.exit_code, f"{full} {again}"
    if is_out_of_memory(error):
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return DiskError.exit_code, language.translate(
            f"there is not enough memory ({reason[:300]}). Unfinished files were removed. Give the process more "
            f"memory (check `ulimit -v` and what else runs on the machine or the GPU), or use smaller batches."
        )
    if isinstance(error, OSError) and error.errno in REFUSED_PATH_ERRNOS and error.filename:
        return BadInputError.exit_code, language.translate(
            f"{error.filename} cannot be used: {error.strerror}. Check the path (a folder where a folder is "
            f"expected) and your permissions, then run the command again."
        )
    raise error


# ---- the fields of a run's config, as they are named on the command line: `--optim.lr_max` ----


def field_names() -> list[str]:
    """Every field of the config by its dotted name, such as `optim.lr_max`."""
    from zero2all.config import RunConfig

    return list(_names(RunConfig, ""))


def _names(section: type, place: str) -> typing.Iterator[str]:
    for name, kind in typing.get_type_hints(section).items():
        inner = _section_in(kind)
        if inner is None:
            yield f"{place}{name}"
        else:
            yield from _names(inner, f"{place}{name}.")


def _section_in(kind: Any) -> type | None:
    """The section that a field holds, also where it may be null; None for a plain field."""
    options = [kind, *typing.get_args(kind)] if typing.get_origin(kind) not in (list, dict) else []
    return next((each for each in options if isinstance(each, type) and dataclasses.is_dataclass(each)), None)


def unknown_field(overrides: list[str], sections_only: bool = False) -> str | None:
    """What is wrong with the first override that names no field; `sections_only`: with its section."""
    known = field_names()
    sections = {name.partition(".")[0] for name in known}
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or (sections_only and name.partition(".")[0] in sections):
            continue
        if any(name == each or name.startswith(f"{each}.") or each.startswith(f"{name}.") for each in known):
            continue
        meant = closest(name, known)
        if meant is None:
            return t(f"There is no config field `{name}`. `z2a train CONFIG --print-config` lists all fields.")
        return t(
            f"There is no config field `{name}`. Did you mean `--{meant}`? `z2a train CONFIG --print-config` lists all "
            f"fields."
        )
    return None


def field_for_flag(flag: str) -> str | None:
    """The config field that a flag without a section probably means: --lr is `--optim.lr_max`."""
    word = flag.removeprefix("--").replace("-", "_")
    leaves = {name.rpartition(".")[2]: name for name in reversed(field_names())}
    begun = [leaf for leaf in leaves if leaf == word or leaf.startswith(f"{word}_")]
    leaf = min(begun, key=len) if begun else closest(word, leaves)
    return None if leaf is None else f"--{leaves[leaf]}"
