"""Every message has its Chinese. `python tests/test_language.py ROOM…` prints those without, as JSON to fill in."""

import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from zero2all.cli.main import EPILOG, build_parser
from zero2all.cli.parser import Parser
from zero2all.cli.verb import OVERRIDES_HELP
from zero2all.common import language
from zero2all.common.language import literal_parts, padded, translate

PACKAGE = language.PACKAGE
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if any(path.glob("*.py")) and path.name != "serve")
"""Without the server, whose answers are read by programs."""

NOT_SHOWN = {"AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "IndexError", "KeyError", "OSError"}
"""Errors that mean a bug, or that the system words."""
SPEAKS = {"say", "tell", "print", "t", "translate", "refuse", "warn", "message", "_note"}
SPEAKS |= {"GuardFinding", "RunFinding", "ShapeFinding", "Area", "ok", "note", "warning", "error", "graded"}
WORDS_OF = {"add_verb": (2,), "add_group": (2,), "add_address": (1,), "progress": (0, 2), "advance": (1,)}
WORDS_OF |= {"print_table": (0, 1)}
"""Function -> which of its arguments a person reads."""
SHOWN_KEYWORDS = {"help", "description", "note", "unit", "title"}
PROSE = re.compile(r"(?<![\w`/.<=-])[A-Za-z][a-z]{2,}(?![\w`/=(]|[.:]\w)")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, which two tests read."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def messages(path: Path) -> Iterator[str]:
    """Every text of a file that a person reads, as a template."""
    assigned = [node for node in nodes_of(path) if isinstance(node, ast.Assign)]

    def meant(node: ast.expr) -> list[ast.expr]:
        """The expression, or what its name is assigned."""
        values = [each.value for each in assigned if getattr(each.targets[0], "id", None) == getattr(node, "id", "")]
        return values if isinstance(node, ast.Name) else [node]

    for node in (each for each in nodes_of(path) if isinstance(each, ast.Call)):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name == "counted" and len(node.args) == 2:  # 3, "step" -> "3 steps"
            for noun in templates(node.args[1]):
                yield from (f"{{}} {noun}", f"{{}} {noun}s")
        if name in SPEAKS or (name.endswith("Error") and name not in NOT_SHOWN):
            shown = list(node.args)
        else:
            shown = [node.args[index] for index in WORDS_OF.get(name, ()) if index < len(node.args)]
        shown += [keyword.value for keyword in node.keywords if keyword.arg in SHOWN_KEYWORDS]
        if name in ("add_flags", "add_address"):  # (name, type, default, help) each; help or flag may have a name
            flags = [each for flag in node.args[1:] for each in meant(flag) if isinstance(each, ast.Tuple)]
            shown += [about for flag in flags for about in meant(flag.elts[-1])]
        for expression in shown:
            yield from templates(expression)


def templates(node: ast.AST) -> Iterator[str]:
    """The texts of an expression: its f-strings and plain strings, and those chosen inside of a hole."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        yield "".join("{}" if part is None else escaped(part) for part in parts).strip()
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield from templates(part.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield escaped(node.value).strip()
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp | ast.List | ast.Tuple | ast.Starred):
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.IfExp) and child is node.test):
                yield from templates(child)


def escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def is_prose(template: str) -> bool:
    """Whether there are words in it, beside code, flags, paths and names."""
    return bool(PROSE.search(re.sub(r"`[^`]*`|--[\w.-]+|z2a [a-z ]+", " ", template)))


@functools.cache
def needed(room: str) -> list[str]:
    """The templates that the room's table must have, in the order of its files."""
    found = (message for path in sorted((PACKAGE / room).rglob("*.py")) for message in messages(path))
    return list(dict.fromkeys(message for message in found if is_prose(message)))


def table(room: str) -> dict[str, str]:
    path = PACKAGE / room / language.TABLE_NAME
    return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_repeats) if path.exists() else {}


def without_repeats(pairs: list[tuple[str, str]]) -> dict[str, str]:
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    assert not repeated, f"twice in one table: {repeated}"
    return dict(pairs)


@functools.cache
def all_tables() -> dict[str, str]:
    return {english: chinese for room in ROOMS for english, chinese in table(room).items()}


def missing(room: str) -> list[str]:
    known = all_tables()
    of_flags = [text for text in help_texts() if language._tables().find(text) is None] if room == "cli" else []
    return [template for template in needed(room) if template not in known] + of_flags


@functools.cache
def help_texts() -> list[str]:
    """What `--help` says of every verb, flag and argument, and the notes beside its examples."""

    def texts(parser: Parser) -> Iterator[str]:
        yield parser.description or ""
        notes = (parser.epilog or "").replace(OVERRIDES_HELP, "").removeprefix(EPILOG)  # which have whole entries
        yield from (line for line in notes.split("\n") if line.strip() and not line.startswith(" "))
        yield from (action.help or "" for action in parser._actions)
        for inner in parser.verbs.values():
            yield from texts(inner)

    return list(dict.fromkeys(filter(is_prose, texts(build_parser()))))


