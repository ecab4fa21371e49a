"""Typed sections from what YAML gives: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

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


def test_nothing_gives_the_defaults():
    assert read() == Section()
    assert build(Section, None, "", []) == Section(), "an empty section of a YAML file"


def test_every_type_takes_its_own():
    section = read(
        flag=True,
        count=-3,
        size=2,
        rate=0.5,
        share=1,
        dropout=0.999,
        name="a b",
        kind="constant",
        limit=7,
        anything="text",
        names=["a", "b"],
        weights={"en": 1, "zh": 2.5},
        inner={"depth": 3},
        items=[{"name": "first", "weight": 1}],
    )
    assert section == Section(
        True, -3, 2, 0.5, 1.0, 0.999, "a b", "constant", 7, "text", ["a", "b"], {"en": 1.0, "zh": 2.5}, Inner(3),
        [Item("first", 1.0)],
    )  # fmt: skip
    assert isinstance(section.share, float)


def test_numbers_written_as_people_write_them_are_taken_though_yaml_calls_them_text():
    assert read(rate="3e-4").rate == 3e-4
    assert read(size="1e6").size == 1_000_000
    assert isinstance(read(size="1e6").size, int)
    assert read(weights={"en": "1e-3"}).weights == {"en": 1e-3}
    assert read(count="9007199254740993").count == 9007199254740993, "not rounded by a float"


def test_a_float_that_is_whole_is_a_whole_number():
    assert read(size=2.0).size == 2
    assert isinstance(read(size=2.0).size, int)


def test_null_is_taken_where_the_field_is_optional():
    assert read(limit=None, weights=None) == Section()


def test_a_whole_number_is_taken_as_a_name_and_as_a_key():
    assert read(name=7).name == "7"
    assert read(weights={2023: 1}).weights == {"2023": 1.0}


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False, "yes", "1.5", "--1", 1.5, None, [1], {}, float("inf"), float("nan")])
def test_no_whole_number(value):
    assert refused(count=value) == [f"here.count: got {value!r}, expected a whole number."]


@pytest.mark.parametrize("value", [True, "fast", "nan", "inf", float("nan"), float("inf"), None, [0.5]])
def test_no_number(value):
    assert refused(rate=value) == [f"here.rate: got {value!r}, expected a number above 0."]


@pytest.mark.parametrize("value", [0, 1, "true", "yes", None])
def test_no_truth_value(value):
    assert refused(flag=value) == [f"here.flag: got {value!r}, expected true or false."]


def test_a_float_is_no_text_because_1_10_has_lost_its_zero_by_then():
    assert refused(name=1.10) == ["here.name: got 1.1, expected text. Put it in quotes."]
    assert refused(name=False) == ["here.name: got False, expected text. Put it in quotes."]
    assert refused(name=datetime.date(2024, 1, 1))[0].endswith("expected text. Put it in quotes.")
    assert refused(name=None) == ["here.name: got None, expected text."]


def test_ranges_are_told_in_words():
    assert refused(size=0) == ["here.size: got 0, expected a whole number at least 1."]
    assert refused(rate=0) == ["here.rate: got 0, expected a number above 0."]
    assert refused(share=1.5) == ["here.share: got 1.5, expected a number at least 0 and at most 1."]
    assert refused(dropout=1) == ["here.dropout: got 1, expected a number at least 0 and below 1."]
    assert refused(rate="-3e-4") == ["here.rate: got '-3e-4', expected a number above 0."]


def test_the_bounds_of_a_range():
    assert Range(minimum=1, maximum=2).admits(1)
    assert Range(minimum=1, maximum=2).admits(2)
    assert not Range(above=1).admits(1)
    assert not Range(below=2).admits(2)
    assert Range().admits(-1e30)
    assert Range(above=0, maximum=1).words() == "above 0 and at most 1"


def test_a_choice_is_answered_with_all_of_them_and_the_nearest():
    assert refused(kind="cosin") == [
        "here.kind: got 'cosin', expected one of 'cosine', 'constant'. Did you mean `cosine`?"
    ]
    assert refused(kind=3) == ["here.kind: got 3, expected one of 'cosine', 'constant'."]


def test_an_optional_field_says_that_null_is_possible():
    assert refused(limit=0) == ["here.limit: got 0, expected a whole number at least 1 or null."]
    assert refused(limit="many") == ["here.limit: got 'many', expected a whole number at least 1 or null."]


def test_one_of_several_types():
    assert refused(anything=[1]) == ["here.anything: got [1], expected a whole number or text."]


def test_lists_name_the_place_inside():
    assert refused(names={"a": 1}) == ["here.names: got {'a': 1}, expected a list, each text."]
    assert refused(names=["a", None]) == ["here.names[1]: got None, expected text."]


@pytest.mark.parametrize(
    ("given", "written"),
    [("a", "[a]"), (3, "[3]"), ("a:1 b:2", "[a:1,b:2]"), ("a, b", "[a,b]"), ("it's", "[a,b]"), ("x" * 101, "[a,b]")],
)
def test_text_in_place_of_a_list_is_answered_with_the_list_it_may_mean(given, written):
    (problem,) = refused(names=given)
    assert problem == f"here.names: got {given!r}, expected a list, each text. A list on the command line: '{written}'."


def test_mappings_name_the_place_inside():
    assert refused(weights=[1])[0].startswith("here.weights: got [1], expected a mapping such as {name: value}")
    assert refused(weights={"en": -1}) == ["here.weights.en: got -1, expected a number at least 0."]


@pytest.mark.parametrize("key", [False, None, 1.5])
def test_a_key_that_yaml_took_for_a_value_must_be_quoted(key):
    (problem,) = refused(weights={key: 1})
    assert problem.startswith(f"here.weights.{key}: got {key!r}, expected a name in quotes, because YAML reads ")


def test_sections_inside_sections():
    assert refused(inner={"depth": 0}) == ["here.inner.depth: got 0, expected a whole number at least 1."]
    assert refused(inner=3) == ["here.inner: got 3, expected a mapping of field names to values."]
    assert refused(inner={"dept": 2}) == ["`here.inner` has no field `dept`. Did you mean `depth`?"]


def test_a_list_of_sections():
    assert refused(items={"name": "a"}) == ["here.items: got {'name': 'a'}, expected a list of mappings."]
    assert refused(items=[{"name": "a", "weight": 1}, {"weight": "x"}]) == [
        "here.items[1].name: got nothing, expected text. It has no default.",
        "here.items[1].weight: got 'x', expected a number at least 0.",
    ]


def test_an_unknown_field_is_answered_with_the_nearest_name_or_all_of_them():
    assert refused(shares=1) == ["`here` has no field `shares`. Did you mean `share`?"]
    (problem,) = refused(qqq=1)
    assert problem.startswith("`here` has no field `qqq`. Available: flag, count, size,")


def test_all_problems_come_together():
    found = refused(sise=1, count="x", kind="linear", inner={"depth": -1}, names=[1.5], weights={"a": "b"})
    assert len(found) == 6


def test_what_is_no_mapping_at_all_is_one_problem():
    problems: list[Problem] = []
    assert build(Section, [1, 2], "", problems) is None
    assert [problem.field for problem in problems] == ["config"]


# ---- docs and hints -------------------------------------------------------------------------------------------


def test_the_doc_line_under_each_field_is_found_on_one_line():
    docs = field_docs(Section)
    assert docs["flag"] == "Yes or no."
    assert docs["count"] == "A number of things that takes two lines to explain."
    assert "undocumented" not in docs


def test_the_hint_names_the_nearest_or_lists_all():
    assert nearest_hint("quikstart", ["quickstart", "z2all-1b"]) == "Did you mean `quickstart`?"
    assert nearest_hint("xxxx", ["a", "b"]) == "Available: a, b."


def test_annotated_marks_that_are_no_range_are_left_alone():
    @dataclass(frozen=True)
    class Odd:
        value: Annotated[int, "a remark"] = 1

    problems: list[Problem] = []
    # Local classes need their names resolvable; Annotated and int are global here.
    assert build(Odd, {"value": 3}, "", problems).value == 3
    assert problems == []


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


@pytest.mark.parametrize(("name", "meant"), [("z2all-99m", "z2all-100m"), ("z2all-2b", "z2all-1b")])
def test_a_name_with_another_number_means_the_one_it_equals_but_for_that(name, meant):
    assert nearest_hint(name, ["quickstart", "z2all-100m", "z2all-1b", "z2all-moe"]) == f"Did you mean `{meant}`?"
