"""Tokenizer files of others: the ids and texts of the reference implementations, and clear errors for other files."""

import base64

import pytest

from benchmarks.bpe_reference import reference_train
from zero2all.cli import main
from zero2all.common.errors import BadInputError, UsageError
from zero2all.tokenizer import load_tokenizer
from zero2all.tokenizer.extend import Extender
from zero2all.tokenizer.foreign import FAMILIES, TIKTOKEN_PATTERNS, read_foreign
from zero2all.tokenizer.stage import import_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")

HARD = ["", " ", "  two  spaces ", "tab\tand\nline\r\nend\n\n ", "<0x41><0xFF> <unk> <s></s>"]
HARD += ["<|endoftext|> <|im_start|>", "龘𠀀😀 e\u0301 \x00 \u3000 ▁ ▁▁a", "It's 12345 THEY'LL don't ﬁ ①²"]
HARD += ["aaaaaaaaaa abababababa"]


def train(texts, path, model_type="bpe", **options):
    settings = {"vocab_size": 500, "byte_fallback": True, "normalization_rule_name": "identity", "num_threads": 1}
    settings |= {"remove_extra_whitespaces": False, "minloglevel": 2, "model_type": model_type, **options}
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=file, **settings)
    return path


@pytest.fixture(scope="module")
def english(texts):
    return [line for text in texts for line in text.splitlines() if line.isascii()]


@pytest.fixture(scope="module")
def llama(english, tmp_path_factory):
    return train(english, tmp_path_factory.mktemp("sp") / "tokenizer.model", split_digits=True, character_coverage=1.0)


VARIANTS = {
    "unigram": {"model_type": "unigram", "hard_vocab_limit": False, "required_chars": "</>0123456789ABCDEFsx"},
    "without bytes": {"byte_fallback": False},
    "normalised": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "no prefix, own pieces": {"add_dummy_prefix": False, "user_defined_symbols": ["[MASK]", "lomi"]},
}


@pytest.mark.parametrize("name", ["llama", *VARIANTS])
def test_sentencepiece_model_gives_the_ids_and_texts_of_the_library(name, texts, llama, tmp_path):
    lines = [line for text in texts for line in text.splitlines()]
    path = llama if name == "llama" else train(lines, tmp_path / "m.model", **VARIANTS[name])
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = load_tokenizer(path)
    for text in [*texts[:40], *HARD, "a [MASK] kalomi[MASK]lomi"]:
        ids = reference.encode(text)
        assert ours.encode_text(text) == ids, text
        assert ours.decode(ids) == reference.decode(ids), text
    assert (ours.begin_id, ours.end_id, ours.vocab_size) == (1, 2, reference.vocab_size())
    assert set(ours.control) == {"<s>", "</s>"}


@pytest.fixture(scope="module")
def ranks(texts):
    pieces, _, _ = reference_train(texts[:12], 400)
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return {**ranks, b"abab unreachable": len(ranks), b"\xe9\x87\x8f": len(ranks) + 1}