ROOMS_WITH_TABLES = [room for room in ROOMS if table(room) and room != "common"]


@pytest.mark.parametrize("room", ROOMS_WITH_TABLES)
def test_every_message_has_its_chinese_and_a_table_holds_nothing_that_the_program_does_not_say(room):
    assert missing(room) == [], f"`python tests/test_language.py {room}` prints them as JSON"
    said = all_strings() | {template for each in ROOMS for template in needed(each)} | SAID_BY_LIBRARIES
    said |= set(map(escaped, help_texts()))
    assert [template for template in table(room) if template not in said] == []


def test_a_sentence_of_two_rooms_has_one_chinese():
    pairs = {pair for room in ROOMS for pair in table(room).items()}
    assert [english for english, count in Counter(english for english, _ in pairs).items() if count > 1] == []


@functools.cache
def all_strings() -> frozenset[str]:
    """Every string of the package as a template: words that stand in constants are translated where they are shown."""
    nodes = (node for path in PACKAGE.rglob("*.py") for node in nodes_of(path))
    strings = (node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant))
    return frozenset(template for string in strings for template in templates(string))


SAID_BY_LIBRARIES = {"options", "positional arguments", "usage:", "show this help message and exit"}
"""Words of argparse, which stand in no file of ours."""

SAMPLES = ("/data/x.jsonl", "12,345", "name-7", "'a'", "3.5 MB", "en", "0.25", "text")


@pytest.mark.parametrize("room", ROOMS_WITH_TABLES)
def test_a_filled_sentence_is_recognised_and_keeps_its_values(room, monkeypatch):
    monkeypatch.setenv(language.LANGUAGE_VARIABLE, "zh")
    for english, chinese in table(room).items():
        holes = range(len(literal_parts(english)) - 1)
        numbered = [name for _, name, _, _ in Formatter().parse(chinese) if name is not None]
        used = {int(name) if name else place for place, name in enumerate(numbered)}
        assert used == set(holes), f"the holes of {english!r} and {chinese!r} differ"
        values = [SAMPLES[place % len(SAMPLES)] for place in holes]
        assert translate(english.format(*values)) == chinese.format(*values)


def test_the_language_is_the_flag_or_else_the_locale(monkeypatch):
    for name in ("Z2A_LANG", "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    assert language.language() == "en"
    for name, value, found in (("LANG", "zh_CN.UTF-8", "zh"), ("LC_ALL", "C.UTF-8", "en"), ("Z2A_LANG", "zh", "zh")):
        monkeypatch.setenv(name, value)
        assert language.language() == found
    assert (padded("打包", 6), padded("pack", 6)) == ("打包  ", "pack  "), "Chinese characters take two columns"


SMALL_TABLE = {
    **{"{} has no field {}.": "{0} 中没有字段 {1}。", "Use {} instead.": "请改用 {}。"},
    "Use `{}` instead.": "请改用 `{}`。",
    **{"left: {} of {}": "{1} 中还剩 {0}", "interrupted.": "已中断。", "{} runs": "{} 次运行", "{} is here": "{} 在此"},
    **{"time of {}": "用时：{}", "matrix products": "矩阵乘法", "tokens, {}": "词元，{}"},
}


@pytest.fixture
def small_table(monkeypatch, tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / language.TABLE_NAME).write_text(json.dumps(SMALL_TABLE), encoding="utf-8")
    monkeypatch.setenv(language.LANGUAGE_VARIABLE, "zh")
    monkeypatch.setattr(language, "PACKAGE", tmp_path)
    language._tables.cache_clear()
    yield
    language._tables.cache_clear()


def test_sentences_are_found_alone_joined_and_after_a_name(small_table):
    for english, chinese in {
        "a.jsonl has no field text.": "a.jsonl 中没有字段 text。",
        "left: 2 of 3": "3 中还剩 2",
        "  interrupted.\n": "  已中断。\n",
        "a.jsonl has no field text. Use `content` instead.": "a.jsonl 中没有字段 text。请改用 `content`。",
        "b.csv: a.jsonl has no field text.": "b.csv: a.jsonl 中没有字段 text。",
        "Nobody wrote this one. interrupted.": "Nobody wrote this one. 已中断。",
        "interrupted.\na has no field b.": "已中断。\na 中没有字段 b。",
        "Use interrupted. instead.": "请改用 interrupted.。",
        "1,024 runs": "1,024 次运行",
        "Use `z2a runs` instead.": "请改用 `z2a runs`。",
        "interrupted.\nUse a\nb has no field c.": "已中断。\nUse a\nb 中没有字段 c。",
        "list all the runs": "list all the runs",
        "time of matrix products": "用时：矩阵乘法",
        "time of x is here": "time of x is here",
        "Use tokens, help, undo instead.": "请改用 tokens, help, undo。",
    }.items():
        assert translate(english) == chinese


if __name__ == "__main__":
    for name in sys.argv[1:] or ROOMS:
        print(json.dumps(dict.fromkeys(missing(name), ""), ensure_ascii=False, indent=2))
