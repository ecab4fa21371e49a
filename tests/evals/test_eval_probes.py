"""Probes and contrast pairs: when an answer counts as right, how files are read, how results are gathered."""

import dataclasses
import itertools
import json
import math
import re

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.evals import probes as probing
from zero2all.evals.options import OWN_PAIRS, OWN_PROBES
from zero2all.evals.probes import Answers, ProbeResult, compare_pairs, run_probes, summarize
from zero2all.evals.question_files import MAX_FOILS, Pair, Probe, read_pairs, read_probes
from zero2all.evals.report import report_lines
from zero2all.infer.engine import Engine

BEIJING = Probe(id="a", channel="zh", family="capital", prompt="中国的首都是", answer="北京")
ROMAN = Probe(id="1", channel="en", family="capital", prompt="首都", joiner=" ", answer="Rome", foils=["Ro", "Oslo"])


def ask(loaded, **changes):
    (result,) = run_probes(Engine(loaded), [dataclasses.replace(ROMAN, **changes)]).results
    return result


@pytest.mark.parametrize(
    ("writes", "changes", "correct", "written"),
    [
        ([" Rome"], {}, True, " Rome"),  # and the end of the text
        ([" Rome", "lan", "d"], {}, False, " Romelan"),  # a longer word
        ([" Rome"], {"answer": "Romeland"}, False, " Rome"),  # the beginning of the answer
        (["Rome"], {}, False, "Rome"),  # without its joiner
        (["Rome", "lan", "d", "."], {}, False, "Rome"),  # decoding stops where it has become impossible
        (["是北京"], {"prompt": "首都是", "joiner": "", "answer": "北京"}, True, None),  # across the border
        # 黎 and 。 come as three tokens of one byte each: the character is judged when it is whole.
        *((["是北京", after], {"joiner": "", "answer": "是北京"}, after == "。", None) for after in ("京", "黎", "。")),
    ],
)
def test_an_answer_is_right_where_it_is_whole_and_no_longer_word(speller, writes, changes, correct, written):
    result = ask(speller("首都", *writes), **changes)
    assert result.correct is correct
    assert written in (None, result.written)


def test_probability_and_share_are_those_of_the_answer(bigram, border_tokenizer, logits):
    def model(**probabilities):
        logits[:] = -20.0
        for text, probability in probabilities.items():
            logits[:, border_tokenizer.encode_text(text)[0]] = torch.tensor(probability).log()
        return bigram(logits)

    result = ask(model(Ro=0.6, Rome=0.2), joiner="", foils=["Ro"])
    assert (result.probability, result.share_among_foils) == pytest.approx((0.25, 0.25), rel=1e-3)
    # Several right answers are worth their sum, and the rank is that of the likeliest.
    several = model(Ro=0.5, Rome=0.2, an=0.3)
    result = ask(several, joiner="", answer="Rome", also=["an"], foils=["Ro"])
    found = (result.probability, result.share_among_foils, result.logprob)
    assert found == pytest.approx((0.5, 0.5, math.log(0.5)), rel=1e-3)
    assert (result.rank, result.correct) == (1, False)
    assert ask(several, joiner="", answer="Rome", also=["Ro"], foils=[], may_go_on=True).correct


def test_wordings_of_one_question_are_one_sample_with_their_range():
    results = []
    for question, share in (("a", 0.2), ("a", 0.4), ("a", 0.9), ("b", 0.5)):
        each = result("zh", "capital", False)
        probe = dataclasses.replace(each.probe, question=question)
        results.append(dataclasses.replace(each, probe=probe, share_among_foils=share))
    found = summarize(Answers(results, {}))
    assert (found["questions"], found["probes"]) == (2, 4)
    assert found["share_among_foils"] == pytest.approx(0.5)
    assert found["share_range_of_wordings"] == pytest.approx(0.35)
    assert found["share_interval"] == pytest.approx([0.5, 0.5])


def test_probe_that_is_too_long_is_named_and_the_others_are_asked(speller):
    long = dataclasses.replace(ROMAN, id="long", prompt="x" * 100)
    asked = run_probes(Engine(speller("首都", " Rome")), [long, ROMAN])
    assert [result.probe.id for result in asked.results] == ["1"]
    assert list(asked.skipped) == ["long"]
    (reason,) = summarize(asked)["skipped"]
    assert "the model takes 64" in reason


def test_there_is_no_share_where_there_are_no_foils(trained):
    (result,) = run_probes(Engine(trained), [BEIJING]).results
    assert 0 < result.probability <= 1
    assert result.share_among_foils is None
    found = summarize(Answers([result], {}))
    alone = found["channels"]["zh"]
    assert "share_among_foils" not in {**alone, **alone["groups"]["capital"]}
    lines = report_lines({"run": "r", "step": 1, "held_out": {}, "documents": {}, "probes": found})
    assert any(line.startswith("    capital ") for line in lines)
    probe = dataclasses.replace(BEIJING, id="2", foils=["巴黎"])
    with_foils = dataclasses.replace(result, probe=probe, share_among_foils=0.5)
    assert summarize(Answers([result, with_foils], {}))["share_among_foils"] == 0.5


