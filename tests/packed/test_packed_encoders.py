"""Packing writes the same tokens whatever encodes, and says what did."""

from __future__ import annotations

import importlib.util

import pytest

from zero2all.common.manifest import read_manifest
from zero2all.packed import writer
from zero2all.packed.writer import PackOptions, pack_corpus
from zero2all.tokenizer.encoders import EncoderConfig


@pytest.mark.parametrize("name", ["numba", "fastokens"])
def test_packed_tokens_do_not_depend_on_the_encoder(name, shared_work, tmp_path, tree):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    pack_corpus(
        shared_work.corpus, shared_work.tokenizer, tmp_path, PackOptions(encoder=EncoderConfig(name, strict=True))
    )
    tokens = {path: data for path, data in tree(tmp_path).items() if not path.endswith("manifest.json")}
    expected = {path: data for path, data in tree(shared_work.packed).items() if not path.endswith("manifest.json")}
    assert tokens == expected
    choice = read_manifest(tmp_path / "zh" / "train", "packed", "z2a pack")["encoder"]
    assert (choice["asked"], choice["got"], choice["reason"]) == (name, name, "as asked")
    assert choice["parity"]["documents"] == 3 * writer.SAMPLE_DOCUMENTS - (64 - 40)  # `letters` has 40 documents


def test_a_fallback_is_printed_and_recorded(shared_work, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "numba" else find(name))
    pack_corpus(shared_work.corpus, shared_work.tokenizer, tmp_path, PackOptions(encoder=EncoderConfig("fastokens")))
    assert "the encoder fastokens cannot be used, so numba is used" in capsys.readouterr().err
    choice = read_manifest(tmp_path / "novels" / "valid", "packed", "z2a pack")["encoder"]
    assert "fastokens is not installed" in choice["reason"]


def test_another_encoder_packs_nothing_again(shared_work, tmp_path):
    first = pack_corpus(shared_work.corpus, shared_work.tokenizer, tmp_path)
    again = pack_corpus(
        shared_work.corpus, shared_work.tokenizer, tmp_path, PackOptions(encoder=EncoderConfig("numba"))
    )
    assert again == first
