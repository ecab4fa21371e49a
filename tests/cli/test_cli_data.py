"""`z2a corpus …`, `z2a pack` and `z2a data …` as a person types them."""

import json

import pytest

from zero2all.cli import main


@pytest.fixture(scope="module")
def work(tmp_path_factory, raw):
    work = tmp_path_factory.mktemp("data") / "work"
    for command in (
        f"corpus build tales={raw / 'en.jsonl'}:en --valid-share 0.1",
        "tokenizer train --vocab-size 300",
        "pack --best-fit 64,32 --workers 1",
    ):
        assert main([*command.split(), "--work", str(work)]) == 0
    return work


def test_a_sample_is_shown_with_its_borders_and_its_raw_file(work, raw, z2a):
    out = z2a.done("data", "show", "--at", "3", "--data.seq_len", "256", "--work", work)
    assert out.startswith("position 3 (stage main); source tales, channel en, train; sample ")
    assert [words for words in (f"{raw / 'en.jsonl'}, item ", "<|end_of_text|>") if words not in out] == []
    ended = z2a("data", "show", "--source", "tales", "--sample", "1", "--data.seq_len", "23", "--work", work)
    assert "sample 1 of" in ended.out, "a length that does not divide the tokens of a step will do"
    assert z2a("data", "show", "--work", work).code == 2
    said = z2a.refused(2, "data", "show", "--source", "nope", "--work", work)
    assert [words for words in ("no packed source `nope`", "tales") if words not in said] == []


def test_the_figures_are_printed_and_written(work, tmp_path, z2a):
    words = ("data", "stats", "--tokens", "4000", "--data.seq_len", "64", "--work", work)
    out = z2a.done(*words, "--json", tmp_path / "stats.json")
    expected = ("best_fit 64", "best_fit 32", "concat 64", "a run of 4.0k tokens")
    assert [words for words in expected if words not in out] == []
    assert json.loads((tmp_path / "stats.json").read_text())["budget"]["tokens"] == 4000


def test_damage_is_named_with_exit_code_3(work, z2a):
    assert z2a("data", "verify", "--work", work).code == 0
    path = work / "packed/tales/train/tokens-00000.bin"
    sound = path.read_bytes()
    path.write_bytes(sound[:100] + bytes([sound[100] ^ 1]) + sound[101:])
    ended = z2a("data", "verify", "--work", work)
    path.write_bytes(sound)
    assert ended.code == 3
    assert f"1. {path} has changed since it was written" in ended.err


def test_data_goes_out_and_comes_in(work, tmp_path, z2a):
    out = z2a.done("data", "export", "--to", "megatron", "--out", tmp_path / "out", "--work", work)
    assert str(tmp_path / "out/tales.train.idx") in out
    prefix = tmp_path / "out/tales.train"
    out = z2a.done("data", "import", f"again={prefix}", "--from", "megatron", "--channel", "x", "--work", work)
    assert out.startswith("again/train: ")
    assert "channel x" in out
    assert z2a("data", "import", "again", "--from", "megatron", "--work", work).code == 2
    assert z2a("data", "export", "nothing", "--to", "numpy", "--out", tmp_path / "out", "--work", work).code == 2


@pytest.fixture(scope="module")
def corpus(raw, tmp_path_factory):
    """A corpus with a title over two lines, a long text, and texts that rules drop."""
    folder = tmp_path_factory.mktemp("corpus-words")
    rows = [json.loads(line) for line in (raw / "en.jsonl").read_text(encoding="utf-8").splitlines()][:30]
    rows[0] = {"title": "two\nlines \u202e", "text": rows[0]["text"]}
    rows += [{"text": "Total 12345 67890 " * 60}, {"text": rows[1]["text"]}]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = f"own={folder / 'own.jsonl'}:en"
    assert main(["corpus", "build", source, "--work", str(folder / "w"), "--valid-share", "0"]) == 0
    return folder / "w"


def test_show_cuts_texts_only_when_asked_or_on_a_terminal(corpus, z2a):
    whole = z2a("corpus", "show", "own", "--count", "1", "--work", corpus).out
    assert whole.startswith("══ own: training text {title}\\n{content}\n── gid 0  two")
    assert " … (" not in whole
    cut = z2a("corpus", "show", "own", "--count", "1", "--chars", "20", "--work", corpus).out
    _, heading, text, *_ = cut.splitlines()
    assert heading.isprintable(), "a title cannot break the line or command the terminal"
    assert len(text.partition(" … (")[0]) == 20
    assert "more characters; --chars" in text


def test_show_dropped_prints_what_the_rule_measured_and_show_finds_a_record_by_its_gid(corpus, z2a):
    digits = z2a("corpus", "show", "--dropped", "digits", "--work", corpus).out
    assert "══ own: 1 dropped by digits\n── gid 30, own.jsonl, byte " in digits
    assert [words for words in ("characters, digit_share 0.6667, prose_share ", " …\n") if words not in digits] == []
    cut = z2a("corpus", "show", "--dropped", "digits", "--chars", "5", "--work", corpus).out
    assert len(cut.splitlines()[2]) == len("12345 …")
    copies = z2a("corpus", "show", "--dropped", "duplicate", "--work", corpus).out
    assert "kept for it: gid 1\n" in copies
    assert z2a("corpus", "show", "--dropped", "mojibake", "--work", corpus).out == "mojibake dropped nothing.\n"
    assert z2a.done("corpus", "show", "--gid", "1", "--work", corpus).startswith("── gid 1  own, train")
    assert "No record with gid 30 was kept" in z2a.refused(2, "corpus", "show", "--gid", "30", "--work", corpus)
