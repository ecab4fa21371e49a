"""Packing: the contract on disk, and that whatever happens, half of it is never taken for the whole."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from zero2all.common.errors import BadInputError
from zero2all.common.manifest import verify_files
from zero2all.common.records import iter_records, training_text
from zero2all.packed import writer
from zero2all.packed.layout import open_split, packed_sources, token_dtype
from zero2all.packed.writer import pack_corpus
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.stage import train_on_corpus

VOCAB_SIZE = 400


def pack(work):
    return pack_corpus(work.corpus, work.tokenizer, work.packed)


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_ids_are_16_bits_wide_up_to_65536_of_them_and_32_beyond():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")


def test_a_document_is_its_tokens_between_begin_and_end_and_decodes_to_its_text(shared_work):
    tokenizer = load_tokenizer(shared_work.tokenizer)
    for source in ("novels", "zh"):
        folder = shared_work.packed / source / "train"
        tokens = np.fromfile(folder / "tokens-00000.bin", dtype="<u2")
        starts = np.fromfile(folder / "docs-00000.idx", dtype="<u8")
        texts = [training_text(record) for record in iter_records(shared_work.corpus, source, "train")]
        assert starts[0] == 0
        assert len(starts) == len(texts)
        for text, document in zip(texts, np.split(tokens, starts[1:].astype(int)), strict=True):
            assert document[0] == tokenizer.begin_id
            assert document[-1] == tokenizer.end_id
            assert document[1:-1].tolist() == tokenizer.encode_text(text)
            assert tokenizer.decode(document.tolist()) == text


def test_manifest_counts_what_is_there_and_knows_every_file(shared_work):
    tokenizer = load_tokenizer(shared_work.tokenizer)
    split = open_split(shared_work.packed, "zh", "train")
    texts = [training_text(record) for record in iter_records(shared_work.corpus, "zh", "train")]
    manifest = split.manifest
    assert manifest["tokenizer"] == tokenizer.fingerprint
    assert (manifest["channel"], manifest["dtype"], manifest["vocab_size"]) == ("zh", "<u2", tokenizer.vocab_size)
    assert manifest["documents"] == len(texts)
    assert manifest["tokens"] == split.tokens == sum(len(tokenizer.encode_text(text)) + 2 for text in texts)
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert split.bytes_per_token == manifest["text_bytes"] / manifest["tokens"]
    assert sorted(manifest["files"]) == ["docs-00000.idx", "tokens-00000.bin"]
    assert verify_files(split.folder, manifest) == []


def test_a_vocabulary_beyond_16_bits_is_packed_wide(work):
    before = open_split(work.packed, "zh", "train").read(0, 50).tolist()
    path = work.tokenizer / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"piece{number}": number for number in range(VOCAB_SIZE, 65537)}
    path.write_text(json.dumps(content))
    (work.tokenizer / "manifest.json").unlink()  # a tokenizer from elsewhere
    pack(work)
    split = open_split(work.packed, "zh", "train")
    assert split.manifest["vocab_size"] == 65537
    assert split.shards[0].dtype == np.dtype("<u4")
    assert split.manifest["files"]["tokens-00000.bin"]["bytes"] == 4 * split.tokens
    assert split.read(0, 50).tolist() == before


def test_shards_are_closed_between_documents_and_read_across_their_borders(work, monkeypatch):
    whole = open_split(work.packed, "novels", "train")
    tokens = whole.read(0, whole.tokens)
    monkeypatch.setattr(writer, "SHARD_TOKENS", 500)
    pack(work)
    split = open_split(work.packed, "novels", "train")
    assert len(split.shards) > 5
    assert all(500 <= len(shard) < 800 for shard in split.shards[:-1])
    for number, shard in enumerate(split.shards):
        starts = np.fromfile(split.folder / f"docs-{number:05d}.idx", dtype="<u8")
        begin = load_tokenizer(work.tokenizer).begin_id
        assert starts.tolist() == np.flatnonzero(shard == begin).tolist()
    assert split.read(0, split.tokens).tolist() == tokens.tolist()
    rng = random.Random(0)
    for _ in range(50):
        start = rng.randrange(split.tokens)
        count = rng.randint(0, split.tokens - start)
        assert split.read(start, count).tolist() == tokens[start : start + count].tolist()
    with pytest.raises(IndexError, match="beyond"):
        split.read(split.tokens - 3, 4)


def test_packing_again_touches_nothing(work):
    before = times(work.packed)
    result = pack(work)
    assert times(work.packed) == before
    assert sorted(result) == sorted(
        f"{name}/{split}" for name in ("novels", "letters", "zh") for split in ("train", "valid")
    )


def test_a_new_tokenizer_repacks_everything(work):
    before = open_split(work.packed, "zh", "train").manifest
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=380))
    pack(work)
    after = open_split(work.packed, "zh", "train").manifest
    assert after["tokenizer"] != before["tokenizer"]
    assert after["vocab_size"] == 380


def test_a_changed_source_is_repacked_and_the_others_are_left_alone(work, texts, rebuild):
    others = times(work.packed / "novels")
    rebuild(work, {**texts, "zh": texts["zh"][:60]})
    pack(work)
    assert open_split(work.packed, "zh", "train").manifest["documents"] < 60
    assert times(work.packed / "novels") == others


def test_a_source_given_another_channel_takes_it_along(work, texts, rebuild):
    rebuild(work, texts, {"novels": "stories", "letters": "en", "zh": "zh"})
    pack(work)
    assert open_split(work.packed, "novels", "train").channel == "stories"


def test_a_source_that_left_the_corpus_is_no_longer_read(work, texts, rebuild):
    rebuild(work, {"zh": texts["zh"]})
    pack(work)
    assert packed_sources(work.packed) == ["zh"]


@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_damaged_shard_is_named_and_packing_again_mends_it(work, tree, damage):
    before = tree(work.packed)
    shard = work.packed / "letters/train/tokens-00000.bin"
    if damage == "delete":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadInputError, match=r"letters/train/tokens-00000\.bin is damaged.*z2a pack"):
        open_split(work.packed, "letters", "train")
    pack(work)
    assert tree(work.packed) == before


def test_without_a_finished_packing_there_is_no_data(work):
    (work.packed / "report.json").unlink()
    with pytest.raises(BadInputError, match=r"no finished packed data.*z2a pack"):
        packed_sources(work.packed)


def test_while_data_is_packed_anew_the_old_and_the_new_are_not_mixed(work):
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=380))
    part = work.corpus / "zh/train/part-00000.jsonl"
    part.write_bytes(part.read_bytes()[:-20])  # the last source cannot be packed; those before it are
    with pytest.raises(BadInputError, match="part-00000"):
        pack(work)
    assert open_split(work.packed, "novels", "train").manifest["vocab_size"] == 380
    with pytest.raises(BadInputError, match="no finished packed data"):
        packed_sources(work.packed)


def test_a_split_of_another_version_is_refused_by_name(work):
    manifest = work.packed / "zh/train/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(BadInputError, match="packed format 99"):
        open_split(work.packed, "zh", "train")


SLOW_PACK = """
import sys
from pathlib import Path
from zero2all.packed import writer
writer.BATCH_DOCUMENTS = 1  # so that there is something to interrupt
work = Path(sys.argv[1])
print("go", flush=True)
writer.pack_corpus(work / "corpus", work / "tokenizer", work / "packed")
"""


def test_packing_killed_at_any_moment_leaves_no_half_and_finishes_with_the_same_bytes(shared_work, work, tree):
    wanted = tree(shared_work.packed)
    shutil.rmtree(work.packed)
    rng = random.Random(4)
    interrupted = 0
    for kill in range(5):
        process = subprocess.Popen([sys.executable, "-c", SLOW_PACK, str(work.root)], stdout=subprocess.PIPE)
        process.stdout.readline()
        if kill < 3:
            deadline = time.monotonic() + 10
            while not list(work.packed.glob("*/*.partial-*")) and process.poll() is None:
                assert time.monotonic() < deadline
        else:
            time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        interrupted += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if not (work.packed / "report.json").exists():
            with pytest.raises(BadInputError, match="no finished packed data"):
                packed_sources(work.packed)
        finished = {name: data for name, data in tree(work.packed).items() if ".partial-" not in name}
        assert finished == {name: wanted[name] for name in finished}  # what stands under its name is whole
        for manifest in work.packed.glob("*/*/manifest.json"):
            if ".partial-" not in str(manifest):
                open_split(work.packed, manifest.parent.parent.name, manifest.parent.name)
    assert interrupted >= 2
    pack(work)
    assert tree(work.packed) == wanted
