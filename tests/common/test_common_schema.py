"""Typed sections from what YAML gives: what is taken, what is refused, and how the refusal reads."""

import datetime
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from zero2all.common.schema import (
    NaturalFloat,
    PositiveFloat,
    PositiveInt,
    Problem,
    Range,
    Share,
    ShareBelowOne,
    apply_overrides,
    build,
    field_docs,
    nearest_hint,
)


@dataclass(frozen=True)
class Inner:
    """A section inside a section."""

    depth: PositiveInt = 1
    """How deep."""


@dataclass(frozen=True)
class Item:
    """One of a list, with fields that have no default."""

    name: str
    """What it is called."""
    weight: NaturalFloat
    """How much it counts."""


@dataclass(frozen=True)
class Section:
    """Every type that configs use."""

    flag: bool = False
    """Yes or no."""
    count: int = 0
    """A number of things
    that takes two lines to explain."""
    size: PositiveInt = 1
    """At least one."""
    rate: PositiveFloat = 1.0
    """Above zero."""
    share: Share = 0.5
    """From 0 to 1."""
    dropout: ShareBelowOne = 0.0
    """From 0 to less than 1."""
    name: str = "x"
    """Text."""
    kind: Literal["cosine", "constant"] = "cosine"
    """One of two."""
    limit: PositiveInt | None = None
    """None: no limit."""
    anything: int | str = 0
    """A number or text."""
    names: list[str] = field(default_factory=list)
    """Some names."""
    weights: dict[str, NaturalFloat] | None = None
    """Weights by name."""
    inner: Inner = field(default_factory=Inner)
    """A section inside."""
    items: list[Item] = field(default_factory=list)
    """Sections in a list."""
    undocumented: int = 0


def read(**values: Any) -> Section:
    problems: list[Problem] = []
    section = build(Section, values, "", problems)
    assert problems == []
    return section


def refused(**values: Any) -> list[str]:
    problems: list[Problem] = []
    build(Section, values, "here", problems)
    assert problems, "this should have been refused"
    return [str(problem) for problem in problems]


# ---- what is taken --------------------------------------------------------------------------------------------


def test_every_type_takes_its_own_and_nothing_gives_the_defaults():
    assert read() == read(limit=None, weights=None) == Section()
    assert build(Section, None, "", []) == Section(), "an empty section of a YAML file"
    section = read(
        **{"flag": True, "count": -3, "size": 2, "rate": 0.5, "share": 1, "dropout": 0.999, "name": "a b"},
        **{"kind": "constant", "limit": 7, "anything": "text", "names": ["a", "b"], "weights": {"en": 1, "zh": 2.5}},
        **{"inner": {"depth": 3}, "items": [{"name": "first", "weight": 1}]},
    )
    assert section == Section(
        True, -3, 2, 0.5, 1.0, 0.999, "a b", "constant", 7, "text", ["a", "b"], {"en": 1.0, "zh": 2.5}, Inner(3),
        [Item("first", 1.0)],
    )  # fmt: skip
    assert isinstance(section.share, float)


@pytest.mark.parametrize(
    ("field", "given", "taken"),
    [
        ("rate", "3e-4", 3e-4),
        ("size", "1e6", 1_000_000),
        ("size", 2.0, 2),
        ("weights", {"en": "1e-3"}, {"en": 1e-3}),
        ("count", "9007199254740993", 9007199254740993),  # not rounded by a float
        ("name", 7, "7"),
        ("weights", {2023: 1}, {"2023": 1.0}),
    ],
)
def test_what_people_write_is_taken_though_yaml_calls_it_something_else(field, given, taken):
    found = getattr(read(**{field: given}), field)
    assert (found, type(found)) == (taken, type(taken))


def test_annotated_marks_that_are_no_range_are_left_alone():
    @dataclass(frozen=True)
    class Odd:
        value: Annotated[int, "a remark"] = 1

    problems: list[Problem] = []
    # Local classes need their names resolvable; Annotated and int are global here.
    assert build(Odd, {"value": 3}, "", problems).value == 3
    assert problems == []


# ---- what is refused ------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
ODD_VALUES = {
    "count": ([True, False, "yes", "1.5", "--1", 1.5, None, [1], {}, INF, NAN], "a whole number"),
    "rate": ([True, "fast", "nan", "inf", NAN, INF, None, [0.5], 0, "-3e-4"], "a number above 0"),
    "flag": ([0, 1, "true", "yes", None], "true or false"),
    "size": ([0], "a whole number at least 1"),
    "share": ([1.5], "a number at least 0 and at most 1"),
    "dropout": ([1], "a number at least 0 and below 1"),
    "limit": ([0, "many"], "a whole number at least 1 or null"),
    "anything": ([[1]], "a whole number or text"),
    "kind": ([3], "one of 'cosine', 'constant'"),
    "name": ([None], "text"),
    "names": ([{"a": 1}], "a list, each text"),
    "inner": ([3], "a mapping of field names to values"),
    "items": ([{"name": "a"}], "a list of mappings"),
}


