"""Typed sections from what YAML gives: what is taken, what is refused, and how the refusal reads."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from zero2all.common import schema
from zero2all.common.schema import NaturalFloat, PositiveFloat, PositiveInt, Problem, Share, ShareBelowOne, build


@dataclass(frozen=True)
class Inner:
    depth: PositiveInt = 1


@dataclass(frozen=True)
class Item:
    name: str
    weight: NaturalFloat


@dataclass(frozen=True)
class Section:
    """Every type that configs use."""

    flag: bool = False
    """Yes or no."""
    count: int = 0
    """A number of things
    that takes two lines to explain."""
    size: PositiveInt = 1
    rate: PositiveFloat = 1.0
    share: Share = 0.5
    dropout: ShareBelowOne = 0.0
    name: str = "x"
    kind: Literal["cosine", "constant"] = "cosine"
    limit: PositiveInt | None = None
    anything: int | str = 0
    names: list[str] = field(default_factory=list)
    weights: dict[str, NaturalFloat] | None = None
    inner: Inner = field(default_factory=Inner)
    items: list[Item] = field(default_factory=list)


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


def test_what_people_write_is_taken_though_yaml_calls_it_something_else():
    for name, given, taken in (
        ("rate", "3e-4", 3e-4),
        ("size", "1e6", 1_000_000),
        ("size", 2.0, 2),
        ("weights", {"en": "1e-3"}, {"en": 1e-3}),
        ("count", "9007199254740993", 9007199254740993),  # not rounded by a float
        ("name", 7, "7"),
        ("weights", {2023: 1}, {"2023": 1.0}),
    ):
        found = getattr(read(**{name: given}), name)
        assert (found, type(found)) == (taken, type(taken))


NAN, INF = float("nan"), float("inf")
ODD_VALUES = {
    "count": ([True, "yes", "1.5", "--1", 1.5, None, [1], {}, INF, NAN], "a whole number"),
    "rate": ([True, "fast", "nan", INF, None, [0.5], 0, "-3e-4"], "a number above 0"),
    "flag": ([0, "true", None], "true or false"),
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


@pytest.mark.parametrize("value", [1.10, False])
def test_a_float_is_no_text_because_1_10_has_lost_its_zero_by_then(value):
    assert refused(name=value) == [f"here.name: got {value!r}, expected text. Put it in quotes."]


@pytest.mark.parametrize(
    ("given", "written"), [(3, "[3]"), ("a:1, b:2", "[a:1,b:2]"), ("it's", "[a,b]"), ("x" * 101, "[a,b]")]
)  # fmt: skip
def test_text_in_place_of_a_list_is_answered_with_the_list_it_may_mean(given, written):
    (problem,) = refused(names=given)
    assert problem == f"here.names: got {given!r}, expected a list, each text. A list on the command line: '{written}'."


def test_the_place_inside_a_list_a_mapping_or_a_section_is_named_and_a_key_taken_for_a_value_must_be_quoted():
    assert refused(names=["a", None]) == ["here.names[1]: got None, expected text."]
    assert refused(weights=[1])[0].startswith("here.weights: got [1], expected a mapping such as {name: value}")
    assert refused(weights={"en": -1}) == ["here.weights.en: got -1, expected a number at least 0."]
    assert refused(inner={"depth": 0}) == ["here.inner.depth: got 0, expected a whole number at least 1."]
    assert refused(inner={"dept": 2}) == ["`here.inner` has no field `dept`. Did you mean `depth`?"]
    assert refused(items=[{"name": "a", "weight": 1}, {"weight": "x"}]) == [
        "here.items[1].name: got nothing, expected text. It has no default.",
        "here.items[1].weight: got 'x', expected a number at least 0.",
    ]
    problems = refused(weights={False: 1, None: 1})
    expected = "expected a name in quotes, because YAML reads this one as a value."
    assert problems == [f"here.weights.{key}: got {key}, {expected}" for key in (False, None)]


def test_an_unknown_choice_or_field_is_answered_with_the_nearest_name_or_all_of_them():
    kinds = "expected one of 'cosine', 'constant'. Did you mean `cosine`?"
    assert refused(kind="cosin") == [f"here.kind: got 'cosin', {kinds}"]
    assert refused(shares=1) == ["`here` has no field `shares`. Did you mean `share`?"]
    (problem,) = refused(qqq=1)
    assert problem.startswith("`here` has no field `qqq`. Available: flag, count, size,")
    assert schema.nearest_hint("xxxx", ["a", "b"]) == "Available: a, b."
    names = ["quickstart", "z2all-100m", "z2all-1b", "z2all-moe"]
    for name, meant in (("quikstart", "quickstart"), ("z2all-99m", "z2all-100m"), ("z2all-2b", "z2all-1b")):
        assert schema.nearest_hint(name, names) == f"Did you mean `{meant}`?"


def test_all_problems_come_together_and_what_is_no_mapping_at_all_is_one():
    found = refused(sise=1, count="x", kind="linear", inner={"depth": -1}, names=[1.5], weights={"a": "b"})
    assert len(found) == 6
    problems: list[Problem] = []
    assert build(Section, [1, 2], "", problems) is None
    assert [problem.field for problem in problems] == ["config"]


def test_the_doc_line_under_each_field_is_found_on_one_line():
    docs = schema.field_docs(Section)
    assert (docs["flag"], docs["count"]) == ("Yes or no.", "A number of things that takes two lines to explain.")
    assert "size" not in docs


@pytest.mark.parametrize("value", [2**63, "9" * 30, 1e30, 1 << 20_000], ids=range(4))
def test_a_whole_number_beyond_64_bits_is_a_problem_and_not_a_number(value):
    (problem,) = refused(size=value)
    assert len(problem) < 500
    assert problem.endswith("a whole number at least 1. It must fit into 64 bits.")


def test_a_long_value_is_cut_where_it_is_shown():
    text = str(Problem("a" * 5000, "x" * 5000, "something"))
    assert len(text) < 600
    assert "(5,002 characters)" in text


def test_an_override_that_stands_for_endless_values_is_one_problem():
    problems, values = [], {}
    schema.apply_overrides(values, ["--a.b", "[" * 5000, "--a.c", "*.txt", "--a.d", "2024-13-45", "--a.e=3"], problems)
    assert [problem.field for problem in problems] == ["a.b"]
    assert values == {"a": {"c": "*.txt", "d": "2024-13-45", "e": 3}}
