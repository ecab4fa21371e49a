"""The language the program speaks: English, or Chinese for a person whose locale is Chinese or who passes `--lang zh`.

The code is written in English, with ordinary f-strings. Where a text reaches a person, `translate` looks the finished
sentence up in the tables `zero2all/<room>/zh.json`, whose keys are the sentences with `{}` for every value:

    {"{} has no field {}.": "{0} 中没有字段 {1}。"}

A text without an entry is looked up sentence by sentence, and stays English where nothing is found.
tests/test_language.py finds every message in the source, and fails for one that no table has.
"""

import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from string import Formatter
from typing import Any

LANGUAGES = ("en", "zh")
LANGUAGE_VARIABLE = "Z2A_LANG"
"""Set by `--lang`, so that processes started by this one speak the same language."""
TABLE_NAME = "zh.json"
LIST_BELOW = re.compile(r"\n\s*(\{\d*\}\s*)+$")
"""Holes on the last lines of a message: a list, whose lines are looked up one by one."""
FEW_LETTERS = 12
"""A template with fewer, such as `{} runs`, takes no phrase that is not known: many a sentence ends so."""
PACKAGE = Path(__file__).parent.parent
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
NAMES = re.compile(r"[^\s,]+(, [^\s,]+)+")
"""A list of single words: names, which stay as they are."""
CUT = re.compile(r"(?<=[.:;!?])\s+")
"""Where a text may be cut to look up its parts."""


def language() -> str:
    """`en` or `zh`: what `--lang` says, else the locale."""
    for name in (LANGUAGE_VARIABLE, "LC_ALL", "LC_MESSAGES", "LANG"):
        if value := os.environ.get(name):
            return "zh" if value.lower().startswith("zh") else "en"
    return "en"


def message(text: str) -> str:
    """Marks a text that a person reads, and that is translated where it is shown; tests/test_language.py finds it."""
    return text


def translate(text: str) -> str:
    """The text in the person's language."""
    return text if language() == "en" else in_chinese(text)


def padded(text: str, width: int) -> str:
    """The text with spaces up to `width` columns of a terminal, where a Chinese character takes two."""
    return text + " " * (width - columns(text))


def flush_right(text: str, width: int) -> str:
    """The same with the spaces in front."""
    return " " * (width - columns(text)) + text


def columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def table_lines(heading: str | Sequence[str], rows: Sequence[str | Sequence[str]], least: int = 24) -> list[str]:
    """A table with a heading such as `task | form | items`: names are set left, figures right. A row that is a text is
    a note on the row before it. `least`: columns of a terminal that the names take at least."""
    titles = heading.split(" | ") if isinstance(heading, str) else heading
    body = [[f"  {row[0]}", *row[1:]] for row in rows if not isinstance(row, str)]
    aligned = []
    for number, column in enumerate(zip(titles, *body, strict=True)):
        has_words = number == 0 or any(map(str.isalpha, "".join(column[1:])))
        width = max(0 if number else least, *map(columns, column))
        aligned.append([(padded if has_words else flush_right)(cell, width) for cell in column])
    lines = ("  ".join(row).rstrip() for row in zip(*aligned, strict=True))
    return [next(lines), *(row if isinstance(row, str) else next(lines) for row in rows)]


