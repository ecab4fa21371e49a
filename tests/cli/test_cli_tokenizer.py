"""`z2a tokenizer …` as a person types it: what is printed, refused, repaired, and how it ends."""

import io
import json
import random
import re
import shutil

import pytest

from zero2all.common.files import read_json
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.stage import readable

SYLLABLES = ["ka", "lo", "mi", "ter", "vun", "es", "or", "pi", "shan", "dre", "天地", "玄黄", "宇宙", "洪荒"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(0)
    words = ["the", "cat", *("".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(200))]
    path.write_text("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def work(text, tmp_path_factory):
    from zero2all.cli import main

    work = tmp_path_factory.mktemp("tokenizer-cli") / "work"
    assert main(["tokenizer", "train", "--work", str(work), "--text", str(text), "--vocab-size", "340"]) == 0
    return work


def test_train_on_text_files_needs_no_corpus_and_does_nothing_twice(work, text, z2a):
    made = (work / "tokenizer/manifest.json").stat().st_mtime_ns
    out = z2a.done("tokenizer", "train", "--work", work, "--text", text, "--vocab-size", "340", "--threads", "1")
    assert out.startswith(f"{work / 'tokenizer'}: bpe, 340 token ids from 46.3 KB of text, fingerprint ")
    assert (work / "tokenizer/manifest.json").stat().st_mtime_ns == made


def test_another_kind_is_a_flag_away_and_what_follows_from_normalisation_is_said(text, z2a, tmp_path):
    words = ["tokenizer", "train", "--work", tmp_path, "--text", text, "--vocab-size", "360", "--kind"]
    ended = z2a(*words, "hf-bbpe", "--normalise", "nfkc")
    assert (ended.code, ": hf-bbpe, 360 token ids" in ended.out) == (0, True), ended
    assert "NFKC loses distinctions" in ended.err
    assert "nfkc: NFKC loses" in z2a.done("tokenizer", "show", "--work", tmp_path)
    assert "`z2a tokenizer import FILE.model`" in z2a.refused(2, *words, "sentencepiece")
    absent = z2a.refused(3, "tokenizer", "train", "--work", tmp_path, "--text", tmp_path / "absent.txt")
    assert "absent.txt does not exist" in absent


def test_every_field_of_the_section_can_be_set(text, z2a, tmp_path):
    words = ["tokenizer", "train", "--work", tmp_path, "--text", text, "--vocab-size", "340", "--kind", "hf-bbpe"]
    z2a.done(*words, "--tokenizer.specials.reserved", "2", "--tokenizer.specials.extra", "['<|tool|>']")
    assert list(load_tokenizer(tmp_path / "tokenizer").control)[-2:] == ["<|reserved_1|>", "<|tool|>"]
    said = z2a.refused(2, *words, "--tokenizer.specials.extra", "['<|pad|>', '<|tool']", "--max-memory", "lots")
    assert "specials.extra[0]" in said
    assert "tokenizer.max_memory: got 'lots', expected an amount such as 4GB" in said
    assert "reads the config's tokenizer section only, not `optim`" in z2a.refused(2, *words, "--optim.lr_max", "1")


def test_bad_bytes_nul_and_control_strings_are_repaired_and_counted(text, z2a, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(text.read_bytes() + b"\nNUL \0 and \xff\xfe bytes <|end_of_text|> <|pad|>\n")
    out = z2a.done("tokenizer", "train", "--work", tmp_path, "--text", bad, "--vocab-size", "340")
    assert "repaired: 1 document with invalid UTF-8" in out
    assert "removed from the text: 2 strings that spell a control token" in out


def test_a_memory_limit_that_cannot_hold_the_work_is_refused(text, z2a, tmp_path):
    words = ["tokenizer", "train", "--work", tmp_path, "--text", text, "--vocab-size", "340", "--max-memory"]
    assert "memory" in z2a(*words, "1MB").err
    assert "may need up to" in z2a.refused(3, *words, "10MB", "--kind", "hf-bbpe")
    z2a.done(*words, "10MB", "--kind", "hf-bbpe", "--ignore-memory")


def test_extend_writes_a_larger_tokenizer_and_says_what_to_do_next(work, text, z2a, tmp_path):
    out = z2a.done("tokenizer", "extend", "--work", work, "--pieces", r"\squantum", "量子", "--out", tmp_path / "new")
    new = load_tokenizer(tmp_path / "new")
    assert [len(new.encode_text(piece)) for piece in (" quantum", "量子")] == [1, 1]
    assert "340 ids before" in out
    assert f"z2a import FOLDER --tokenizer {tmp_path / 'new'} --resize-embeddings" in out
    field = tmp_path / "field.txt"
    field.write_text("quantum entanglement " * 50)
    words = ["tokenizer", "extend", "--tokenizer", tmp_path / "new", "--from-text", field]
    assert z2a(*words, "--vocab-size", "360", "--out", tmp_path / "larger").code == 0
    assert load_tokenizer(tmp_path / "larger").vocab_size == 360


def test_extend_does_not_replace_what_data_and_runs_were_made_with(work, z2a, tmp_path):
    copy = shutil.copytree(work, tmp_path / "copy")
    (copy / "packed").mkdir()
    words = ["tokenizer", "extend", "--work", copy, "--pieces", "量子"]
    said = z2a.refused(2, *words)
    assert [words for words in ("packed in", "--out, or add --replace") if words not in said] == []
    assert z2a(*words, "--replace").code == 0
    assert load_tokenizer(copy / "tokenizer").vocab_size > 340
    assert z2a("tokenizer", "extend", "--work", copy).code == 2
    assert z2a("tokenizer", "extend", "--work", copy, "--from-text", "x").code == 2


def test_show_tells_what_the_tokenizer_is(work, z2a):
    out = z2a("tokenizer", "show", "--work", work).out
    assert out.startswith(f"{work / 'tokenizer'}: bpe, fingerprint ")
    assert "340: 14 control tokens and 326 pieces" in out
    assert "a model pads its rows to 384" in out
    assert "␣" in out, "spaces of pieces are visible"
    assert "pattern     qwen2" in out
    assert "none: every text comes back byte for byte" in out
    facts = json.loads(z2a("tokenizer", "show", "--work", work, "--json").out)
    assert (facts["control"]["<|end_of_text|>"], facts["text_reaches_control"]) == (1, [])
    assert facts["fingerprint"] == read_json(work / "tokenizer/manifest.json")["fingerprint"]


def piped(monkeypatch, data: bytes):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_encode_reads_the_line_a_file_or_a_pipe(work, z2a, tmp_path, monkeypatch):
    (tmp_path / "t.txt").write_text("the cat")
    expected = z2a("tokenizer", "encode", "--work", work, "the cat", "--ids").out
    assert z2a("tokenizer", "encode", "--work", work, "--file", tmp_path / "t.txt", "--ids").out == expected
    for words in ([], ["-"]):
        piped(monkeypatch, b"the cat")
        assert z2a("tokenizer", "encode", "--work", work, "--ids", *words).out == expected
    piped(monkeypatch, b"bad \xff byte")
    ended = z2a("tokenizer", "encode", "--work", work, "--json")
    assert "1 bytes are not UTF-8" in ended.err
    shown = json.loads(ended.out)
    assert shown["tokens"] == len(shown["pieces"])
    assert z2a("tokenizer", "encode", "--work", work, "x", "--file", tmp_path / "t.txt").code == 2
    assert z2a("tokenizer", "encode", "--work", work, "--file", tmp_path / "absent").code == 3


def test_pieces_are_shown_on_one_line_and_bytes_with_one_backslash(work, z2a):
    shown = [readable(piece) for piece in (b"\xc3", " 天".encode(), b"\n\n", b"\x1b")]
    assert shown == [r"\xc3", " 天", r"\n\n", r"\x1b"]
    out = z2a.done("tokenizer", "encode", "--work", work, "the 天地 cat", "--colour")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert (plain.splitlines()[0], out.count("\x1b[30;")) == ("the 天地 cat", int(plain.splitlines()[1].split()[0]))
    assert "\x1b" not in z2a.done("tokenizer", "encode", "--work", work, "the")


def test_decode_reads_ids_from_the_line_a_file_or_a_pipe(work, z2a, tmp_path, monkeypatch):
    ids = z2a("tokenizer", "encode", "--work", work, "the cat 天", "--ids").out
    assert z2a("tokenizer", "decode", "--work", work, *ids.split()).out == "the cat 天\n"
    (tmp_path / "ids.json").write_text(json.dumps([int(word) for word in ids.split()]))
    assert z2a("tokenizer", "decode", "--work", work, "--file", tmp_path / "ids.json").out == "the cat 天\n"
    piped(monkeypatch, b"1 " + ids.encode())
    shown = z2a("tokenizer", "decode", "--work", work, "--json").out
    assert json.loads(shown) == {"text": "<|end_of_text|>the cat 天"}
    piped(monkeypatch, b"one two")
    assert "`one` is not a token id" in z2a.refused(2, "tokenizer", "decode", "--work", work)


def test_eval_prints_tables_and_writes_json(trained_workspace, tmp_path, z2a):
    words = ["tokenizer", "eval", "--work", trained_workspace.root, "--json", tmp_path / "eval.json"]
    shown = z2a.done(*words, "--against", trained_workspace.tokenizer, "--limit", "1MB")
    assert [words for words in ("zh bytes/token", "Junk pieces") if words not in shown] == []
    assert set(json.loads((tmp_path / "eval.json").read_text())["text"]["channels"]) == {"zh", "en"}
    said = z2a.refused(2, "tokenizer", "eval", "--work", trained_workspace.root, "--limit", "much")
    assert "--limit is 'much'; expected an amount of text such as 20MB" in said