GOOD_LINE = json.dumps(dataclasses.asdict(ROMAN))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "is not JSON"),
        (GOOD_LINE, "1: there are two of this id"),
        (GOOD_LINE.replace('"Oslo"', '"Rome"'), "1: 'Rome' is both an answer and a foil"),
        ('["a"]', "a mapping of field names"),
        ('{"id": "1", "channel": "en", "family": "x", "prompt": "y"}', "answer: got nothing, expected text"),
        (GOOD_LINE.replace('"Rome"', '""'), "1: an answer or a foil is empty"),
        (GOOD_LINE.replace('["Ro", "Oslo"]', '"Ro"'), "foils: got 'Ro', expected a list"),
        (GOOD_LINE.replace('"foils"', '"foil"'), "foil is not a field. Did you mean `foils`"),
    ],
)
def test_bad_line_of_a_probes_file_is_named_with_its_reason(tmp_path, line, reason):
    path = tmp_path / "probes.jsonl"
    path.write_text(f"{GOOD_LINE}\n{line}\n[]")
    with pytest.raises(BadInputError, match=f"(?s){reason}") as error:
        read_probes(path)
    assert "line 3: " in str(error.value)  # all problems are named at once


def test_bytes_of_another_encoding_are_named_and_a_byte_order_mark_is_none_of_the_text(tmp_path):
    path = tmp_path / "probes.jsonl"
    with pytest.raises(BadInputError, match="cannot be read"):
        read_probes(path)
    path.write_bytes(b"\xef\xbb\xbf" + GOOD_LINE.encode())
    assert read_probes(path) == [ROMAN]
    for data, reason in (('{"id": "题"}'.encode("gb18030"), "line 1 is not UTF-8"), (b"", "is empty")):
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=reason):
            read_probes(path)


NUMBERS = itertools.count()


def result(channel, family, correct, new_wording=False):
    probe = Probe(id=str(next(NUMBERS)), channel=channel, family=family, prompt="", answer="x", new_wording=new_wording)
    return ProbeResult(probe, correct, "x", float(correct) / 2, float(correct), logprob=-1.0, rank=None)


def test_arithmetic_and_new_wordings_are_shown_but_not_part_of_the_mean():
    asked = [("zh", "capital", True), ("zh", "capital", False), ("zh", "arithmetic", False)]
    asked += [("zh", "capital", False, True), ("en", "day", True), ("en", "arithmetic", False)]
    summary = summarize(Answers([result(*each) for each in asked], {}))
    assert (summary["accuracy"], summary["probes"]) == (pytest.approx(2 / 3), 3)
    assert summary["probability"] == pytest.approx(1 / 3)
    zh, en = summary["channels"]["zh"], summary["channels"]["en"]
    assert (zh["accuracy"], zh["probes"]) == (0.5, 2)
    groups = {name: (group["accuracy"], group["probes"]) for name, group in zh["groups"].items()}
    assert groups == {"arithmetic": (0.0, 1), "capital": (0.5, 2), "capital (new wording)": (0.0, 1)}
    assert (en["accuracy"], en["probes"]) == (1.0, 1)
    alone = summarize(Answers([result("zh", "arithmetic", True)], {}))  # nothing that counts: groups, but no mean
    assert "accuracy" not in {**alone, **alone["channels"]["zh"]}
    assert alone["channels"]["zh"]["groups"]["arithmetic"]["accuracy"] == 1.0


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
    first = {"channel": "en", "family": "capital", "prompt": "The capital of France is", "answer": "Paris"}
    first |= {"joiner": " ", "question": "en/capital/France", "foils": ["Tokyo", "Lima"]}  # of the facts after it
    assert probes[0] == Probe(id="en/capital/France/0", **first)
    asked = ["The capital of Japan is", "Q: Japan?\nA:", "Japan, Tokyo. Again: Japan,"]
    assert [probe.prompt for probe in probes[3:6]] == asked
    assert probes[3].foils == ["Kyoto"]
    assert (probes[6].right, probes[6].wrong) == ([" Lima", " the city of Lima"], [" Quito"])
    assert (probes[11].prompt, probes[11].right, probes[11].may_go_on) == ("c {d}:\n", ["    x"], True)


def test_all_problems_of_a_file_are_named_at_once(tmp_path):
    text = """
- {family: a, language: en, templates: ["{x}", "{x} {a}"], facts: {b: yes}, foil: [x]}
- {family: c, language: en, templates: ["1 {a}", "2 {a}", "3 {a}"], facts: {d: [eat, eaten], e: [1, 2]}}
- {family: f, language: en, facts: []}
- {family: g, language: en, templates: ["{x}", "2{x}", "3{x}"], facts: {h: i}}
- just text
"""
    with pytest.raises(BadInputError) as error:
        read(tmp_path, text)
    parts = ["en/a: foil is not a field. Did you mean `foils`?", "en/a/b: gold: got True, expected text"]
    parts += ["en/a/b: 2 different templates, expected 3", "en/c/d: 'eat' and 'eaten' are not two answers"]
    parts += ["en/c/e: a template for several facts must have {x}", "en/f: facts must be a mapping"]
    for part in (*parts, "en/g/h: it has no foil", "family 5: expected a mapping"):
        assert part in str(error.value)


