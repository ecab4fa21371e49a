"""`z2a tokenizer eval`: the figures are what they say, and others can stand beside ours."""

import json
import sys

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.tokenizer.lab.candidates import EvalText, open_candidates
from zero2all.tokenizer.lab.measure import JUNK, evaluate, evaluation_tables, junk_sort

NASTY = "<script>alert('1')</script> & \"quotes\" </div>\x00 <b onmouseover=x>\n\ttab"


@pytest.fixture(scope="module")
def eval_text(texts):
    return EvalText("valid", {"mixed": texts[:40], "nasty <b>": [NASTY, "中文👍", "a"]})


@pytest.fixture(scope="module")
def report(folder, eval_text):
    return evaluate(open_candidates(folder, [str(folder)], eval_text), eval_text)


def test_figures_are_what_they_say(report, tokenizer, eval_text):
    ours = report["tokenizers"][0]
    for channel, texts in eval_text.channels.items():
        tokens = sum(len(tokenizer.encode_text(text)) for text in texts)
        figures = ours["channels"][channel]
        assert figures["tokens"] == tokens
        assert figures["bytes_per_token"] == sum(len(text.encode()) for text in texts) / tokens
        assert figures["tokens_per_character"] == tokens / sum(map(len, texts))
    used = {number for text in eval_text.documents for number in tokenizer.encode_text(text)}
    assert ours["vocabulary_use"]["used"] == len(used)
    assert ours["pieces"] == tokenizer.vocab_size - len(tokenizer.control)
    assert ours["round_trip"] == {"documents": 43, "changed": 0, "example": ""}
    assert ours["coverage"]["distinct_characters"] == len(set("".join(eval_text.documents)))


def test_split_characters_are_counted_in_bytes(folder, tokenizer):
    rare = "𠀀"
    assert tokenizer.ids_of_bytes(rare.encode()) == []
    text = EvalText("valid", {"zh": [f"a{rare}"]})
    coverage = evaluate(open_candidates(folder, [], text), text)["tokenizers"][0]["coverage"]
    assert coverage["share_bytes_split"] == pytest.approx(4 / 5)
    assert coverage["share_single"] == pytest.approx(1 / 2)


def test_the_same_tokenizer_twice_has_two_names_and_the_same_figures(report):
    ours, again = report["tokenizers"]
    assert (ours["name"], again["name"]) == ("ours", "tokenizer")
    for figure in ("tokens", "vocabulary_use", "coverage", "junk"):
        assert ours[figure] == again[figure]
    assert json.loads(json.dumps(report)) == report
    for table in evaluation_tables(report):
        assert [row[0] for row in table.rows] == ["tokenizer", "ours", "tokenizer"]
        assert len({len(row) for row in table.rows}) == 1


def test_sorts_of_junk():
    for piece, used, sort in (
        ("中".encode()[:2], 5, "broken"), (b"\xe4", 0, None),
        (b"------------", 5, "repeated"), ("哈哈哈哈哈哈".encode(), 0, "repeated"),
        (b"    ", 3, None), (b" " * 40, 3, "repeated"),
        (b"https", 9, "web"), (b"&nbsp", 9, "web"), (b"</div", 9, "web"),
        ("同中书门下平章事".encode(), 2, "clause"), ("平章事".encode(), 2, None),
        (b"word", 0, "unused"), (b"word", 1, None),
    ):  # fmt: skip
        assert (piece, junk_sort(piece, used)) == (piece, sort)
        assert sort is None or sort in JUNK


def test_a_sentencepiece_model_can_be_compared(folder, texts, eval_text, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    settings = {"vocab_size": 600, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    lines = iter([line for text in texts for line in text.split("\n") if line])
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=str(tmp_path / "small"), **settings)
    report = evaluate(open_candidates(folder, [str(tmp_path / "small.model")], eval_text), eval_text)
    small = report["tokenizers"][1]
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "small.model"))
    assert (small["name"], small["kind"]) == ("small", "file, tokenizers")
    assert small["channels"]["mixed"]["tokens"] == sum(len(model.encode(text)) for text in eval_text.channels["mixed"])
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(BadInputError, match=r"bad\.model is not a tokenizer file"):
        open_candidates(folder, [str(tmp_path / "bad.model")], eval_text)
    with pytest.raises(UsageError, match="nowhere: there is no such file or folder"):
        open_candidates(folder, ["nowhere"], eval_text)


def test_tiktoken_without_its_file_says_how_to_get_it(folder, eval_text, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(BadInputError, match=r"could not be downloaded \(ConnectionError\).*TIKTOKEN_CACHE_DIR"):
        open_candidates(folder, ["tiktoken:o200k_base"], eval_text)
    with pytest.raises(UsageError, match=r"no encoding 'o200k'.*o200k_base"):
        open_candidates(folder, ["tiktoken:o200k"], eval_text)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UsageError, match="pip install tiktoken"):
        open_candidates(folder, ["tiktoken:o200k_base"], eval_text)


def test_a_tiktoken_encoding_can_be_compared(folder, tokenizer, eval_text, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {tokenizer.token_bytes(number): number for number in range(tokenizer.vocab_size)}
    encoding = tiktoken.Encoding("o200k_base", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: encoding)
    other = evaluate(open_candidates(folder, ["tiktoken:o200k_base"], eval_text), eval_text)["tokenizers"][1]
    assert (other["name"], other["round_trip"]["changed"]) == ("o200k_base", 0)
    tokens = sum(len(encoding.encode_ordinary(text)) for text in eval_text.channels["mixed"])
    assert other["channels"]["mixed"]["tokens"] == tokens
