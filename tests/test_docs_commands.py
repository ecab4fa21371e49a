"""Every command, flag and config field that the pages show is accepted by the real parser and schema."""

import argparse
import contextlib
import dataclasses
import importlib
import io
import re
import shlex
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from functools import cache
from types import UnionType
from typing import Any

import pytest
import yaml

from tests.pages import OTHER_PROGRAMS, ROOT, UNREADABLE, Command, Page, of_each_page, split_shell
from zero2all.cli.main import build_parser, parse, split_overrides, with_verb
from zero2all.cli.parser import Parser
from zero2all.common.errors import UserError
from zero2all.common.schema import Problem, apply_overrides, build
from zero2all.config import RunConfig, config_from_values, load_config, preset_files
from zero2all.corpus import BuildOptions, load_settings
from zero2all.corpus.clean.config import RULES, CleanConfig
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.settings import SECTIONS as CORPUS_SECTIONS

LEFT_OUT = "…"
RUN_SECTIONS = {field.name for field in dataclasses.fields(RunConfig)}
FILES = ("py", "json", "jsonl", "md", "yaml", "safetensors", "html", "bin", "model", "png", "txt")
OTHER_FLAGS = ("--gpus", "--entrypoint", "--shm-size", "--nproc-per-node", "--nnodes", "--ipc", "--rm")
"""Flags of docker and torchrun that pages name."""
LEAST_LETTERS = 15
"""Of a message that must be recognised."""
LONGEST_VALUE = 80
"""Letters of a value in a message."""


class RefusedError(Exception):
    """A command that does not work as written, and why."""


the_parser = cache(build_parser)


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """Building it takes longer than parsing."""
    monkeypatch.setattr(sys.modules[parse.__module__], "build_parser", the_parser)


def refusal(place: object, rule: Callable[..., None], *given: Any, **options: Any) -> Iterator[str]:
    """The problem, if the rule refuses what is given."""
    try:
        rule(*given, **options)
    except RefusedError as error:
        yield f"{place}: {error}"


@of_each_page
def test_commands_are_accepted(page):
    for command in page.commands:
        if not is_refused_on_the_page(command):
            yield from refusal(command, check, command.words)


def is_refused_on_the_page(command: Command) -> bool:
    return any(line.startswith("z2a: ") for line in command.answer)


def check(words: tuple[str, ...], is_whole: bool = True) -> None:
    """Raise RefusedError when a command cannot work as written; one that is not whole may lack what must be given."""
    program, rest = words[0].rpartition("/")[2], [word for word in words[1:] if word != LEFT_OUT]
    if program == UNREADABLE:
        raise RefusedError("the shell cannot read this line")
    if program == "z2a":
        check_z2a(rest)
    elif program in ("python", "torchrun"):
        check_python(program, rest, is_whole)
    elif program == "make":
        check_make(rest)
    elif program == "docker":
        if rest[:1] == ["run"] and "--entrypoint" not in rest:
            check_z2a(rest[rest.index("zero2all") + 1 :])
    elif program == "pip":
        check_pip(rest)
    elif program not in OTHER_PROGRAMS:
        raise RefusedError(f"`{program}` is no program that the documentation uses (tests/pages.py lists them)")


def check_z2a(words: list[str]) -> None:
    words = [re.sub(r"\$\w+", "1", word) for word in words]  # a variable of a loop
    if not words:
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = parse(words)
        verb = the_parser().find(with_verb(split_overrides(words)[0])).prog
        check_overrides(verb, arguments, arguments.overrides)
    except SystemExit:
        return  # --help and --version
    except UserError as error:
        raise RefusedError(str(error)) from None


