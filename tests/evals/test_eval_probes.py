"""Probes: when an answer counts as right, what a probes file must look like, how results are gathered."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.evals.probes import ProbeResult, ProbeResults, run_probes, summarize
from zero2all.evals.question_files import Probe, read_probes
from zero2all.evals.report import _probe_line
from zero2all.infer.engine import Engine

BEIJING = Probe(id="a", channel="zh", family="capital", prompt="中国的首都是", answer="北京")
ROMAN = Probe(id="1", channel="en", family="capital", prompt="首都", joiner=" ", answer="Rome", foils=["Ro", "Oslo"])


def ask(loaded, **changes):
    (result,) = run_probes(Engine(loaded), [dataclasses.replace(ROMAN, **changes)]).results
    return result


def test_whole_answer_followed_by_the_end_of_the_text_is_right(speller):
    result = ask(speller("首都", " Rome"))
    assert (result.correct, result.written) == (True, " Rome")


def test_whole_answer_followed_by_punctuation_is_right(speller):
    assert ask(speller("首都", " Rome", ".", "x")).correct


def test_answer_that_goes_on_as_a_longer_word_is_wrong(speller):
    result = ask(speller("首都", " Rome", "lan", "d"))
    assert (result.correct, result.written) == (False, " Romelan")


@pytest.mark.parametrize(
    ("following", "correct"), [("京", False), ("黎", False), ("。", True), ("9", False), ("\n", True)]
)
def test_letters_and_digits_of_any_script_make_an_answer_longer(speller, following, correct):
    # 黎 and 。 come as three tokens of one byte each: the character is judged when it is whole.
    result = ask(speller("首都", "是北京", following), joiner="", answer="是北京")
    assert result.correct is correct


def test_answer_across_the_border_of_the_prompt_is_right(speller):
    assert ask(speller("首都", "是北京"), prompt="首都是", joiner="", answer="北京").correct


def test_answer_without_its_joiner_is_wrong(speller):
    result = ask(speller("首都", "Rome"))
    assert (result.correct, result.written) == (False, "Rome")


def test_beginning_of_the_answer_is_wrong(speller):
    result = ask(speller("首都", " Rome"), answer="Romeland")
    assert (result.correct, result.written) == (False, " Rome")


def test_decoding_stops_where_the_answer_has_become_impossible(speller):
    assert ask(speller("首都", "Rome", "lan", "d", ".")).written == "Rome"


def test_probability_and_share_are_those_of_the_answer(bigram, border_tokenizer, logits):
    # After anything: Ro with 0.6, Rome with 0.2, everything else shares the rest.
    logits[:] = -20.0
    for text, probability in {"Ro": 0.6, "Rome": 0.2}.items():
        logits[:, border_tokenizer.encode_text(text)[0]] = torch.tensor(probability).log()
    result = ask(bigram(logits), joiner="", foils=["Ro"])
    assert result.probability == pytest.approx(0.2 / 0.8, rel=1e-3)
    assert result.share_among_foils == pytest.approx(0.2 / (0.2 + 0.6), rel=1e-3)


def test_several_right_answers_are_worth_their_sum_and_the_rank_is_that_of_the_likeliest(
    bigram, border_tokenizer, logits
):
    logits[:] = -20.0
    for text, probability in {"Ro": 0.5, "Rome": 0.2, "an": 0.3}.items():
        logits[:, border_tokenizer.encode_text(text)[0]] = torch.tensor(probability).log()
    result = ask(bigram(logits), joiner="", answer="Rome", also=["an"], foils=["Ro"])
    assert result.probability == pytest.approx(0.5, rel=1e-3)
    assert result.share_among_foils == pytest.approx(0.5, rel=1e-3)
    assert result.logprob == pytest.approx(math.log(0.5), rel=1e-3)
    assert (result.rank, result.correct) == (1, False)
    assert ask(bigram(logits), joiner="", answer="Rome", also=["Ro"], foils=[], may_go_on=True).correct


def test_wordings_of_one_question_are_one_sample_with_their_range():
    shares = {"a": (0.2, 0.4, 0.9), "b": (0.5,)}
    results = [
        dataclasses.replace(
            result("zh", "capital", False),
            probe=Probe(id=f"{name}/{n}", question=name, channel="zh", family="f", prompt="", answer="x"),
            share_among_foils=share,
        )
        for name, values in shares.items()
        for n, share in enumerate(values)
    ]
    found = summarize(ProbeResults(results, {}))
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
    probe = Probe(id="1", channel="zh", family="capital", prompt="中国的首都是", answer="北京")
    (result,) = run_probes(Engine(trained), [probe]).results
    assert 0 < result.probability <= 1
    assert result.share_among_foils is None
    alone = summarize(ProbeResults([result], {}))["channels"]["zh"]
    assert "share_among_foils" not in {**alone, **alone["groups"]["capital"]}
    assert "capital" in _probe_line("capital", alone)
    with_foils = dataclasses.replace(
        result, probe=dataclasses.replace(probe, id="2", foils=["巴黎"]), share_among_foils=0.5
    )
    assert summarize(ProbeResults([result, with_foils], {}))["share_among_foils"] == 0.5


def test_probes_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "probes.jsonl"
    rows = [
        {"id": "a", "channel": "zh", "family": "capital", "prompt": "中国的首都是", "answer": "北京"},
        dataclasses.asdict(ROMAN),
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_probes(path) == [
        Probe(id="a", channel="zh", family="capital", prompt="中国的首都是", answer="北京"),
        ROMAN,
    ]


GOOD_LINE = json.dumps(dataclasses.asdict(ROMAN))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "is not JSON"),
        ("", "is not JSON"),
        (GOOD_LINE, "1: there are two of this id"),
        (GOOD_LINE.replace('"Oslo"', '"Rome"'), "1: 'Rome' is both an answer and a foil"),
        ('["a"]', "a mapping of field names"),
        ('{"id": "1", "channel": "en", "family": "x", "prompt": "y"}', "answer: got nothing, expected text"),
        (GOOD_LINE.replace('"Rome"', "null"), "answer: got None, expected text"),
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
    path.write_bytes(b"\xef\xbb\xbf" + GOOD_LINE.encode())
    assert read_probes(path) == [ROMAN]
    path.write_bytes('{"id": "题"}'.encode("gb18030"))
    with pytest.raises(BadInputError, match="line 1 is not UTF-8"):
        read_probes(path)


def test_probes_file_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="cannot be read"):
        read_probes(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadInputError, match="is empty"):
        read_probes(tmp_path / "empty.jsonl")


NUMBERS = itertools.count()


def result(channel, family, correct, new_wording=False):
    probe = Probe(id=str(next(NUMBERS)), channel=channel, family=family, prompt="", answer="x", new_wording=new_wording)
    return ProbeResult(probe, correct, "x", float(correct) / 2, float(correct), logprob=-1.0, rank=None)


def test_arithmetic_and_new_wordings_are_shown_but_not_part_of_the_mean():
    results = [
        result("zh", "capital", True),
        result("zh", "capital", False),
        result("zh", "arithmetic", False),
        result("zh", "capital", False, new_wording=True),
        result("en", "day", True),
        result("en", "arithmetic", False),
    ]
    summary = summarize(ProbeResults(results, {}))
    assert (summary["accuracy"], summary["probes"]) == (pytest.approx(2 / 3), 3)
    assert summary["probability"] == pytest.approx(1 / 3)
    zh, en = summary["channels"]["zh"], summary["channels"]["en"]
    assert (zh["accuracy"], zh["probes"]) == (0.5, 2)
    assert {name: (group["accuracy"], group["probes"]) for name, group in zh["groups"].items()} == {
        "arithmetic": (0.0, 1),
        "capital": (0.5, 2),
        "capital (new wording)": (0.0, 1),
    }
    assert (en["accuracy"], en["probes"]) == (1.0, 1)


def test_channel_with_nothing_that_counts_has_groups_but_no_mean():
    summary = summarize(ProbeResults([result("zh", "arithmetic", True)], {}))
    assert "accuracy" not in summary
    assert summary["channels"]["zh"]["groups"]["arithmetic"]["accuracy"] == 1.0
    assert "accuracy" not in summary["channels"]["zh"]
