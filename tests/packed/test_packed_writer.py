"""Packing: the contract on disk, and that whatever happens, half of it is never taken for the whole."""

import contextlib
import importlib.util
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zero2all.cli import main
from zero2all.common.errors import BadInputError, RunLockedError
from zero2all.common.manifest import read_manifest, verify_files
from zero2all.common.records import iter_records, training_text
from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.packed import writer
from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.pieces import cut_part
from zero2all.packed.shard_format import open_split, packed_sources, token_dtype
from zero2all.packed.writer import PackOptions, pack_corpus, writing_to
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.encoders import EncoderConfig
from zero2all.tokenizer.stage import train_on_corpus

VOCAB_SIZE = 400
SOURCES = ("novels", "letters", "zh")


def pack(work, **options):
    return pack_corpus(work.corpus, work.tokenizer, work.packed, PackOptions(**options))


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("source", "channel"), [("novels", "en"), ("zh", "zh")])
def test_a_document_is_its_tokens_between_begin_and_end_and_the_manifest_counts_them(shared_work, source, channel):
    tokenizer = load_tokenizer(shared_work.tokenizer)
    split = open_split(shared_work.packed, source, "train")
    tokens = np.fromfile(split.folder / "tokens-00000.bin", dtype="<u2")
    starts = np.fromfile(split.folder / "docs-00000.idx", dtype="<u8")
    texts = [training_text(record) for record in iter_records(shared_work.corpus, source, "train")]
    assert starts[0] == 0
    for text, document in zip(texts, np.split(tokens, starts[1:].astype(int)), strict=True):
        assert document.tolist() == [tokenizer.begin_id, *tokenizer.encode_text(text), tokenizer.end_id]
        assert tokenizer.decode(document.tolist()) == text
    manifest = split.manifest
    assert manifest["tokenizer"] == tokenizer.fingerprint
    assert (manifest["channel"], manifest["dtype"], manifest["vocab_size"]) == (channel, "<u2", tokenizer.vocab_size)
    assert manifest["documents"] == len(texts)
    assert manifest["tokens"] == split.tokens == len(tokens)
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert split.bytes_per_token == manifest["text_bytes"] / manifest["tokens"]
    assert sorted(manifest["files"]) == ["docs-00000.idx", "gids-00000.bin", "tokens-00000.bin"]
    assert verify_files(split.folder, manifest) == []


def test_a_vocabulary_beyond_16_bits_is_packed_wide(work):
    assert token_dtype(65536) == np.dtype("<u2")
    before = open_split(work.packed, "zh", "train").read(0, 50).tolist()
    path = work.tokenizer / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"piece{number}": number for number in range(VOCAB_SIZE, 65537)}
    path.write_text(json.dumps(content))
    (work.tokenizer / "manifest.json").unlink()  # a tokenizer from elsewhere
    pack(work)
    split = open_split(work.packed, "zh", "train")
    assert (split.manifest["vocab_size"], split.shards[0].dtype) == (65537, np.dtype("<u4"))
    assert split.manifest["files"]["tokens-00000.bin"]["bytes"] == 4 * split.tokens
    assert split.read(0, 50).tolist() == before


def test_shards_are_closed_between_documents_and_read_across_their_borders(work):
    begin = load_tokenizer(work.tokenizer).begin_id
    whole = open_split(work.packed, "novels", "train")
    tokens = whole.read(0, whole.tokens)
    pack(work, shard_tokens=500)
    split = open_split(work.packed, "novels", "train")
    assert len(split.shards) > 5
    assert all(500 <= length < 800 for length in split.shards.lengths[:-1])
    for number, shard in enumerate(split.shards):
        starts = np.fromfile(split.folder / f"docs-{number:05d}.idx", dtype="<u8")
        assert starts.tolist() == np.flatnonzero(shard == begin).tolist()
    assert split.read(0, split.tokens).tolist() == tokens.tolist()
    gids = [record["gid"] for record in iter_records(work.corpus, "novels", "train")]
    assert [split.gid_of(document) for document in range(len(gids))] == gids
    rng = random.Random(0)
    for _ in range(50):
        start = rng.randrange(split.tokens)
        count = rng.randint(0, split.tokens - start)
        assert split.read(start, count).tolist() == tokens[start : start + count].tolist()
    with pytest.raises(IndexError, match="beyond"):
        split.read(split.tokens - 3, 4)


