"""Typed sections from plain mappings, with every problem found in one pass.

A section is a frozen dataclass with a doc line (a string literal) under each field. `build` turns nested mappings, as
YAML gives them, into such dataclasses and collects all problems. Types are those of our configs: bool, int, float, str,
Literal, Optional, list, dict with str keys, nested dataclasses, and `Annotated[..., Range(...)]`.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from zero2all.common.language import translate as t
from zero2all.common.progress import scaled


@dataclass(frozen=True)
class Range:
    """Bounds of a number; None leaves that side open. `minimum` and `maximum` are inside, `above` and `below` not.
    `units`: text such as 40M is a number too."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    units: bool = False

    def admits(self, value: float) -> bool:
        """Whether `value` lies inside."""
        is_inside = (self.minimum is None or value >= self.minimum) and (self.maximum is None or value <= self.maximum)
        return is_inside and (self.above is None or value > self.above) and (self.below is None or value < self.below)

    def words(self) -> str:
        """'at least 1', 'above 0 and at most 1'."""
        bounds = {"above": self.above, "at least": self.minimum, "at most": self.maximum, "below": self.below}
        words = (f"{t(word)} {_number(bound)}" for word, bound in bounds.items() if bound is not None)
        return t(" and ").join(words) + (t(", such as 40M or 2B") if self.units else "")


def _number(value: float) -> str:
    """All digits of a whole number, the shortest form of any other."""
    return f"{value:.0f}" if float(value).is_integer() else repr(value)


LARGEST_INT = (1 << 63) - 1  # what torch and numpy count with

