"""Packed data that cannot be right is refused when it is opened, with file and field."""

from __future__ import annotations

import json

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.packed.config import DataConfig
from zero2all.packed.mixture import open_training_data
from zero2all.packed.shard_format import open_split
from zero2all.packed.stages import Stage


@pytest.fixture
def made(by_hand, tmp_path):
    return by_hand(tmp_path, {"a": [20] * 20, "talk": [20] * 20}, masked=["talk"])


def edit(made, source, **fields):
    path = made.packed / source / "train/manifest.json"
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("dtype", "<f4", "one of <u2, <u4"),
        ("dtype", None, "a value of type str"),
        ("vocab_size", 70000, "a type that holds 70000 ids"),
        ("max_id", 60000, r"an id below vocab_size \(60000\)"),
        ("tokens", 399, "400, the number of tokens in the shards"),
        ("tokens", -1, "expected 0 or more"),
        ("shards", "3", "a value of type int"),
        ("channel", 7, "a value of type str"),
    ],
)
def test_a_field_that_cannot_be_true_is_named(made, field, value, expected):
    edit(made, "a", **{field: value})
    name = "dtype" if field == "vocab_size" else field
    with pytest.raises(BadInputError, match=rf"a/train/manifest\.json: `{name}` is .*{expected}.*z2a pack"):
        open_split(made.packed, "a", "train")


@pytest.mark.parametrize("file", ["tokens-00001.bin", "docs-00000.idx", "mask-00002.bin"])
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_missing_or_short_file_of_any_kind_is_named(made, file, damage):
    path = made.packed / "talk/train" / file
    if damage == "delete":
        path.unlink()
        problem = "is missing"
    else:
        path.write_bytes(path.read_bytes()[:-1])
        problem = r"has \d+ bytes, expected \d+"
    with pytest.raises(BadInputError, match=rf"talk/train/{file} {problem}"):
        open_training_data(made.packed, DataConfig(seq_len=8), [Stage("main", 0, None, 8)])


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_file_that_is_lost_or_cut_after_the_split_was_opened_is_named_where_it_is_first_read(made, damage):
    split, path = open_split(made.packed, "a", "train"), made.packed / "a/train/tokens-00001.bin"
    path.unlink() if damage == "delete" else path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BadInputError, match=r"a/train/tokens-00001.bin (is missing|has \d+ bytes)"):
        split.read(0, split.tokens)


def test_a_file_that_the_manifest_does_not_list_is_named(made):
    edit(made, "a", shards=4)
    with pytest.raises(BadInputError, match=r"a/train/manifest\.json: `files` does not list tokens-00003\.bin"):
        open_split(made.packed, "a", "train")


def test_a_mask_must_have_a_bit_for_every_token(made):
    path = made.packed / "talk/train/mask-00000.bin"
    path.write_bytes(path.read_bytes() + b"\0")
    manifest = json.loads((made.packed / "talk/train/manifest.json").read_text())
    files = {**manifest["files"], path.name: {**manifest["files"][path.name], "bytes": path.stat().st_size}}
    edit(made, "talk", files=files)
    with pytest.raises(BadInputError, match=r"mask-00000\.bin has 19 bytes, expected one bit for each of 140 tokens"):
        open_split(made.packed, "talk", "train")


def test_data_of_another_tokenizer_than_the_report_says_is_named(made):
    edit(made, "a", tokenizer="another")
    edit(made, "talk", tokenizer="another")
    with pytest.raises(BadInputError, match=r"a/train/manifest\.json: `tokenizer` is another, but .*report\.json"):
        open_training_data(made.packed, DataConfig(seq_len=8), [Stage("main", 0, None, 8)])


@pytest.mark.parametrize("mixture", [{"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_weights_that_are_no_weights_are_refused(made, mixture):
    with pytest.raises(UsageError, match=r"data\.mixture gives `a` the weight .* expected 0 or more"):
        open_training_data(made.packed, DataConfig(seq_len=8), [Stage("main", 0, mixture, 8)])


def test_weights_of_which_none_is_above_zero_are_refused(made):
    with pytest.raises(UsageError, match="no source a weight above 0"):
        open_training_data(made.packed, DataConfig(seq_len=8), [Stage("main", 0, {"a": 0.0}, 8)])