def test_packing_again_writes_only_what_has_changed(work, texts, rebuild):
    before = times(work.packed)
    assert sorted(pack(work)) == sorted(f"{name}/{split}" for name in SOURCES for split in ("train", "valid"))
    assert times(work.packed) == before
    rebuild(work, {**texts, "zh": texts["zh"][:60]}, {"novels": "stories", "letters": "en", "zh": "zh"})
    pack(work)
    assert open_split(work.packed, "zh", "train").manifest["documents"] < 60
    assert open_split(work.packed, "novels", "train").channel == "stories"
    assert times(work.packed / "letters").items() <= before.items()
    rebuild(work, {"zh": texts["zh"]})
    pack(work)
    assert packed_sources(work.packed) == ["zh"]


def flip(path, at=10):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_whatever_is_damaged_is_found_by_packing_again_and_mended_with_its_best_fit_index(work, tree, capsys):
    pack(work, best_fit=(32,))
    before, untouched = tree(work.packed), times(work.packed / "novels/valid")
    flipped = ("letters/train/tokens-00000.bin", "letters/valid/docs-00000.idx", "zh/valid/gids-00000.bin")
    for name in flipped:
        flip(work.packed / name)
    (work.packed / "novels/train/tokens-00000.bin").unlink()
    flip(work.packed / "zh/train/best-fit-32/starts.u64")
    pack(work)
    assert tree(work.packed) == before
    assert times(work.packed / "novels/valid") == untouched
    said = capsys.readouterr().err
    for name in flipped:
        folder, file = name.rsplit("/", 1)
        assert re.search(rf"{file} has changed .*crc32c differs.*{folder} is written again", said), said


def test_a_changed_corpus_shard_is_refused_until_the_corpus_is_built_again(shared_work, work, texts, rebuild, tree):
    shard = work.corpus / "letters/train/part-00000.jsonl"
    content = shard.read_bytes()
    at = content.index(b"ter") + 1  # inside a text: it stays JSON
    shutil.rmtree(work.packed)
    flip(shard, at)
    for _ in range(2):  # what was made of it is not taken for good the second time
        with pytest.raises(BadInputError, match=r"letters/train/part-00000\.jsonl has changed .*corpus build` again"):
            pack(work, piece_bytes=3000)
    assert not (work.packed / "letters/train").exists()
    rebuild(work, texts)
    assert shard.read_bytes() == content
    pack(work, piece_bytes=3000)
    assert tree(work.packed) == tree(shared_work.packed)
    shutil.rmtree(work.packed)
    shard.write_bytes(content[:-100])
    with pytest.raises(BadInputError, match=r"letters/train/part-00000\.jsonl has \d+ bytes, its manifest says \d+"):
        pack(work)


def test_while_data_is_packed_anew_the_old_and_the_new_are_not_mixed(work):
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=380))
    part = work.corpus / "zh/train/part-00000.jsonl"
    whole = part.read_bytes()
    part.write_bytes(whole[:-20] + b"." * 19 + b"\n")  # the last source cannot be packed
    with pytest.raises(BadInputError, match=r"zh/train/part-00000\.jsonl is damaged: the line at byte \d+ is not JSON"):
        pack(work)
    with pytest.raises(BadInputError, match=r"no finished packed data.*z2a pack"):
        packed_sources(work.packed)
    assert pieces(work), "the sources before it are kept"
    part.write_bytes(whole)
    pack(work)
    assert {open_split(work.packed, name, "train").manifest["vocab_size"] for name in SOURCES} == {380}


