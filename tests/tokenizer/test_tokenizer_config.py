"""The tokenizer section of the config: what may stand there, and what is said of what may not."""

import dataclasses

import pytest

from zero2all.common.schema import Problem, build, field_docs
from zero2all.config import ConfigError, config_from_values, with_new_names
from zero2all.tokenizer import CONTROL_TOKENS, SpecialsConfig, TokenizerConfig
from zero2all.tokenizer.sampling import parse_bytes

SMALLEST_VOCAB_SIZE = len(CONTROL_TOKENS) + 256 + 1


@pytest.mark.parametrize("section", [TokenizerConfig, SpecialsConfig])
def test_every_field_has_a_doc_line(section):
    assert set(field_docs(section)) == {field.name for field in dataclasses.fields(section)}


def test_impossible_values_are_all_reported_together():
    problems: list[Problem] = []
    values = {"vocab_size": "many", "kind": "wordpiece", "threads": 0}
    build(TokenizerConfig, values, "tokenizer", problems)
    assert [problem.field for problem in problems] == ["tokenizer.vocab_size", "tokenizer.kind", "tokenizer.threads"]


def test_a_kind_that_is_gone_is_answered_with_what_to_use_and_runs_that_had_it_load():
    values = {"tokenizer": {"kind": "sentencepiece", "sentencepiece": {"model_type": "unigram"}}}
    with pytest.raises(ConfigError, match=r"tokenizer.kind: .* no longer trained here; `z2a tokenizer import`"):
        config_from_values(values, "of the test")
    assert config_from_values(with_new_names(values), "of a run").tokenizer.kind == "bpe"


def test_defaults_are_valid():
    problems: list[Problem] = []
    assert build(TokenizerConfig, {"max_piece_bytes": None}, "tokenizer", problems) == TokenizerConfig()
    assert problems == TokenizerConfig().problems("tokenizer") == []
    assert SpecialsConfig().names() == CONTROL_TOKENS


def test_problems_between_fields_reach_the_config_of_a_run():
    specials = {"extra": ["<|pad|>"]}
    with pytest.raises(ConfigError, match=r"tokenizer.specials.extra\[0\]: got '<\|pad\|>'.*no other control token"):
        config_from_values({"tokenizer": {"specials": specials}}, "of the test")


@pytest.mark.parametrize(
    ("specials", "field", "expected"),
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
    ],
)
def test_control_tokens_that_cannot_be_told_from_each_other_or_from_text_are_refused(specials, field, expected):
    problems: list[Problem] = []
    config = build(TokenizerConfig, {"specials": specials}, "tokenizer", problems)
    found = config.problems("tokenizer")
    assert [problem.field for problem in found] == [f"tokenizer.{field}"]
    assert expected in str(found[0])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"vocab_size": SMALLEST_VOCAB_SIZE - 1}, "vocab_size"),
        ({"vocab_size": SMALLEST_VOCAB_SIZE, "specials": {"reserved": 9}}, "vocab_size"),
        ({"max_memory": "much"}, "max_memory"),
        ({"take": {"news": "half"}}, "take.news"),
        ({"take": {"news": "45/44"}}, "take.news"),
        ({"take": "1/0"}, "take"),
        ({"pattern": "isolated-han"}, "pattern"),
    ],
)
def test_values_that_do_not_go_together_are_named(values, field):
    problems: list[Problem] = []
    config = build(TokenizerConfig, values, "tokenizer", problems)
    assert [problem.field for problem in config.problems("tokenizer")] == [f"tokenizer.{field}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("500mb", 5 * 10**8),
        ("17", 17),
        ("0", None),
        ("GB", None),
        ("1XB", None),
    ],
)
def test_amounts_are_read_as_people_write_them(text, expected):
    assert parse_bytes(text) == expected
