"""Damaged data: refused when it is opened, named by `verify_packed`, and found beside a run, with file and field."""

import json
import os
import shutil
import time

import numpy as np
import psutil
import pytest

from tests.waiting import wait_until
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import crc32c_of
from zero2all.packed import verify
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.config import DataConfig
from zero2all.packed.mixture import open_training_data
from zero2all.packed.shard_format import open_split
from zero2all.packed.stages import Stage
from zero2all.packed.verify import checking_shards, packed_bytes, verify_packed


@pytest.fixture
def made(by_hand, tmp_path):
    """Two sources, one of them with a mask, both with a held-out split like the other."""
    made = by_hand(tmp_path, {"a": [20] * 20, "talk": [20] * 20}, masked=["talk"])
    for name in ("a", "talk"):
        shutil.copytree(made.packed / name / "train", made.packed / name / "valid")
    return made


def edit(made, source, **fields):
    path = made.packed / source / "train/manifest.json"
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def flip(path, at=5):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


def sealed(path):
    """Make the manifest agree with a file that was changed."""
    manifest = path.parent / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"][path.name] = {"bytes": path.stat().st_size, "crc32c": crc32c_of(path)}
    manifest.write_text(json.dumps(content))


def open_a(made):
    return open_split(made.packed, "a", "train")


def open_data(made, mixture=None):
    return open_training_data(made.packed, DataConfig(seq_len=8), [Stage("main", 0, mixture, 8)])


FIELDS = [("dtype", "<f4", "one of <u2, <u4"), ("dtype", None, "a value of type str")]
FIELDS += [("vocab_size", 70000, "a type that holds 70000 ids"), ("max_id", 60000, r"an id below vocab_size \(60000\)")]
FIELDS += [("tokens", 399, "400, the number of tokens in the shards"), ("tokens", -1, "expected 0 or more")]
FIELDS += [("shards", "3", "a value of type int"), ("channel", 7, "a value of type str")]


@pytest.mark.parametrize(("field", "value", "expected"), FIELDS)
def test_a_field_that_cannot_be_true_is_named(made, field, value, expected):
    edit(made, "a", **{field: value})
    name = "dtype" if field == "vocab_size" else field
    with pytest.raises(BadInputError, match=rf"a/train/manifest\.json: `{name}` is .*{expected}.*z2a pack"):
        open_a(made)


@pytest.mark.parametrize("file", ["tokens-00001.bin", "docs-00000.idx", "mask-00002.bin"])
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_missing_or_short_file_of_any_kind_is_named(made, file, damage):
    path = made.packed / "talk/train" / file
    path.unlink() if damage == "delete" else path.write_bytes(path.read_bytes()[:-1])
    problem = "is missing" if damage == "delete" else r"has \d+ bytes, expected \d+"
    with pytest.raises(BadInputError, match=rf"talk/train/{file} {problem}"):
        open_data(made)


def test_a_file_that_is_cut_after_the_split_was_opened_is_named_where_it_is_first_read(made):
    split, path = open_a(made), made.packed / "a/train/tokens-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(BadInputError, match=r"a/train/tokens-00001.bin has \d+ bytes"):
        split.read(0, split.tokens)


def test_a_file_that_the_manifest_does_not_list_is_named(made):
    edit(made, "a", shards=4)
    with pytest.raises(BadInputError, match=r"a/train/manifest\.json: `files` does not list tokens-00003\.bin"):
        open_a(made)


def test_a_mask_must_have_a_bit_for_every_token(made):
    path = made.packed / "talk/train/mask-00000.bin"
    path.write_bytes(path.read_bytes() + b"\0")
    sealed(path)
    with pytest.raises(BadInputError, match=r"mask-00000\.bin has 19 bytes, expected one bit for each of 140 tokens"):
        open_split(made.packed, "talk", "train")


def test_data_of_another_tokenizer_than_the_report_says_and_of_different_ones_is_named(made):
    edit(made, "a", tokenizer="another")
    with pytest.raises(BadInputError, match=r"different tokenizers: a \(another\), talk \(by-hand\)"):
        open_data(made)
    edit(made, "talk", tokenizer="another")
    with pytest.raises(BadInputError, match=r"a/train/manifest\.json: `tokenizer` is another, but .*report\.json"):
        open_data(made)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), 0.0])
def test_weights_that_are_no_weights_or_of_which_none_is_above_zero_are_refused(made, weight):
    said = r"data\.mixture gives `a` the weight .* expected 0 or more" if weight else "no source a weight above 0"
    with pytest.raises(UsageError, match=said):
        open_data(made, {"a": weight})


def test_sound_data_has_no_problems_and_is_read_whole(made):
    build_best_fit(open_a(made), 16)
    read = []
    assert verify_packed(made.packed, "by-hand", read.append) == []
    assert sum(read) == packed_bytes(made.packed)


