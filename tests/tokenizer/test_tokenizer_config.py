"""The tokenizer section of the config: what may stand there, and what is said of what may not."""

import dataclasses
import shutil

import pytest

from zero2all.common.errors import BadInputError
from zero2all.common.schema import Problem, build, field_docs
from zero2all.config import ConfigError, config_from_values, with_new_names
from zero2all.tokenizer import CONTROL_TOKENS, SpecialsConfig, TokenizerConfig, train_tokenizer
from zero2all.tokenizer.parts import parts_from_texts
from zero2all.tokenizer.sampling import parse_bytes
from zero2all.tokenizer.train import BASE_BYTES, BYTES_PER_DISTINCT_BYTE, check_memory

SMALLEST_VOCAB_SIZE = len(CONTROL_TOKENS) + 256 + 1


def test_impossible_values_are_all_reported_together_and_defaults_are_valid():
    problems: list[Problem] = []
    build(TokenizerConfig, {"vocab_size": "many", "kind": "wordpiece", "threads": 0}, "tokenizer", problems)
    assert [problem.field for problem in problems] == ["tokenizer.vocab_size", "tokenizer.kind", "tokenizer.threads"]
    problems.clear()
    assert build(TokenizerConfig, {"max_piece_bytes": None}, "tokenizer", problems) == TokenizerConfig()
    assert problems == TokenizerConfig().problems("tokenizer") == []
    for section in (TokenizerConfig, SpecialsConfig):
        assert set(field_docs(section)) == {field.name for field in dataclasses.fields(section)}


def test_a_kind_that_is_gone_is_answered_with_what_to_use_and_runs_that_had_it_load():
    values = {"tokenizer": {"kind": "sentencepiece", "sentencepiece": {"model_type": "unigram"}}}
    with pytest.raises(ConfigError, match=r"tokenizer.kind: .* no longer trained here; `z2a tokenizer import`"):
        config_from_values(values, "of the test")
    assert config_from_values(with_new_names(values), "of a run").tokenizer.kind == "bpe"


def test_problems_between_fields_reach_the_config_of_a_run():
    with pytest.raises(ConfigError, match=r"tokenizer.specials.extra\[0\]: got '<\|pad\|>'.*no other control token"):
        config_from_values({"tokenizer": {"specials": {"extra": ["<|pad|>"]}}}, "of the test")


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"pad": ""}, "specials.pad", "a name that is not empty"),
        ({"pad": "<|end_of_text|>"}, "specials.pad", "no other control token"),
        ({"extra": ["<|tool|>", "<|tool|>"]}, "specials.extra[1]", "no other control token"),
        ({"extra": ["<|reserved_0|>"]}, "specials.extra[0]", "no other control token"),
        ({"extra": ["pad"]}, "specials.extra[0]", "not part of another control token ('<|pad|>' contains it)"),
        ({"end": "<|x|>", "pad": "<|x|>>"}, "specials.end", "not part of another"),
        ({"extra": ["a"]}, "specials.extra[0]", "several characters"),
        ({"extra": ["<|a b|>"]}, "specials.extra[0]", "white space"),
        ({"extra": ["▁the"]}, "specials.extra[0]", "white space"),
        ({"extra": ["Ġthe"]}, "specials.extra[0]", "byte-level spelling"),
        ({"extra": ["<|\ud800|>"]}, "specials.extra[0]", "UTF-8"),
        ({"vocab_size": SMALLEST_VOCAB_SIZE - 1}, "vocab_size", ""),
        ({"vocab_size": SMALLEST_VOCAB_SIZE, "specials": {"reserved": 9}}, "vocab_size", ""),
        ({"max_memory": "much"}, "max_memory", ""),
        ({"take": {"news": "half"}}, "take.news", ""),
        ({"take": {"news": "45/44"}}, "take.news", ""),
        ({"take": "1/0"}, "take", ""),
        ({"pattern": "isolated-han"}, "pattern", ""),
    ],
)
def test_what_cannot_be_told_apart_or_does_not_go_together_is_refused(values, field, expected):
    config = build(TokenizerConfig, {"specials": values} if "specials." in field else values, "tokenizer", [])
    (problem,) = config.problems("tokenizer")
    assert problem.field == f"tokenizer.{field}"
    assert expected in str(problem)


def test_amounts_are_read_as_people_write_them():
    amounts = {"4GB": 4 * 10**9, "1.5 MiB": 3 << 19, "500mb": 5 * 10**8, "17": 17, "0": None, "GB": None, "1XB": None}
    assert {text: parse_bytes(text) for text in amounts} == amounts


def test_text_that_may_not_fit_is_refused_with_advice_before_training(tmp_path):
    parts = parts_from_texts(["x" * 1_000_000], tmp_path / "spool")
    needed = BASE_BYTES + 1_000_000 * BYTES_PER_DISTINCT_BYTE
    check_memory(parts, TokenizerConfig(kind="hf-bbpe", max_memory=str(needed)))
    with pytest.raises(BadInputError, match=r"up to 315.0 MB .* --max-memory allows .*--kind bpe.*--take 99/100"):
        check_memory(parts, TokenizerConfig(kind="hf-bbpe", max_memory=str(needed - 1)))
    shutil.rmtree(tmp_path / "spool")
    with pytest.raises(BadInputError, match="may need up to"):
        train_tokenizer(["text"], 1000, tmp_path / "t", "inputs", kind="hf-bbpe", max_memory="100MB")
    assert list(tmp_path.iterdir()) == []