DOUBLINGS = ["- &a0 [x]", *(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not YAML"),
        ("a: 1", "should be a list"),
        (" \n", "is empty"),
        ("\n".join(DOUBLINGS), "more than 100,000 values once aliases are expanded"),  # it stands for billions
        (FAMILIES + "    loop: {}\n", "listed twice"),
    ],
)
def test_a_file_that_is_no_list_of_families_is_refused(tmp_path, text, reason):
    with pytest.raises(BadInputError, match=reason):
        read(tmp_path, text)


def test_our_own_probes_are_many_in_both_languages_and_each_has_several_contexts():
    contexts: dict[str, set[str]] = {}
    for probe in read_probes(OWN_PROBES):
        contexts.setdefault(probe.question, set()).add(probe.prompt)
        assert 1 <= len(probe.wrong) <= MAX_FOILS
    assert min(map(len, contexts.values())) >= 3
    languages = [question.split("/")[0] for question in contexts]
    assert min(languages.count("zh"), languages.count("en")) >= 100


def test_our_own_arithmetic_is_right():
    signs = {"加": "+", "减": "-", "乘": "*"}
    calculations = {probe.question: probe for probe in read_probes(OWN_PROBES) if probe.family.startswith("arithmetic")}
    for question, probe in calculations.items():
        left, sign, right = re.fullmatch(r"(\d+) ?(\D) ?(\d+)", question.split("/")[-1]).groups()
        a, b, sign = int(left), int(right), signs.get(sign, sign)
        assert int(probe.answer) == {"+": a + b, "-": a - b, "*": a * b}[sign], question
        if sign in "+-":
            digits = list(zip(left[::-1], right[::-1], strict=False))
            carries = any(int(x) + int(y) > 9 if sign == "+" else int(x) < int(y) for x, y in digits)
            assert carries == ("with carry" in probe.family), question


def test_a_sentence_with_a_difference_is_a_pair_and_one_without_is_named(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text("- {kind: order, language: zh, pairs: ['冬天很{冷|热}，夏天很{热|冷}。']}", encoding="utf-8")
    (pair,) = read_pairs(path)
    right = "冬天很冷，夏天很热。"
    assert pair == Pair(id=f"zh/order/{right}", channel="zh", kind="order", right=right, wrong="冬天很热，夏天很冷。")
    path.write_text("- {kind: a, language: en, pairs: [no difference, 'x{a|b}']}\n- {kind: c}\n")
    with pytest.raises(BadInputError, match=r"(?s)2 problems.*en/a: got 'no difference'.*kind 2: expected"):
        read_pairs(path)
    channels = [pair.channel for pair in read_pairs(OWN_PAIRS)]
    assert min(channels.count("zh"), channels.count("en")) >= 50


def test_json_lines_are_read_as_well_and_all_problems_are_named_at_once(tmp_path):
    row = {"id": "1", "channel": "en", "kind": "k", "right": "a b", "wrong": "b a"}
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row))
    assert read_pairs(path) == [Pair(**row)]
    rows = [row, row, {**row, "id": "2", "wrong": "a b"}, {**row, "wrong": None}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + "{")
    with pytest.raises(BadInputError) as error:
        read_pairs(path)
    for part in ("1: there are two", "2: right and wrong must be", "line 4: wrong: got None", "line 5 is not JSON"):
        assert part in str(error.value)


def test_a_pair_is_told_apart_by_the_sentence_and_by_its_bytes():
    pair = Pair(id="1", channel="en", kind="k", right="abcdefgh", wrong="abcd")
    longer, even, told = (probing.PairResult(pair, right, -4.0) for right in (-6.0, -4.0, -1.0))
    assert (longer.told_apart, longer.told_apart_per_byte, even.told_apart) == (False, True, False)
    found = probing.summarize_pairs(probing.Answers([longer, told], {"x": "too long", "y": "too long"}))
    assert (found["accuracy"], found["accuracy_per_byte"], found["nats"], found["pairs"]) == (0.5, 1.0, 0.5, 2)
    assert found["skipped"] == {"too long": 2}


def test_whole_sentences_are_scored_from_their_beginning(speller):
    short = Pair(id="1", channel="zh", kind="k", right="首都 Rome", wrong="首都 Oslo")
    pairs = [short, dataclasses.replace(short, id="2", wrong="x" * 100)]
    found = compare_pairs(Engine(speller("首都", " Rome")), pairs)
    assert [result.pair.id for result in found.results] == ["1"]
    assert found.results[0].right_logprob == pytest.approx(0.0, abs=1e-2)
    assert found.results[0].told_apart
    assert list(found.skipped) == ["2"]
