"""`verify_packed` names every damaged file and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from zero2all.common.files import crc32c_of
from zero2all.packed.bestfit import build_best_fit
from zero2all.packed.shard_format import open_split
from zero2all.packed.verify import packed_bytes, verify_packed


@pytest.fixture
def made(by_hand, tmp_path):
    made = by_hand(tmp_path, {"a": [20] * 20, "talk": [20] * 20}, masked=["talk"], vocab_size=50000)
    for name in ("a", "talk"):  # a held-out split like the other
        folder = made.packed / name
        for path in list((folder / "train").iterdir()):
            (folder / "valid").mkdir(exist_ok=True)
            (folder / "valid" / path.name).write_bytes(path.read_bytes())
    return made


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


def test_sound_data_has_no_problems_and_is_read_whole(made):
    build_best_fit(open_split(made.packed, "a", "train"), 16)
    read = []
    assert verify_packed(made.packed, "by-hand", read.append) == []
    assert sum(read) == packed_bytes(made.packed)


@pytest.mark.parametrize("file", ["a/train/tokens-00001.bin", "a/valid/docs-00000.idx", "talk/train/mask-00002.bin"])
def test_a_flipped_bit_is_named(made, file):
    flip(made.packed / file)
    (problem,) = verify_packed(made.packed)
    assert f"{made.packed / file} has changed since it was written (crc32c differs)" in problem


def test_everything_that_is_wrong_is_found_at_once(made):
    (made.packed / "a/train/tokens-00002.bin").unlink()
    flip(made.packed / "talk/train/docs-00001.idx")
    (made.packed / "talk/valid/manifest.json").unlink()
    problems = verify_packed(made.packed, "another")
    assert len(problems) == 4
    for words in ("packed with tokenizer by-hand", "tokens-00002.bin is missing", "docs-00001.idx", "talk/valid"):
        assert sum(words in problem for problem in problems) == 1


def test_an_id_beyond_the_vocabulary_is_named_with_its_place(made):
    path = made.packed / "a/train/tokens-00001.bin"
    ids = np.fromfile(path, "<u2")
    ids[7] = 50000
    ids.tofile(path)
    sealed(path)
    assert verify_packed(made.packed) == [f"{path}: token 7 has the id 50000, but there are only 50000 ids"]


@pytest.mark.parametrize("change", [lambda starts: starts[::-1], lambda starts: starts + 1, lambda starts: starts * 9])
def test_borders_that_cannot_be_true_are_named(made, change):
    path = made.packed / "a/train/docs-00000.idx"
    change(np.fromfile(path, "<u8")).tofile(path)
    sealed(path)
    (problem,) = verify_packed(made.packed)
    assert f"{path}: document starts must rise from 0 and stay below 140" in problem


def test_a_manifest_of_another_tokenizer_or_count_is_named(made):
    path = made.packed / "a/train/manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "tokenizer": "another", "documents": 3}))
    tokenizer, documents = verify_packed(made.packed)
    assert f"{path}: `tokenizer` is another" in tokenizer
    assert f"{path}: `documents` is 3, the shards hold 20" in documents


def test_a_best_fit_index_of_other_tokens_is_named(made):
    build_best_fit(open_split(made.packed, "a", "train"), 16)
    path = made.packed / "a/train/tokens-00001.bin"
    flip(path)
    sealed(path)
    (problem,) = verify_packed(made.packed)
    assert "best-fit-16/manifest.json does not belong to the token shards" in problem
