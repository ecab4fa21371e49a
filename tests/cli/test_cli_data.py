"""`z2a pack` and `z2a data …` as a person types them."""

from __future__ import annotations

import json

import pytest

from zero2all.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def work(folder, raw):
    """A packed workspace, made by the command line alone."""
    for command in (
        f"corpus build tales={raw / 'en.jsonl'}:en --valid-share 0.1",
        "tokenizer train --vocab-size 300",
        "pack --best-fit 64,32 --workers 1",
    ):
        assert main([*command.split(), "--work", str(folder / "work")]) == 0
    return folder / "work"


def test_a_sample_is_shown_with_its_borders_and_its_raw_file(work, raw, z2a):
    ended = z2a("data", "show", "--at", "3", "--data.seq_len", "256", "--work", work)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("position 3 (stage main); source tales, channel en, train; sample ")
    assert f"{raw / 'en.jsonl'}, item " in ended.out
    assert "<|end_of_text|>" in ended.out
    ended = z2a("data", "show", "--source", "tales", "--sample", "1", "--data.seq_len", "23", "--work", work)
    assert "sample 1 of" in ended.out, "a length that does not divide the tokens of a step will do"
    assert z2a("data", "show", "--work", work).code == 2
    ended = z2a("data", "show", "--source", "nope", "--work", work)
    assert ended.code == 2
    assert "no packed source `nope`" in ended.err
    assert "tales" in ended.err
    assert "z2a pack" not in ended.err


def test_the_figures_are_printed_and_written(work, folder, z2a):
    words = ("data", "stats", "--tokens", "4000", "--data.seq_len", "64", "--work", work)
    ended = z2a(*words, "--json", folder / "stats.json")
    assert ended.code == 0, ended.err
    for words in ("bytes/token", "best_fit 64", "best_fit 32", "concat 64", "epochs", "a run of 4.0k tokens"):
        assert words in ended.out
    assert json.loads((folder / "stats.json").read_text())["budget"]["tokens"] == 4000


def test_damage_is_named_with_exit_code_3(work, z2a):
    assert z2a("data", "verify", "--work", work).code == 0
    path = work / "packed/tales/train/tokens-00000.bin"
    sound = path.read_bytes()
    path.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    ended = z2a("data", "verify", "--work", work)
    path.write_bytes(sound)
    assert ended.code == 3
    assert f"1. {path} has changed since it was written" in ended.err


def test_data_goes_out_and_comes_in(work, folder, z2a):
    ended = z2a("data", "export", "--to", "megatron", "--out", folder / "out", "--work", work)
    assert ended.code == 0, ended.err
    assert str(folder / "out/tales.train.idx") in ended.out
    prefix = folder / "out/tales.train"
    ended = z2a("data", "import", f"again={prefix}", "--from", "megatron", "--channel", "x", "--work", work)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("again/train: ")
    assert "channel x" in ended.out
    assert z2a("data", "import", "again", "--from", "megatron", "--work", work).code == 2
    assert z2a("data", "export", "nothing", "--to", "numpy", "--out", folder / "out", "--work", work).code == 2