def test_a_split_of_another_version_is_refused_by_name(work):
    manifest = work.packed / "zh/train/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(BadInputError, match="packed format 99"):
        open_split(work.packed, "zh", "train")


@pytest.mark.parametrize("shard_format", ["jsonl.zst", "parquet", "txt"])
def test_every_format_of_the_corpus_packs_to_the_same_tokens(shared_work, work, shard_format):
    options = BuildOptions(valid_share=0.1, format=shard_format, rules="none")
    build_corpus(work.corpus, [Source("zh", work.raw / "zh.jsonl", "zh")], options)
    pack(work)
    ours, theirs = (open_split(one.packed, "zh", "train") for one in (work, shared_work))
    assert ours.read(0, ours.tokens).tolist() == theirs.read(0, theirs.tokens).tolist()
    assert ours.manifest["text_bytes"] == theirs.manifest["text_bytes"]
    assert ours.gid_of(5) == (None if shard_format == "txt" else theirs.gid_of(5))


def test_a_corpus_shard_is_cut_behind_lines_and_nothing_is_read_twice(tmp_path):
    part = tmp_path / "part-00000.jsonl"
    data = b"".join([b"x" * size + b"\n" for size in (5, 90, 1, 40, 0, 30)])
    part.write_bytes(data)
    size = len(data)
    for piece_bytes in range(1, size + 2):
        cuts = cut_part(part, size, piece_bytes)
        assert [start for start, _ in cuts[1:]] == [end for _, end in cuts[:-1]]
        assert (cuts[0][0], cuts[-1][1]) == (0, size)
        assert all(end > start and data[end - 1 : end] == b"\n" for start, end in cuts)


KILLED_PACK = """
import random, sys
from pathlib import Path
from tests.moments import signal_when
from zero2all.common.engine import EngineConfig
from zero2all.packed.writer import PackOptions, pack_corpus
if __name__ == "__main__":
    work, count = Path(sys.argv[1]), int(sys.argv[3])
    pieces = lambda: [each for each in work.glob("packed/.build/*/piece-*") if ".partial-" not in each.name]
    signal_when(lambda: len(pieces()) >= count, after=random.uniform(0, 0.01))
    options = PackOptions(piece_bytes=2000)  # so that there is something to interrupt
    pack_corpus(work / "corpus", work / "tokenizer", work / "packed", options, EngineConfig(workers=int(sys.argv[2])))
"""


def test_packing_killed_at_any_moment_leaves_no_half_and_ends_with_the_same_bytes(shared_work, work, tree, monkeypatch):
    """Neither the pieces nor the number of workers show in what is written."""
    wanted = tree(shared_work.packed)
    shutil.rmtree(work.packed)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    interrupted, kept = 0, set()
    for kill in range(4):
        words = [str(work.root), "2" if kill == 3 else "1", str(len(kept) + 5)]
        interrupted += subprocess.run([sys.executable, "-c", KILLED_PACK, *words]).returncode == -signal.SIGKILL
        if (work.packed / ".build").is_dir():
            assert kept <= pieces(work), "what was done before the kill is not done again"
            kept = pieces(work)
        if not (work.packed / "report.json").exists():
            with pytest.raises(BadInputError, match="no finished packed data"):
                packed_sources(work.packed)
        # .build is left out: a worker that outlives the kill by a moment may still clean up there
        parts = [path for path in work.packed.iterdir() if path.is_dir() and path.name != ".build"]
        finished = {f"{part.name}/{name}": data for part in parts for name, data in tree(part).items()}
        whole = {name: data for name, data in finished.items() if ".partial-" not in name}
        assert whole == {name: wanted[name] for name in whole}  # what stands under its name is whole
    assert interrupted >= 2
    pack(work, piece_bytes=2000)
    assert tree(work.packed) == wanted