def write_ranks(path, ranks):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def test_tiktoken_file_gives_the_ids_and_texts_of_tiktoken(texts, ranks, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    path = write_ranks(tmp_path / "own.tiktoken", ranks)
    for name, pattern in TIKTOKEN_PATTERNS.items():
        if name == "isolated-han":
            continue  # tiktoken's regular expressions have no && in a class
        content = import_tokenizer(path, tmp_path / name, name, ["<|endoftext|>", "<|im_start|>"])
        reference = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        ours = load_tokenizer(tmp_path / name)
        for text in [*texts[:40], *HARD]:
            ids = reference.encode_ordinary(text)
            assert ours.encode_text(text) == ids, (name, text)
            assert ours.decode(ids) == text
        assert (content["vocab_size"], ours.end_id, ours.control["<|im_start|>"]) == (404, 402, 403)


def test_families_are_known_by_their_number_of_pieces_and_leave_no_gap():
    assert len({family.pieces for family in FAMILIES}) == len(FAMILIES)
    qwen = FAMILIES[0]
    assert (qwen.control[151643], qwen.control[151645], max(qwen.control)) == ("<|endoftext|>", "<|im_end|>", 151850)
    assert (FAMILIES[1].control[128009], max(FAMILIES[1].control)) == ("<|eot_id|>", 128255)
    assert all(family.roles["eos_token"] in family.control.values() for family in FAMILIES)


def test_import_makes_the_tokenizer_of_a_workspace_and_other_folders_load_as_they_are(llama, folder, tmp_path, capsys):
    assert main(["tokenizer", "import", str(llama), "--work", str(tmp_path / "w")]) == 0
    assert "500 token ids" in capsys.readouterr().out
    imported = load_tokenizer(tmp_path / "w/tokenizer")
    assert imported.fingerprint == load_tokenizer(llama).fingerprint == load_tokenizer(llama.parent).fingerprint
    assert (tmp_path / "w/tokenizer/sentencepiece.model").read_bytes() == llama.read_bytes()
    import_tokenizer(folder, tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint == load_tokenizer(folder).fingerprint


def test_what_tokenizer_json_cannot_express_is_refused(llama, english, tmp_path):
    loose = {"byte_fallback": False, "hard_vocab_limit": False}
    for name, model_type, options, message in (
        ("w", "word", loose, "it is a word model; unigram and bpe are supported"),
        ("b", "unigram", {"hard_vocab_limit": False}, "it lacks characters of its control and byte pieces"),
        ("o", "bpe", {"user_defined_symbols": ["[MASK]"]}, "puts a space before every text"),
    ):
        with pytest.raises(BadInputError, match=message):
            load_tokenizer(train(english, tmp_path / f"{name}.model", model_type, **options))
    # Pieces are added to byte-level tokenizers only.
    with pytest.raises(BadInputError, match=r"is SentencePiece's\. Pieces can be added to byte-level BPE"):
        Extender(llama)
    with pytest.raises(BadInputError, match="is a Unigram model"):
        Extender(train(english, tmp_path / "unigram.model", **VARIANTS["unigram"]))


def test_files_of_an_unknown_kind_and_damaged_ones_are_refused(llama, ranks, tmp_path, capsys):
    path = tmp_path / "x.bin"
    for data, message in (
        (b"\x00\x01\x02", "not a tokenizer file of a known kind"),
        (b'{"a": 1}', "not a tokenizer file of a known kind"),
        (b"", "not a tokenizer file of a known kind"),
        (llama.read_bytes()[:5000], "is not a SentencePiece model"),
        (b"\n\n\n", "is not a SentencePiece model"),
        (b"QQ== 0\nQ? 1\n", "line 2 is not a new base64 piece"),
        (b"QQ== 0\nQQ== 1\n", "line 2 .*QQ== stood there before, with the rank 0"),
        (b"QQ== 0\nQg== 2\n", "without a gap"),
        (b"QQ== 0\nQg== 1\n", "no piece for 254 of the 256 bytes"),
    ):
        path.write_bytes(data)
        with pytest.raises(BadInputError, match=message):
            load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(BadInputError, match=f"{tmp_path}/tokenizer.json has no vocabulary"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    assert main(["tokenizer", "import", str(path), "--work", str(tmp_path / "work")]) == 3
    assert "no piece for 254" in capsys.readouterr().err
    assert not (tmp_path / "work").exists()
    listed = write_ranks(tmp_path / "own.tiktoken", ranks)
    with pytest.raises(UsageError, match=r"402 pieces, which is none of the .tiktoken files that are known"):
        load_tokenizer(listed)
    for given, pattern, specials, message in (
        (listed, "(", [], "nor a regular expression"),
        (listed, "cl100k_base", [], r"neither a name \(qwen2, isolated-han, cl100k, o200k\) nor .* plain word"),
        (listed, "cl100k", ["A"], "--special A is a piece"),
        (llama, "qwen2", [], r"--pattern and --special are for .tiktoken files"),
    ):
        with pytest.raises(UsageError, match=message):
            read_foreign(given, pattern, ["<|endoftext|>", *specials])
    (tmp_path / "own.model").write_bytes(llama.read_bytes())
    with pytest.raises(UsageError, match=r"several tokenizer files \(own.model, own.tiktoken\)"):
        load_tokenizer(tmp_path)