@pytest.mark.parametrize(("field", "value"), [(field, each) for field, (odd, _) in ODD_VALUES.items() for each in odd])
def test_a_value_of_another_type_or_beyond_its_range_is_refused_in_words(field, value):
    assert refused(**{field: value}) == [f"here.{field}: got {value!r}, expected {ODD_VALUES[field][1]}."]


@pytest.mark.parametrize("value", [1.10, False, datetime.date(2024, 1, 1)])
def test_a_float_is_no_text_because_1_10_has_lost_its_zero_by_then(value):
    assert refused(name=value) == [f"here.name: got {value!r}, expected text. Put it in quotes."]


def test_the_bounds_of_a_range():
    assert Range(minimum=1, maximum=2).admits(1)
    assert Range(minimum=1, maximum=2).admits(2)
    assert not Range(above=1).admits(1)
    assert not Range(below=2).admits(2)
    assert Range().admits(-1e30)
    assert Range(above=0, maximum=1).words() == "above 0 and at most 1"


@pytest.mark.parametrize(
    ("given", "written"),
    [("a", "[a]"), (3, "[3]"), ("a:1 b:2", "[a:1,b:2]"), ("a, b", "[a,b]"), ("it's", "[a,b]"), ("x" * 101, "[a,b]")],
)
def test_text_in_place_of_a_list_is_answered_with_the_list_it_may_mean(given, written):
    (problem,) = refused(names=given)
    assert problem == f"here.names: got {given!r}, expected a list, each text. A list on the command line: '{written}'."


@pytest.mark.parametrize("key", [False, None, 1.5])
def test_a_key_that_yaml_took_for_a_value_must_be_quoted(key):
    (problem,) = refused(weights={key: 1})
    assert problem.startswith(f"here.weights.{key}: got {key!r}, expected a name in quotes, because YAML reads ")


def test_the_place_inside_a_list_a_mapping_or_a_section_is_named():
    assert refused(names=["a", None]) == ["here.names[1]: got None, expected text."]
    assert refused(weights=[1])[0].startswith("here.weights: got [1], expected a mapping such as {name: value}")
    assert refused(weights={"en": -1}) == ["here.weights.en: got -1, expected a number at least 0."]
    assert refused(inner={"depth": 0}) == ["here.inner.depth: got 0, expected a whole number at least 1."]
    assert refused(inner={"dept": 2}) == ["`here.inner` has no field `dept`. Did you mean `depth`?"]
    assert refused(items=[{"name": "a", "weight": 1}, {"weight": "x"}]) == [
        "here.items[1].name: got nothing, expected text. It has no default.",
        "here.items[1].weight: got 'x', expected a number at least 0.",
    ]


def test_an_unknown_choice_or_field_is_answered_with_the_nearest_name_or_all_of_them():
    kinds = "expected one of 'cosine', 'constant'. Did you mean `cosine`?"
    assert refused(kind="cosin") == [f"here.kind: got 'cosin', {kinds}"]
    assert refused(shares=1) == ["`here` has no field `shares`. Did you mean `share`?"]
    (problem,) = refused(qqq=1)
    assert problem.startswith("`here` has no field `qqq`. Available: flag, count, size,")
    assert nearest_hint("xxxx", ["a", "b"]) == "Available: a, b."
    names = ["quickstart", "z2all-100m", "z2all-1b", "z2all-moe"]
    for name, meant in (("quikstart", "quickstart"), ("z2all-99m", "z2all-100m"), ("z2all-2b", "z2all-1b")):
        assert nearest_hint(name, names) == f"Did you mean `{meant}`?"


def test_all_problems_come_together_and_what_is_no_mapping_at_all_is_one():
    found = refused(sise=1, count="x", kind="linear", inner={"depth": -1}, names=[1.5], weights={"a": "b"})
    assert len(found) == 6
    problems: list[Problem] = []
    assert build(Section, [1, 2], "", problems) is None
    assert [problem.field for problem in problems] == ["config"]


def test_the_doc_line_under_each_field_is_found_on_one_line():
    docs = field_docs(Section)
    assert docs["flag"] == "Yes or no."
    assert docs["count"] == "A number of things that takes two lines to explain."
    assert "undocumented" not in docs


# ---- beyond use ----


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**30, "9" * 30, 1e30, "1e30", 1 << 20_000], ids=range(7))
def test_a_whole_number_beyond_64_bits_is_a_problem_and_not_a_number(value):
    problems = []
    build(Inner, {"depth": value}, "", problems)
    (problem,) = problems
    assert len(str(problem)) < 500
    assert "a whole number at least 1" in str(problem)
    assert "It must fit into 64 bits." in str(problem)


def test_a_long_value_is_cut_where_it_is_shown():
    text = str(Problem("a" * 5000, "x" * 5000, "something"))
    assert len(text) < 600
    assert "(5,002 characters)" in text


def test_an_override_that_stands_for_endless_values_is_one_problem():
    problems = []
    values = {}
    apply_overrides(values, ["--a.b", "[" * 5000, "--a.c", "*.txt", "--a.d", "2024-13-45", "--a.e=3"], problems)
    assert [problem.field for problem in problems] == ["a.b"]
    assert values == {"a": {"c": "*.txt", "d": "2024-13-45", "e": 3}}
