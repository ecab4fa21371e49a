"""Probes as YAML: families expanded over their templates, all problems named at once; and our own probes."""

import re

import pytest

from zero2all.common.errors import BadInputError
from zero2all.evals.options import OWN_PROBES
from zero2all.evals.question_files import MAX_FOILS, Probe, read_probes

FAMILIES = """
- family: capital
  language: en
  templates: ["The capital of {x} is {a}.", "Q: {x}?\\nA: {a}", "{x}, {g}. Again: {x}, {a}"]
  facts:
    France: Paris
    Japan: [Tokyo, Kyoto]
    Peru: {gold: [Lima, the city of Lima], foils: [Quito]}
- family: code
  language: code
  may_go_on: true
  facts:
    loop: {gold: "    x", foils: [x], templates: ["a:\\n{a}", "b:\\n{a}", "c {d}:\\n{a}"]}
"""


def read(tmp_path, text):
    path = tmp_path / "probes.yaml"
    path.write_text(text, encoding="utf-8")
    return read_probes(path)


def test_each_fact_is_asked_in_each_template(tmp_path):
    probes = read(tmp_path, FAMILIES)
    assert len(probes) == 12
    assert probes[0] == Probe(
        id="en/capital/France/0",
        channel="en",
        family="capital",
        prompt="The capital of France is",
        joiner=" ",
        answer="Paris",
        foils=["Tokyo", "Lima"],  # the answers of the facts after it
        question="en/capital/France",
    )
    assert [probe.prompt for probe in probes[3:6]] == [
        "The capital of Japan is",
        "Q: Japan?\nA:",
        "Japan, Tokyo. Again: Japan,",
    ]
    assert probes[3].foils == ["Kyoto"]
    assert (probes[6].right, probes[6].wrong) == ([" Lima", " the city of Lima"], [" Quito"])
    assert (probes[11].prompt, probes[11].right, probes[11].may_go_on) == ("c {d}:\n", ["    x"], True)


def test_all_problems_of_a_file_are_named_at_once(tmp_path):
    with pytest.raises(BadInputError) as error:
        read(
            tmp_path,
            """
            - {family: a, language: en, templates: ["{x}", "{x} {a}"], facts: {b: yes}, foil: [x]}
            - {family: c, language: en, templates: ["1 {a}", "2 {a}", "3 {a}"], facts: {d: [eat, eaten], e: [1, 2]}}
            - {family: f, language: en, facts: []}
            - {family: g, language: en, templates: ["{x}", "2{x}", "3{x}"], facts: {h: i}}
            - just text
            """,
        )
    said = str(error.value)
    for part in (
        "en/a: foil is not a field. Did you mean `foils`?",
        "en/a/b: gold: got True, expected text",
        "en/a/b: 2 different templates, expected 3",
        "en/c/d: 'eat' and 'eaten' are not two answers",
        "en/c/e: a template for several facts must have {x}",
        "en/f: facts must be a mapping",
        "en/g/h: it has no foil",
        "family 5: expected a mapping",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("text", "reason"), [("a: [", "is not YAML"), ("a: 1", "should be a list"), (" \n", "is empty")]
)
def test_a_file_that_is_no_list_of_families_is_refused(tmp_path, text, reason):
    with pytest.raises(BadInputError, match=reason):
        read(tmp_path, text)


def test_a_small_file_that_stands_for_billions_of_values_is_refused(tmp_path):
    doublings = [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(BadInputError, match="more than 100,000 values once aliases are expanded"):
        read(tmp_path, "\n".join(["- &a0 [x]", *doublings]))
    with pytest.raises(BadInputError, match="listed twice"):
        read(tmp_path, FAMILIES + "    loop: {}\n")


def test_our_own_probes_are_many_in_both_languages_and_each_has_several_contexts():
    probes = read_probes(OWN_PROBES)
    contexts: dict[str, set[str]] = {}
    for probe in probes:
        contexts.setdefault(probe.question, set()).add(probe.prompt)
        assert probe.prompt
        assert 1 <= len(probe.wrong) <= MAX_FOILS
    assert len(contexts) >= 200
    assert min(map(len, contexts.values())) >= 3
    languages = [question.split("/")[0] for question in contexts]
    assert min(languages.count("zh"), languages.count("en")) >= 100


def test_our_own_arithmetic_is_right():
    signs = {"加": "+", "减": "-", "乘": "*"}
    calculations = {probe.question: probe for probe in read_probes(OWN_PROBES) if probe.family.startswith("arithmetic")}
    assert len(calculations) > 30
    for question, probe in calculations.items():
        left, sign, right = re.fullmatch(r"(\d+) ?(\D) ?(\d+)", question.split("/")[-1]).groups()
        a, b, sign = int(left), int(right), signs.get(sign, sign)
        assert int(probe.answer) == {"+": a + b, "-": a - b, "*": a * b}[sign], question
        if sign in "+-":
            digits = list(zip(left[::-1], right[::-1], strict=False))
            carries = any(int(x) + int(y) > 9 if sign == "+" else int(x) < int(y) for x, y in digits)
            assert carries == ("with carry" in probe.family), question