def cells(values: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """Some figures as cells of a table: a pair as an interval, and nothing for one that is not there."""
    found = [(values.get(name), how) for name, how in formats.items()]
    several = [(value if isinstance(value, list | tuple) else [value], how) for value, how in found]
    return ["" if each[0] is None else " … ".join(format(one, how) for one in each) for each, how in several]


@dataclass
class _Template:
    """A sentence with holes, and how its Chinese is put together."""

    literals: list[str]
    chinese: str

    @cached_property
    def length(self) -> int:
        """How much text must be there: a longer template is tried first."""
        return sum(map(len, self.literals))

    @cached_property
    def is_weak(self) -> bool:
        """Whether it has so few letters that its holes take one word each, or a text that has an entry itself."""
        literal = "".join(self.literals)
        return sum(map(str.isalpha, literal)) < FEW_LETTERS and not any(mark in literal for mark in ",:.;(")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled when it is first needed, which most never are."""
        return re.compile(("(.+?)" if self.is_weak else "(.*?)").join(map(re.escape, self.literals)), re.DOTALL)

    def fill(self, text: str) -> str | None:
        """The Chinese, if the text is this sentence; a hole holds no end of a sentence, or it would swallow others."""
        if not text.startswith(self.literals[0]) or not text.endswith(self.literals[-1]):
            return None
        if not all(literal in text for literal in self.literals) or (found := self.pattern.fullmatch(text)) is None:
            return None
        if any(SENTENCE_END.search(value) for value in found.groups()):
            return None
        if self.is_weak and any(re.search(r"\s", value) and not _tables().knows(value) for value in found.groups()):
            return None
        values = zip(found.groups(), self.literals, strict=False)  # one literal more: behind the last hole
        return self.chinese.format(*(_value(value, before) for value, before in values))


@dataclass(frozen=True)
class _Tables:
    """All rooms together: sentences without holes, and templates, the longest first."""

    exact: dict[str, str]
    templates: tuple[_Template, ...]

    def find(self, text: str) -> str | None:
        """The Chinese of a whole text."""
        if (known := self.exact.get(text)) is not None:
            return known
        if " " not in text:  # a name, a figure, a path
            return None
        return next((filled for template in self.templates if (filled := template.fill(text)) is not None), None)

    def knows(self, text: str) -> bool:
        """Whether the text is a sentence of its own, and not only the end of one."""
        return text in self.exact or any(each.fill(text) for each in self.templates if not each.is_weak)


def in_chinese(text: str) -> str:
    """The whole text, or else line by line as many of its sentences at a time as one entry covers.

    For a page with both languages; `translate` is for all else.
    """
    core = text.strip()
    if not core:
        return text
    before, after = text[: text.index(core[0])], text[len(text.rstrip()) :]
    if (whole := _tables().find(core)) is not None:
        return before + whole + after
    if "\n" in core:
        return before + _by_lines(core.split("\n")) + after
    cuts = list(CUT.finditer(core))
    for cut in reversed(cuts):
        if (known := _tables().find(core[: cut.start()])) is not None:
            return before + known + in_chinese(core[cut.end() :]) + after  # no space between Chinese sentences
    if not cuts:
        return text
    name = cuts[0].end()  # such as the file before a colon
    return before + core[:name] + in_chinese(core[name:]) + after


def _by_lines(lines: list[str]) -> str:
    """As many lines at a time as one entry covers."""
    for count in range(len(lines) - 1, 1, -1):
        if (known := _tables().find("\n".join(lines[:count]))) is not None:
            return known + "\n" + in_chinese("\n".join(lines[count:]))
    return in_chinese(lines[0]) + "\n" + in_chinese("\n".join(lines[1:]))


def _value(value: str, before: str) -> str:
    """What stands in a hole: a sentence is translated; names, a figure and a command (`in backticks`) are not."""
    if " " not in value or before.endswith("`") or (NAMES.fullmatch(value) and value not in _tables().exact):
        return value
    return in_chinese(value)


@cache
def _tables() -> _Tables:
    exact: dict[str, str] = {}
    templates: list[_Template] = []
    for path in sorted(PACKAGE.glob(f"*/{TABLE_NAME}")):  # of every room that has one
        for pair in json.loads(path.read_text(encoding="utf-8")).items():
            english, chinese = (LIST_BELOW.sub("", words) for words in pair)
            literals = literal_parts(english)
            if len(literals) == 1:
                exact[literals[0]] = chinese.format()
            else:
                templates.append(_Template(literals, chinese))
    return _Tables(exact, tuple(sorted(templates, key=lambda template: -template.length)))


def literal_parts(template: str) -> list[str]:
    """What stands before, between and behind the holes of a template."""
    parts = [""]
    for literal, hole, _, _ in Formatter().parse(template):
        parts[-1] += literal
        if hole is not None:
            parts.append("")
    return parts
