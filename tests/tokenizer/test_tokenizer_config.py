"""The tokenizer section of the config."""

import dataclasses

from zero2all.common.schema import Problem, build, field_docs
from zero2all.tokenizer import TokenizerConfig


def test_every_field_has_a_doc_line():
    assert set(field_docs(TokenizerConfig)) == {field.name for field in dataclasses.fields(TokenizerConfig)}


def test_impossible_values_are_all_reported_together():
    problems: list[Problem] = []
    build(TokenizerConfig, {"vocab_size": 256, "kind": "wordpiece", "train_bytes": 0}, "tokenizer", problems)
    assert [problem.field for problem in problems] == [
        "tokenizer.vocab_size",
        "tokenizer.kind",
        "tokenizer.train_bytes",
    ]


def test_defaults_are_valid():
    problems: list[Problem] = []
    assert build(TokenizerConfig, {"max_piece_bytes": None}, "tokenizer", problems) == TokenizerConfig()
    assert problems == []