def check_overrides(verb: str, arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Settings of a corpus, or fields of a config; a config that is no preset is taken to be empty."""
    if not overrides:
        return
    config = getattr(arguments, "config", None) or getattr(arguments, "source", None)
    if verb == "z2a quickstart":
        config = "quickstart"
    if verb == "z2a corpus build":
        load_settings([word for word in arguments.sources if "=" in word], overrides)
    elif config in preset_files():
        load_config(config, overrides)
    else:
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        apply_overrides(values, overrides, problems)
        config_from_values(values, "of the page", problems)


def check_python(program: str, words: list[str], is_whole: bool) -> None:
    """A module or a file of the repository, whose source names every flag."""
    if "-c" in words:
        return
    if "-m" in words:
        module, rest = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if module == "zero2all":
            check_z2a(rest)
            return
        if module in ("venv", "http.server", "pip"):
            return
        path = ROOT / f"{module.replace('.', '/')}.py"
    else:
        name = next((word for word in words if word.endswith(".py")), "")
        path, rest = ROOT / name, words[words.index(name) + 1 :] if name else []
    if not path.is_file():
        raise RefusedError(f"{program} would find no {path.relative_to(ROOT)}")
    source = path.read_text(encoding="utf-8")
    for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"[^()]*required=True', source):
        if is_whole and flag not in rest:
            raise RefusedError(f"{path.relative_to(ROOT)} cannot run without {flag}")
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--") and "." not in flag and f'"{flag}"' not in source:
            raise RefusedError(f"{path.relative_to(ROOT)} has no {flag}")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in targets:
            raise RefusedError(f"the Makefile has no target {name}; it has {', '.join(targets)}")
        if name == "ARGS":
            check_z2a(["quickstart", *shlex.split(value)])


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"(?m)^(?:zero2all|\.)\[([\w,]+)\]", "\n".join(words)):
        if unknown := set(names.split(",")) - extras.keys():
            raise RefusedError(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")


@of_each_page
def test_messages_that_are_shown_are_those_of_the_program(page):
    """A line `z2a: …`, or one of a block of language `text`; what stands in the place of `…` is not compared."""
    for block in page.blocks if not str(page).endswith(".zh.md") else []:
        for number, line in enumerate(block.lines, block.number):
            if line.startswith("z2a: ") or block.language == "text":
                yield from unknown_messages(f"{page}:{number}", block.lines[number - block.number :])


def unknown_messages(place: str, lines: tuple[str, ...]) -> list[str]:
    """A problem, if the first line of a message is not the beginning of any message of the program."""
    shown = lines[0].removeprefix("z2a: ").partition(LEFT_OUT)[0].strip()
    if any(begins_with(template, shown) for template in templates_of_the_program()):
        return []
    words = set(shown.split())
    nearest = max(templates_of_the_program(), key=lambda each: len(words.intersection(each[: len(shown)].split())))
    return [f"{place}: no message of the program begins with `{shown}`; the nearest is `{nearest}`"]


@cache
def templates_of_the_program() -> list[str]:
    """Every longer string of the program with `{}` for its values. By pattern: parsing all files takes seconds."""
    found = set()
    for path in (ROOT / "zero2all").rglob("*.py"):
        source = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
        found |= {re.sub(r"\{[^{}]*\}", "{}", text) for text in re.findall(r'"([^"\n]{20,})"', source)}
    return sorted(found)


def begins_with(template: str, shown: str) -> bool:
    """Whether a message of this template can begin with the words shown, which may end inside of a value."""
    matched = place = 0
    for number, part in enumerate(template.replace("{{", "{").replace("}}", "}").split("{}")):
        rest = shown[place:]
        if number == 0 and not rest.startswith(part[: len(rest)]):
            return False
        found = rest.find(part) if part in rest else -1
        if found < 0:
            overlap = max((size for size in range(len(part)) if rest.endswith(part[:size])), default=0)
            return matched + overlap >= LEAST_LETTERS and len(rest) - overlap <= LONGEST_VALUE
        matched, place = matched + len(part), place + found + len(part)
    return matched >= LEAST_LETTERS


@of_each_page
def test_verbs_and_flags_in_the_text_exist(page):
    wrong_on_purpose = {" ".join(command.words) for command in page.commands if is_refused_on_the_page(command)}
    for place, text in page.spans:
        at = f"{place}: `{text}`"
        if text in wrong_on_purpose:
            continue
        if text.startswith("z2a "):
            yield from refusal(at, check_mention, split_shell(text)[0])
        elif text.startswith("make ") or re.match(r"python (-m )?(benchmarks|docs|zero2all)", text):
            yield from refusal(at, check, split_shell(text)[0], is_whole=False)
        elif re.match(r"--[a-z]", text):
            yield from refusal(at, check_flag, text)


def check_mention(words: tuple[str, ...]) -> None:
    """A command that may be a part only: its verb must exist, and its flags must be flags of this verb."""
    parser = the_parser()
    prog = "z2a"
    plain, overrides = split_overrides(list(words[1:]))
    for word in with_verb(plain) if "--" not in plain else plain:
        inner = parser.verbs
        if not inner or word.startswith("-") or word.isupper() or word == LEFT_OUT:
            break
        if word not in inner:
            raise RefusedError(f"`{prog}` has no verb {word}; it has {', '.join(inner)}")
        parser, prog = inner[word], f"{prog} {word}"
    flags = flags_below(parser)
    for word in plain:
        if word.startswith("--") and word.partition("=")[0] not in flags:
            raise RefusedError(f"`{prog}` has no {word}; it has {', '.join(sorted(flags))}")
    for word in overrides:
        if word.startswith("--"):
            check_field(word.removeprefix("--").partition("=")[0])


def flags_below(parser: Parser) -> set[str]:
    return set(parser.flags).union(*map(flags_below, parser.verbs.values()))


@cache
def all_flags() -> set[str]:
    """The flags of all verbs, and those of the programs under benchmarks and docs."""
    folders = ("benchmarks", "docs", "zero2all/measure", "zero2all/predict")
    sources = (path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return flags_below(the_parser()) | {flag for text in sources for flag in re.findall(r'"(--[a-z][a-z-]*)"', text)}


def check_flag(text: str) -> None:
    name = re.match(r"--[\w.-]+", text)[0].rstrip(".")  # type: ignore[index]
    if "." in name or name == "--stages":
        check_field(name.removeprefix("--"))
    elif name not in all_flags() and name not in OTHER_FLAGS:
        raise RefusedError(f"no verb has {name}")


@of_each_page
def test_config_fields_in_the_text_exist(page):
    for place, text in page.spans:
        match = re.match(r"([a-z]+)((?:\.[a-z][a-z0-9_]*)+)(?=$|[:= ])", text)
        if match and match[1] in RUN_SECTIONS | {"options", "dedup", "clean"} and not is_other_name(match[0]):
            yield from refusal(f"{place}: `{text}`", check_field, match[0])


def is_other_name(name: str) -> bool:
    """A file, a module of ours, or a tensor of a model."""
    path = ROOT / "zero2all" / name.replace(".", "/")
    is_module = path.is_dir() or path.with_name(f"{path.name}.py").exists()
    return is_module or name.rpartition(".")[2] in FILES or name.endswith(".weight")


def check_field(name: str) -> None:
    """Raise RefusedError when neither the config nor the settings of a corpus have this field."""
    section, *fields = name.split(".")
    if section == "clean":
        if any(field.isupper() for field in fields):
            return
        names = set(RULES) | {each.name for each in dataclasses.fields(CleanConfig)}
        if not (set(fields) & names or set(fields) <= {"zh", "en", "code", "other"}):
            raise RefusedError(f"no rule of cleaning is named in {name}")
        return
    place: Any = {"options": BuildOptions, "dedup": DedupConfig}.get(section)
    if section in CORPUS_SECTIONS and place is None:
        return
    if place is None:
        place, fields = RunConfig, [section, *fields]
    at = "the config" if place is RunConfig else f"`{section}`"
    for field in fields:
        if field.isupper():
            return
        if not dataclasses.is_dataclass(place):
            return  # a mapping, such as data.mixture, has the names of the user
        hints = typing.get_type_hints(place, include_extras=False)
        if field not in hints:
            raise RefusedError(f"{at} has no field {field}; it has {', '.join(hints)}")
        place, at = section_of(hints[field]), f"`{field}`"


def section_of(kind: Any) -> Any:
    """The dataclass in `X`, `X | None` and `list[X]`."""
    options = typing.get_args(kind) if isinstance(kind, UnionType) or typing.get_origin(kind) else (kind,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)


def blocks_of(page: Page, language: str) -> list[tuple[str, str]]:
    """FILE:LINE and text of each."""
    blocks = (block for block in page.blocks if block.language == language)
    return [(f"{page}:{block.number}", "\n".join(block.lines)) for block in blocks]


@of_each_page
def test_configs_in_blocks_are_valid(page):
    for place, text in blocks_of(page, "yaml"):
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            yield f"{place}: this is not YAML: {error}"
            continue
        found: list[Problem] = []
        if isinstance(values, dict) and values.keys() <= RUN_SECTIONS:
            build(RunConfig, values, "", found)
        elif isinstance(values, dict) and "sources" in values:
            build(BuildOptions, values.get("options"), "options", found)
            build(DedupConfig, values.get("dedup"), "dedup", found)
        yield from (f"{place}: {problem}" for problem in found)


@of_each_page
def test_python_in_blocks_compiles_and_imports_what_exists(page):
    for place, source in blocks_of(page, "python"):
        try:
            compile(source, place, "exec")
        except SyntaxError as error:
            yield f"{place}: {error}"
        for module, names in re.findall(r"^from (zero2all[\w.]*) import ([\w, ]+)", source, re.MULTILINE):
            for name in (each.strip().partition(" as ")[0] for each in names.split(",")):
                if not hasattr(importlib.import_module(module), name):
                    yield f"{place}: {module} has no {name}"