PositiveInt = Annotated[int, Range(minimum=1)]
Amount = Annotated[int, Range(minimum=1, units=True)]
NaturalInt = Annotated[int, Range(minimum=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NaturalFloat = Annotated[float, Range(minimum=0)]
Share = Annotated[float, Range(minimum=0, maximum=1)]
ShareBelowOne = Annotated[float, Range(minimum=0, below=1)]


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config."""

    field: str
    value: Any
    expected: str
    hint: str = ""

    def __str__(self) -> str:
        name = self.field[:LONGEST_SHOWN]
        if self.value is MISSING:
            text = t(f"{name}: got nothing, expected {self.expected}.")
        else:
            text = t(f"{name}: got {_shown(self.value)}, expected {self.expected}.")
        return self._with_hint(text)

    def _with_hint(self, text: str) -> str:
        between = "" if text.endswith("。") else " "  # no space between Chinese sentences
        return f"{text}{between}{t(self.hint)}" if self.hint else text


LONGEST_SHOWN = 200  # characters of a name or value that are printed


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4,300 digits
        return t("a number with thousands of digits")
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]} … ({len(text):,} characters)"


@dataclass(frozen=True)
class UnknownName(Problem):
    """A name that the section does not have."""

    def __str__(self) -> str:
        place, _, name = self.field[:LONGEST_SHOWN].rpartition(".")
        return self._with_hint(t(f"`{place}` has no field `{name}`.") if place else t(f"There is no section `{name}`."))


PLAIN_ITEMS = re.compile(r"[\w.:/,-]{1,100}")


class _Missing:
    def __repr__(self) -> str:
        return t("nothing")


MISSING = _Missing()


def build(section: type, values: Any, place: str, problems: list[Problem]) -> Any:
    """An instance of `section` from a mapping, or None when `values` is beyond use; appends to `problems`."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        problems.append(Problem(place or "config", values, "a mapping of field names to values"))
        return None
    fields = {field.name: field for field in dataclasses.fields(section)}
    hints = _type_hints(section)
    expected = f"a field of `{place}`" if place else "the name of a section"
    problems.extend(
        UnknownName(_join(place, str(name)), value, expected, nearest_hint(str(name), fields))
        for name, value in values.items()
        if name not in fields
    )
    arguments = {}
    for name, field in fields.items():
        where = _join(place, name)
        if name in values:
            arguments[name] = _convert(hints[name], values[name], where, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if dataclasses.is_dataclass(hints[name]):
                arguments[name] = build(typing.cast(type, hints[name]), {}, where, problems)
            else:
                problems.append(Problem(where, MISSING, _type_words(hints[name]), "It has no default."))
                arguments[name] = None
    return section(**arguments)


def nearest_hint(name: str, candidates: Iterable[str]) -> str:
    """'Did you mean X?', or the list of what there is."""
    names = list(candidates)
    # Names that differ in a number alone are meant, however many digits differ: z2all-99m is z2all-100m.
    alike = [each for each in names if re.sub(r"\d+", "0", each) == re.sub(r"\d+", "0", name)]
    close = difflib.get_close_matches(name, alike or names, n=1, cutoff=0.0 if alike else 0.5)
    return f"Did you mean `{close[0]}`?" if close else f"Available: {', '.join(names)}."


def apply_overrides(values: dict[str, Any], overrides: list[str], problems: list[Problem]) -> None:
    """Set `--a.b.c value` and `--a.b.c=value` pairs inside `values`."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            problems.append(Problem(word, word, "an override such as --optim.lr_max 3e-4"))
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                problems.append(Problem(name, MISSING, "a value after the name"))
                continue
            text = words.pop(0)
        try:
            value = _override_value(text)
        except ValueError as error:
            problems.append(Problem(name, text, "a plain value", f"It is not valid YAML: {error}."))
            continue
        *sections, leaf = name.split(".")
        inner = values
        for section in sections:
            if inner.get(section) is None:
                inner[section] = {}
            inner = inner[section]
            if not isinstance(inner, dict):
                problems.append(Problem(name, text, f"a field of a section; `{section}` is not a section"))
                break
        else:
            inner[leaf] = value


def _override_value(text: str) -> Any:
    """What YAML makes of `text`; the text itself where YAML would lose something: 007, 1.10, 2024-01-01."""
    from zero2all.common.yamlio import YamlError, YamlRefusedError, loads  # here: a usage error needs no YAML

    try:
        value = loads(text)
    except YamlRefusedError:
        raise
    except YamlError:
        return text
    if isinstance(value, bool | str | list | dict) or value is None:
        return value
    return value if isinstance(value, int) and str(value) == text else text


@cache
def field_docs(section: type) -> dict[str, str]:
    """The doc line under each field, read from the source of the dataclass, and of those it inherits from."""
    docs: dict[str, str] = {}
    for base in section.__bases__:
        if dataclasses.is_dataclass(base):
            docs.update(field_docs(base))
    tree = ast.parse(inspect.cleandoc(inspect.getsource(section)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    for statement, after in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


@cache
def _type_hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _convert(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    """`value` as `kind`, or None with a problem noted."""
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        found: list[Problem] = []
        amount = value
        if isinstance(value, str) and any(isinstance(mark, Range) and mark.units for mark in marks):
            with suppress(ValueError):
                amount = round(scaled(value.upper()), 6)
        converted = _convert(inner, amount, where, found)
        if found or not all(mark.admits(converted) for mark in marks if isinstance(mark, Range)):
            problems.append(Problem(where, value, _type_words(kind), found[0].hint if found else ""))
        return converted
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(kind)
        if value is None and type(None) in options:
            return None
        return _convert_union([option for option in options if option is not type(None)], kind, value, where, problems)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if isinstance(value, bool) and ("on" if value else "off") in choices:
            return "on" if value else "off"  # YAML 1.1 reads the words on and off as true and false
        if value in choices and not (isinstance(value, bool) and True not in choices):
            return value
        hint = nearest_hint(str(value), [str(choice) for choice in choices])
        problems.append(Problem(where, value, _type_words(kind), hint if hint.startswith("Did") else ""))
        return None
    if origin is list:
        (inner,) = typing.get_args(kind)
        if not isinstance(value, list):
            is_plain = not dataclasses.is_dataclass(inner) and isinstance(value, str | int)
            problems.append(Problem(where, value, _type_words(kind), _list_hint(str(value)) if is_plain else ""))
            return None
        return [_convert(inner, item, f"{where}[{index}]", problems) for index, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            problems.append(Problem(where, value, _type_words(kind)))
            return None
        inner = typing.get_args(kind)[1]
        # YAML reads the names no, on and null as values; "False" would be nobody's source.
        problems.extend(
            Problem(_join(where, str(key)), key, "a name in quotes, because YAML reads this one as a value")
            for key in value
            if not isinstance(key, str | int) or isinstance(key, bool)
        )
        return {str(key): _convert(inner, item, _join(where, str(key)), problems) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, where, problems)
    return _convert_plain(kind, value, where, problems)


def _list_hint(text: str) -> str:
    """How a list is written on the command line, with the words of `text` where they need no quotes of their own."""
    items = ",".join(text.replace(",", " ").split())
    return f"A list on the command line: '[{items if PLAIN_ITEMS.fullmatch(items) else 'a,b'}]'."


def _convert_union(options: list[Any], kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    attempts = []
    for option in options:
        found: list[Problem] = []
        converted = _convert(option, value, where, found)
        if not found:
            return converted
        attempts.append(found)
    if len(attempts) == 1 and any(problem.field != where for problem in attempts[0]):
        problems.extend(attempts[0])  # the trouble lies deeper inside, and says so itself
    else:
        problems.append(Problem(where, value, _type_words(kind), attempts[0][0].hint if len(attempts) == 1 else ""))
    return None


def _convert_plain(kind: Any, value: Any, where: str, problems: list[Problem]) -> Any:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and not isinstance(value, bool):
        whole = _as_int(value)
        if whole is not None and -LARGEST_INT <= whole <= LARGEST_INT:
            return whole
        hint = "It must fit into 64 bits." if whole is not None else ""
        problems.append(Problem(where, value, _type_words(kind), hint))
        return None
    if kind is float and not isinstance(value, bool):
        number = _as_float(value)
        if math.isfinite(number):
            return number
    if kind is str and isinstance(value, str):
        return value
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    # A float is no text: `name: 1.10` has already lost its zero by the time it gets here.
    hint = "Put it in quotes." if kind is str and value is not None and not isinstance(value, dict | list) else ""
    problems.append(Problem(where, value, _type_words(kind), hint))
    return None


def _as_int(value: Any) -> int | None:
    """A whole number, also from text and from a float such as 1e6. Else None."""
    if isinstance(value, int):
        return value
    if isinstance(value, str) and len(value) < 100 and value.removeprefix("-").isdecimal():
        return int(value)  # not by way of a float, which would round beyond 2^53
    number = _as_float(value)
    return int(number) if math.isfinite(number) and number.is_integer() else None


def _as_float(value: Any) -> float:
    """A number, also from text: YAML reads `3e-4` as text (it wants 3.0e-4), and people write 3e-4. Else NaN."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _type_words(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        inner, *marks = typing.get_args(kind)
        bounds = t(" and ").join(mark.words() for mark in marks if isinstance(mark, Range))
        return f"{_type_words(inner)} {bounds}".strip()
    if origin is typing.Literal:
        return t(f"one of {', '.join(repr(choice) for choice in typing.get_args(kind))}")
    if origin in (typing.Union, types.UnionType):
        return t(" or ").join(_type_words(option) for option in typing.get_args(kind))
    if origin is list:
        inner = typing.get_args(kind)[0]
        return t("a list of mappings" if dataclasses.is_dataclass(inner) else f"a list, each {_type_words(inner)}")
    if origin is dict:
        return t(f"a mapping such as {{name: value}}, each value {_type_words(typing.get_args(kind)[1])}")
    if dataclasses.is_dataclass(kind):
        return t("a mapping of field names to values")
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return t(names.get(kind, str(kind)))
