"""The SentencePiece route: equal ids after conversion, clear errors from a library that aborts, nothing lost."""

import subprocess
import sys

import pytest
import tokenizers

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.manifest import read_manifest
from zero2all.tokenizer import CONTROL_TOKENS, load_tokenizer, train_tokenizer
from zero2all.tokenizer.config import SentencePieceConfig, TokenizerConfig
from zero2all.tokenizer.sentencepiece_kind import _failure

sentencepiece = pytest.importorskip("sentencepiece")

HARD = [
    "",
    " ",
    "  two  spaces ",
    "tab\tand\nline\r\nend\n",
    "<0x41><0xFF> <unk> <s>",
    "".join(CONTROL_TOKENS),
    "".join(f" {name}x" for name in CONTROL_TOKENS),
    "龘𠀀😀 e\u0301 \x00 \u3000",
]


def train(texts, folder, vocab_size=900, **options):
    settings = SentencePieceConfig(character_coverage=1.0, **options)
    return train_tokenizer(texts, vocab_size, folder, "inputs", kind="sentencepiece", sentencepiece=settings, threads=1)


@pytest.fixture(scope="module", params=[("bpe", False), ("unigram", False), ("bpe", True)], ids=str)
def trained(request, texts, tmp_path_factory):
    model_type, prefix = request.param
    folder = tmp_path_factory.mktemp("sp") / "tokenizer"
    train(texts, folder, model_type=model_type, add_dummy_prefix=prefix)
    return folder


def test_every_way_to_load_it_gives_the_ids_of_sentencepiece(trained, texts):
    own = sentencepiece.SentencePieceProcessor(model_file=str(trained / "sentencepiece.model"))
    ours = load_tokenizer(trained)
    raw = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    auto = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(trained)
    for text in [*texts[:60], *HARD]:
        expected = own.encode(text)
        assert ours.encode_text(text) == expected
        assert raw.encode(text).ids == expected
        assert auto(text)["input_ids"] == expected
        assert ours.decode(expected) == auto.decode(expected) == text
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (0, 1, 5)


def test_no_text_makes_a_control_id_and_a_piece_of_bytes_spelled_out_is_text(trained):
    tokenizer = load_tokenizer(trained)
    for text in HARD:
        assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text(text))
    spelled = tokenizer.encode_text("<0x41>")
    assert len(spelled) > 1
    assert tokenizer.decode(spelled) == "<0x41>"


def test_vocabulary_has_the_asked_size_and_the_manifest_says_how_it_was_made(trained):
    manifest = read_manifest(trained, "tokenizer", "")
    assert manifest["vocab_size"] == load_tokenizer(trained).vocab_size == 900
    assert manifest["tokenizer_kind"] == "sentencepiece"
    assert manifest["training"]["lines"] > 100
    assert "sentencepiece.model" in manifest["files"]


def test_what_sentencepiece_would_drop_is_cut_or_taken_out_and_counted(texts, tmp_path):
    given = [*texts, "长" * 5000, "bad \u2585 line with \0 NUL"]
    manifest = train(given, tmp_path / "t", max_sentence_length=4192)
    assert manifest["training"]["lines_cut"] == 1
    assert manifest["training"]["characters_left_out"] == 2


def test_vocabulary_beyond_the_text_is_refused_with_the_largest_size(texts, tmp_path):
    with pytest.raises(BadInputError, match=r"--vocab-size to (\d+) or less"):
        train(texts, tmp_path / "t", vocab_size=50_000)
    with pytest.raises(BadInputError, match=r"characters it must cover.*--vocab-size to more than \d+"):
        train(texts, tmp_path / "t", vocab_size=300)
    with pytest.raises(BadInputError, match="no text"):
        train([""], tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_or_aborted_library_is_a_clear_error():
    config = TokenizerConfig(kind="sentencepiece")
    assert "memory ran out" in str(_failure(-9, [], config))
    aborted = ["x.cc(45) Check failed: freq > 0", "*** Check failure stack trace: ***", "    @ 0xffff (unknown)"]
    assert "Check failed: freq > 0" in str(_failure(-6, aborted, config))
    assert "ended with code 7" in str(_failure(7, ["noise"], config))


def test_without_the_library_the_message_says_how_to_get_it(tmp_path):
    script = f"""
import sys
sys.modules["sentencepiece"] = None
from zero2all.tokenizer import train_tokenizer
from pathlib import Path
try:
    train_tokenizer(["text"], 900, Path({str(tmp_path / "t")!r}), "inputs", kind="sentencepiece")
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith(UsageError.__name__)
    assert "pip install sentencepiece" in said