def pieces(work):
    found = set()
    with contextlib.suppress(FileNotFoundError):  # committed meanwhile
        for path in (work.packed / ".build").glob("*/piece-*"):
            if ".partial-" not in path.name:
                found.add((path.name, path.parent.name, path.stat().st_ino))
    return found


def test_a_second_packing_of_the_same_workspace_is_refused(work):
    with writing_to(work.packed), pytest.raises(RunLockedError, match="Another process is packing"):
        pack(work)


def test_best_fit_indexes_are_built_when_asked_and_go_with_their_split(work, texts, rebuild):
    pack(work, best_fit=(32, 64))
    assert open_best_fit(open_split(work.packed, "zh", "train"), 64).manifest["rows"] > 10
    before = times(work.packed)
    pack(work, best_fit=(32, 64))
    assert times(work.packed) == before
    rebuild(work, {**texts, "zh": texts["zh"][:60]})
    pack(work)
    assert sorted(path.parent.name for path in work.packed.glob("*/train/best-fit-64")) == ["train"] * 2
    with pytest.raises(BadInputError, match=r"z2a pack --best-fit 64"):
        open_best_fit(open_split(work.packed, "zh", "train"), 64)


def test_text_that_the_tokenizer_cannot_spell_is_counted_and_told(work, texts, tmp_path, capsys):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = tmp_path / "english.model"
    settings = {"vocab_size": 60, "model_type": "bpe", "minloglevel": 2, "hard_vocab_limit": False}
    settings |= {"sentence_iterator": iter(texts["novels"]), "character_coverage": 1.0}
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(model_writer=file, **settings)
    assert main(["tokenizer", "import", str(model), "--work", str(work.root), "--replace"]) == 0
    assert "no byte pieces" in capsys.readouterr().err
    assert main(["pack", "--work", str(work.root)]) == 0
    shown = capsys.readouterr()
    tokenizer = load_tokenizer(work.tokenizer)
    for name in SOURCES:
        ids = [tokenizer.encode_text(training_text(record)) for record in iter_records(work.corpus, name, "train")]
        unknown = sum(each.count(tokenizer.unknown_id) for each in ids)
        assert open_split(work.packed, name, "train").manifest["unknown_tokens"] == unknown
        assert (unknown > 0) == (name == "zh") == (f"of the tokens of {name}/train are <unk>" in shown.err)
        assert (f"  {unknown:,} <unk>" in shown.out) == (name == "zh")
    assert load_tokenizer(work.tokenizer).unknown_id == 0


@pytest.mark.parametrize("name", ["numba", "fastokens"])
def test_tokens_do_not_depend_on_the_encoder_and_another_one_packs_nothing_again(name, shared_work, tmp_path, tree):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    options = PackOptions(encoder=EncoderConfig(name, strict=True))
    first = pack_corpus(shared_work.corpus, shared_work.tokenizer, tmp_path, options)
    ours, theirs = tree(tmp_path), tree(shared_work.packed)
    assert ours.keys() == theirs.keys()
    assert all(data == theirs[path] for path, data in ours.items() if not path.endswith("manifest.json"))
    choice = read_manifest(tmp_path / "zh" / "train", "packed", "z2a pack")["encoder"]
    assert (choice["asked"], choice["got"], choice["reason"]) == (name, name, "as asked")
    assert choice["parity"]["documents"] == 3 * writer.SAMPLE_DOCUMENTS - (64 - 40)  # `letters` has 40 documents
    assert pack_corpus(shared_work.corpus, shared_work.tokenizer, tmp_path) == first


def test_a_fallback_is_printed_and_recorded(shared_work, tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name != "numba" else find(name))
    pack_corpus(shared_work.corpus, shared_work.tokenizer, tmp_path, PackOptions(encoder=EncoderConfig("fastokens")))
    assert "the encoder fastokens cannot be used, so numba is used" in capsys.readouterr().err
    choice = read_manifest(tmp_path / "novels" / "valid", "packed", "z2a pack")["encoder"]
    assert "fastokens is not installed" in choice["reason"]