def test_everything_that_is_wrong_is_found_at_once(made):
    flipped = ["a/train/tokens-00001.bin", "a/valid/docs-00000.idx", "talk/train/mask-00002.bin"]
    for name in flipped:
        flip(made.packed / name)
    (made.packed / "a/train/tokens-00002.bin").unlink()
    (made.packed / "talk/valid/manifest.json").unlink()
    problems = verify_packed(made.packed, "another")
    assert len(problems) == 6
    said = [f"{made.packed / name} has changed since it was written (crc32c differs)" for name in flipped]
    for words in (*said, "packed with tokenizer by-hand", "tokens-00002.bin is missing", "talk/valid"):
        assert sum(words in problem for problem in problems) == 1


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(made):
    path = made.packed / "a/train/tokens-00001.bin"
    ids = np.fromfile(path, "<u2")
    ids[7] = 60000
    ids.tofile(path)
    sealed(path)
    assert verify_packed(made.packed) == [f"{path}: token 7 has the id 60000, but there are only 60000 ids"]


@pytest.mark.parametrize("change", [lambda starts: starts[::-1], lambda starts: starts + 1, lambda starts: starts * 9])
def test_borders_that_cannot_be_true_are_named(made, change):
    path = made.packed / "a/train/docs-00000.idx"
    change(np.fromfile(path, "<u8")).tofile(path)
    sealed(path)
    (problem,) = verify_packed(made.packed)
    assert f"{path}: document starts must rise from 0 and stay below 140" in problem


def test_a_manifest_of_another_tokenizer_or_count_and_a_best_fit_index_of_other_tokens_are_named(made):
    build_best_fit(open_split(made.packed, "talk", "train"), 16)
    flip(made.packed / "talk/train/tokens-00001.bin")
    sealed(made.packed / "talk/train/tokens-00001.bin")
    edit(made, "a", tokenizer="another", documents=3)
    path = made.packed / "a/train/manifest.json"
    tokenizer, documents, index = verify_packed(made.packed)
    assert f"{path}: `tokenizer` is another" in tokenizer
    assert f"{path}: `documents` is 3, the shards hold 20" in documents
    assert "best-fit-16/manifest.json does not belong to the token shards" in index


def splits_of(made):
    return [open_split(made.packed, name, "train") for name in ("a", "talk")]


def reading_processes() -> list[psutil.Process]:
    """Those of the check; other tests have children of this process too."""
    return [child for child in psutil.Process().children() if "zero2all.packed.readers" in " ".join(child.cmdline())]


def no_problem(text: str) -> None:
    raise AssertionError(text)


def damage_found(made, lengths=(), rank=0, ranks=1, splits=None):
    with checking_shards(splits or splits_of(made), lengths, no_problem, rank, ranks) as check:
        wait_until(lambda: check.finished or check.damage is not None)
        return check.damage


@pytest.mark.parametrize(
    "file", ["a/train/tokens-00002.bin", "talk/train/mask-00000.bin", "a/train/best-fit-16/rows.u64", None]
)
def test_a_flipped_byte_of_any_file_that_is_read_is_found_beside_the_run(made, file):
    for split in splits_of(made):
        build_best_fit(split, 16)
    if file is not None:
        flip(made.packed / file)
    wanted = None if file is None else f"{made.packed / file} has changed since it was written (crc32c differs)"
    assert damage_found(made, [16]) == wanted


def test_ranks_share_the_files_and_one_that_vanishes_is_damage(made):
    flip(made.packed / "a/train/tokens-00001.bin")
    assert [damage_found(made, (), rank, 3) is None for rank in range(3)].count(False) == 1
    flip(made.packed / "a/train/tokens-00001.bin")  # as it was
    splits = splits_of(made)
    (made.packed / "a/train/docs-00000.idx").unlink()
    assert "docs-00000.idx cannot be read (No such file or directory)" in damage_found(made, splits=splits)


def test_much_data_is_checked_in_a_process_of_low_priority_that_ends_with_the_block(made, monkeypatch):
    monkeypatch.setattr(verify, "IN_THREAD_BYTES", 0)
    flip(made.packed / "talk/train/tokens-00002.bin")
    with checking_shards(splits_of(made), [], no_problem) as check:
        wait_until(lambda: reading_processes() != [])
        (process,) = reading_processes()
        wait_until(lambda: check.damage is not None)
        assert process.nice() == 19 or os.nice(0) == 19
    assert "talk/train/tokens-00002.bin" in check.damage
    assert not process.is_running()


def test_reading_is_slow_and_stops_at_once_with_the_run(made, monkeypatch):
    monkeypatch.setattr(verify, "CHUNK_BYTES", 64)
    monkeypatch.setattr(verify, "BYTES_PER_SECOND", 320)  # 5 chunks a second: minutes for these files
    with checking_shards(splits_of(made), [], no_problem) as check:
        time.sleep(0.1)
    assert not check.finished
    assert check.damage is None
