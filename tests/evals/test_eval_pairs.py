"""Contrast pairs: how a file is read, when a pair is told apart, and that more training tells more of them apart."""

import json

import pytest

from zero2all.common.errors import BadInputError
from zero2all.evals.options import OWN_PAIRS
from zero2all.evals.probes import Compared, PairResult, compare_pairs, summarize_pairs
from zero2all.evals.question_files import Pair, read_pairs
from zero2all.infer.engine import Engine


def test_a_sentence_with_a_difference_is_a_pair(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text("- {kind: order, language: zh, pairs: ['冬天很{冷|热}，夏天很{热|冷}。']}", encoding="utf-8")
    (pair,) = read_pairs(path)
    right = "冬天很冷，夏天很热。"
    assert pair == Pair(id=f"zh/order/{right}", channel="zh", kind="order", right=right, wrong="冬天很热，夏天很冷。")


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


def test_a_sentence_without_a_difference_is_named(tmp_path):
    path = tmp_path / "pairs.yaml"
    path.write_text("- {kind: a, language: en, pairs: [no difference, 'x{a|b}']}\n- {kind: c}\n")
    with pytest.raises(BadInputError, match=r"(?s)2 problems.*en/a: got 'no difference'.*kind 2: expected"):
        read_pairs(path)


def test_our_own_pairs_are_many_in_both_languages():
    channels = [pair.channel for pair in read_pairs(OWN_PAIRS)]
    assert len(channels) >= 100
    assert min(channels.count("zh"), channels.count("en")) >= 50


def test_a_pair_is_told_apart_by_the_sentence_and_by_its_bytes():
    pair = Pair(id="1", channel="en", kind="k", right="abcdefgh", wrong="abcd")
    longer_costs_more = PairResult(pair, right_logprob=-6.0, wrong_logprob=-4.0)
    assert (longer_costs_more.told_apart, longer_costs_more.told_apart_per_byte) == (False, True)
    assert not PairResult(pair, -4.0, -4.0).told_apart
    found = summarize_pairs(
        Compared([longer_costs_more, PairResult(pair, -1.0, -4.0)], {"x": "too long", "y": "too long"})
    )
    assert (found["accuracy"], found["accuracy_per_byte"], found["nats"], found["pairs"]) == (0.5, 1.0, 0.5, 2)
    assert found["skipped"] == {"too long": 2}


def test_whole_sentences_are_scored_from_their_beginning(speller):
    pairs = [
        Pair(id="1", channel="zh", kind="k", right="首都 Rome", wrong="首都 Oslo"),
        Pair(id="2", channel="zh", kind="k", right=" Rome", wrong="x" * 100),
    ]
    found = compare_pairs(Engine(speller("首都", " Rome")), pairs)
    assert [result.pair.id for result in found.results] == ["1"]
    assert found.results[0].right_logprob == pytest.approx(0.0, abs=1e-2)
    assert found.results[0].told_apart
    assert list(found.skipped) == ["2"]
