"""Which text is trained on: shares by the text itself, the same in every format, and parts that lose nothing."""

import json
from fractions import Fraction

import pytest
import tokenizers

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json
from zero2all.corpus import BuildOptions, EngineConfig, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.tokenizer import TokenizerConfig
from zero2all.tokenizer.config import PRETOKEN_PATTERN
from zero2all.tokenizer.parts import corpus_parts, file_parts
from zero2all.tokenizer.sampling import belongs, parse_take, shares
from zero2all.tokenizer.stage import train_on_corpus, train_on_files

DOCUMENTS = 400


def build(folder, shard_format="jsonl"):
    sources = []
    for name in ("news", "wiki"):
        path = folder / f"{name}.jsonl"
        texts = [f"{name} document {n} 的 text, {n * 7919 % 1000} 个字。\nSecond line." for n in range(DOCUMENTS)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(Source(name, path, "zh"))
    options = BuildOptions(rules="none", valid_share=0.1, dedup=DedupConfig(near="off"), format=shard_format)
    build_corpus(folder / "corpus", sources, options, EngineConfig(workers=1))
    return folder / "corpus"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return build(tmp_path_factory.mktemp("take"))


def texts_of(parts):
    return [text for part in parts for text in part.texts()]


def test_share_is_close_nested_and_the_same_in_every_format(corpus, tmp_path):
    quarter, half = (set(texts_of(corpus_parts(corpus, {"news": share, "wiki": "0"})[0])) for share in ("1/4", "1/2"))
    assert quarter < half
    assert all(text.startswith("news") for text in half)
    assert 0.18 < len(quarter) / DOCUMENTS < 0.28
    for shard_format in ("jsonl.zst", "parquet", "txt"):
        (tmp_path / shard_format).mkdir()
        other = build(tmp_path / shard_format, shard_format)
        assert set(texts_of(corpus_parts(other, {"news": "1/4", "wiki": "0"})[0])) == quarter


def test_sources_that_are_not_named_are_taken_whole(corpus):
    texts = texts_of(corpus_parts(corpus, {"news": "0"})[0])
    everything = texts_of(corpus_parts(corpus, None)[0])
    assert sorted(texts) == sorted(text for text in everything if text.startswith("wiki"))
    assert belongs("any", Fraction(1))
    assert not belongs("any", Fraction(0))
    assert belongs("lone \ud800", Fraction(1, 2)) in (True, False)
    for part_bytes in (1, 100, 5_000):  # a part is whole records, once each
        parts, _ = corpus_parts(corpus, None, part_bytes)
        assert texts_of(parts) == everything
        assert len({part.name for part in parts}) == len(parts) > 2


def test_amount_is_turned_into_a_share_of_the_source_or_of_all(corpus):
    parts, taken = corpus_parts(corpus, {"news": "5KB"})
    assert 4000 < sum(len(text.encode()) for text in texts_of(parts) if text.startswith("news")) < 6000
    assert taken["news"]["asked"] == "5KB"
    assert taken["wiki"] == {"asked": "all", "share": "1", "about_bytes": taken["wiki"]["about_bytes"]}
    assert 8000 < sum(len(text.encode()) for text in texts_of(corpus_parts(corpus, "10KB")[0])) < 12000
    assert shares("1TB", {"a": 10, "b": 5}) == {"a": Fraction(1), "b": Fraction(1)}


def test_what_take_says_is_understood_or_refused():
    assert parse_take(" news=20/44 , wiki=2GB") == {"news": "20/44", "wiki": "2GB"}
    assert parse_take("2GB") == "2GB"
    for words in ("news=1/2,wiki", "=1/2", "a=1/2,a=1/3"):
        with pytest.raises(UsageError, match="--take"):
            parse_take(words)
    with pytest.raises(UsageError, match=r"'nwes', which is not a source. Did you mean `news`"):
        shares({"nwes": "1/2"}, {"news": 1})


def test_what_was_taken_stands_in_the_manifest_and_decides_whether_work_is_done(corpus, tmp_path):
    folder = tmp_path / "tokenizer"
    half = TokenizerConfig(vocab_size=300, kind="hf-bbpe", take={"news": "1/2"})
    assert train_on_corpus(corpus, folder, half)["taken"]["news"]["share"] == "1/2"
    made = (folder / "manifest.json").stat().st_mtime_ns
    train_on_corpus(corpus, folder, TokenizerConfig(vocab_size=300, kind="hf-bbpe", take={"news": "2/4"}, threads=1))
    assert (folder / "manifest.json").stat().st_mtime_ns == made, "the same share, and threads decide nothing"
    train_on_corpus(corpus, folder, TokenizerConfig(vocab_size=300, kind="hf-bbpe"))
    assert read_json(folder / "manifest.json")["taken"]["news"]["share"] == "1"


def test_parts_of_a_text_file_are_its_bytes_and_end_where_no_pre_token_does(tmp_path):
    path = tmp_path / "text.txt"
    text = "一行字,\n  indented\n\n\n\tmore   \nlast line 中文\r\n\u3000全角\n" * 200
    path.write_text(text, newline="")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKEN_PATTERN), "isolated")
    expected = [piece for piece, _ in split.pre_tokenize_str(text)]
    for part_bytes in (50, 1000, 1 << 20):
        found = texts_of(file_parts([path], part_bytes))
        assert "".join(found) == text
        assert [piece for block in found for piece, _ in split.pre_tokenize_str(block)] == expected
    assert len(file_parts([path], 50)) > 100


def test_text_files_train_a_tokenizer_and_bad_bytes_are_repaired_and_counted(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes("好 text\0 with NUL\n".encode() * 50 + b"\xff\xfe broken \xe4\xb8\n" + b"more text\n" * 50)
    manifest = train_on_files([path], tmp_path / "tokenizer", TokenizerConfig(vocab_size=285, kind="hf-bbpe"))
    assert manifest["text"]["documents_with_repaired_surrogates"] == 1
    assert manifest["taken"][str(path)]["about_bytes"] == path.stat().st_size
    with pytest.raises(BadInputError, match=r"nowhere.txt does not exist"):
        train_on_files([tmp_path / "nowhere.txt"], tmp_path / "t", TokenizerConfig())
    with pytest.raises(UsageError, match="--take chooses among the sources"):
        train_on_files([path], tmp_path / "t", TokenizerConfig(take="1/2"))
