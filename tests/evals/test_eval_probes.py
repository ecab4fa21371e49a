"""Probes: when an answer counts as right, what a probes file must look like, how results are gathered."""

import dataclasses
import json

import pytest
import torch

from zero2all.common.errors import BadInputError
from zero2all.evals.probe_file import Probe, read_probes
from zero2all.evals.probes import ProbeResult, run_probes, summarize
from zero2all.infer.engine import Engine

BEIJING = Probe(id="a", channel="zh", family="capital", prompt="中国的首都是", answer="北京")
ROMAN = Probe(id="1", channel="en", family="capital", prompt="首都", joiner=" ", answer="Rome", foils=["Ro", "Oslo"])


def ask(loaded, **changes):
    (result,) = run_probes(Engine(loaded), [dataclasses.replace(ROMAN, **changes)])
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


def test_share_is_one_where_there_are_no_foils(trained):
    (result,) = run_probes(
        Engine(trained), [Probe(id="1", channel="zh", family="capital", prompt="中国的首都是", answer="北京")]
    )
    assert 0 < result.probability <= 1
    assert result.share_among_foils == 1.0


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
        ("{not json", "is no JSON"),
        ("", "is no JSON"),
        ('["a"]', "a mapping of field names"),
        ('{"id": "1", "channel": "en", "family": "x", "prompt": "y"}', "answer: got nothing, expected text"),
        (GOOD_LINE.replace('"Rome"', "null"), "answer: got None, expected text"),
        (GOOD_LINE.replace('"Rome"', '""'), "answer: got '', expected some text"),
        (GOOD_LINE.replace('["Ro", "Oslo"]', '"Ro"'), "foils: got 'Ro', expected a list"),
        (GOOD_LINE.replace('"foils"', '"foil"'), "foil: .*Did you mean `foils`"),
    ],
)
def test_bad_line_of_a_probes_file_is_named_with_its_reason(tmp_path, line, reason):
    path = tmp_path / "probes.jsonl"
    path.write_text(f"{GOOD_LINE}\n{line}\n")
    with pytest.raises(BadInputError, match=f"probes.jsonl line 2 .*{reason}"):
        read_probes(path)


def test_probes_file_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="cannot be read"):
        read_probes(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(BadInputError, match="is empty"):
        read_probes(tmp_path / "empty.jsonl")


def result(channel, family, correct, new_wording=False):
    probe = Probe(id="", channel=channel, family=family, prompt="", answer="x", new_wording=new_wording)
    return ProbeResult(probe, correct, "x", probability=float(correct) / 2, share_among_foils=float(correct))


def test_arithmetic_and_new_wordings_are_shown_but_not_part_of_the_mean():
    summary = summarize(
        [
            result("zh", "capital", True),
            result("zh", "capital", False),
            result("zh", "arithmetic", False),
            result("zh", "capital", False, new_wording=True),
            result("en", "day", True),
            result("en", "arithmetic", False),
        ]
    )
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
    summary = summarize([result("zh", "arithmetic", True)])
    assert "accuracy" not in summary
    assert summary["channels"]["zh"]["groups"]["arithmetic"]["accuracy"] == 1.0
    assert "accuracy" not in summary["channels"]["zh"]
