"""Encoders: every one of them gives the ids of the reference, or is not used."""

import importlib.util
import json
import random
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bpe_reference import ReferenceEncoder
from zero2all.common.errors import UsageError
from zero2all.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from zero2all.tokenizer.encoders import EncodedBatch, EncoderConfig, open_encoder
from zero2all.tokenizer.encoders import choose as choosing
from zero2all.tokenizer.encoders.choose import ParityError, check_parity, hard_strings
from zero2all.tokenizer.encoders.kinds import KINDS, EncoderKind, batch_of
from zero2all.tokenizer.encoders.tables import NotSupported, bpe_tables, whole_characters
from zero2all.tokenizer.save import tokenizer_json_of

TRICKY = "aA'sS \n\t\r1。，的一是不了é👍\u0301\u3000<|end_of_text|>"


def installed(name, *more):
    absent = importlib.util.find_spec(name) is None
    return pytest.param(name, *more, marks=pytest.mark.skipif(absent, reason="not installed"))


@pytest.fixture(scope="session")
def numba_encoder(tokenizer):
    return open_encoder(tokenizer, EncoderConfig("numba", strict=True, threads=1))


@pytest.fixture(scope="session")
def plain_encoder(tokenizer):
    model = json.loads(tokenizer.backend.to_str())["model"]
    shift = len(tokenizer.control)
    places = {piece: place - shift for piece, place in model["vocab"].items()}
    return ReferenceEncoder([(places[left], places[right]) for left, right in model["merges"]])


@pytest.fixture(scope="session")
def other_vocabulary(texts, tmp_path_factory):
    """Learned by the library: its pieces may begin and end inside characters."""
    folder = tmp_path_factory.mktemp("other") / "tokenizer"
    train_tokenizer(texts, 900, folder, "by the library", kind="hf-bbpe")
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [installed("fastokens", "tokenizer"), installed("numba", "tokenizer"), installed("numba", "other_vocabulary")],
)
def test_every_encoder_gives_the_ids_of_the_reference(name, vocabulary, texts, request):
    tokenizer = request.getfixturevalue(vocabulary)
    encoder = open_encoder(tokenizer, EncoderConfig(name, strict=True), texts[:50])
    assert (encoder.choice.got, encoder.choice.parity.documents) == (name, 50)
    assert [ids.tolist() for ids in encoder.encode_batch(texts)] == tokenizer.encode_batch(texts)


@given(st.text(st.sampled_from(TRICKY), max_size=60) | st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_our_encoder_equals_the_plain_encoder(numba_encoder, plain_encoder, tokenizer, text):
    shift = len(tokenizer.control)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert numba_encoder.encode_batch([text])[0].tolist() == [place + shift for place in plain_encoder.encode(whole)]


@pytest.mark.parametrize("vocabulary", ["tokenizer", "other_vocabulary"])
def test_a_long_word_is_encoded_in_windows_as_if_it_were_whole(vocabulary, texts, request):
    tokenizer = request.getfixturevalue(vocabulary)
    encoder = open_encoder(tokenizer, EncoderConfig("numba", strict=True))
    letters = [character for character in "".join(texts) if character.isalpha()]
    rng = random.Random(4)
    words = ["".join(letters)[:6000], *("".join(rng.choices(of, k=5000)) for of in (letters, "aab", "一\u4e01é𠀀"))]
    words += ["kalo" * 2000, " " * 4321, "=" * 3001]
    for word in words:
        assert encoder.encode_batch([word])[0].tolist() == tokenizer.encode_text(word)


def test_windows_that_do_not_fit_together_are_made_larger():
    """In this vocabulary the end of a word decides how its beginning is cut, however long it is."""
    letters = [chr(0x4E00 + number) for number in range(301)]
    heads = sorted({letter.encode()[:2] for letter in letters})
    pieces = [bytes([byte]) for byte in range(256)] + heads + [letter.encode() for letter in letters]
    place = {piece: number for number, piece in enumerate(pieces)}
    merges = [(head[0], head[1]) for head in heads]
    merges += [(place[letter.encode()[:2]], letter.encode()[2]) for letter in letters]
    for left, right in reversed(list(pairwise(letters))):  # the last pair of the word ranks first
        merges.append((place[left.encode()], place[right.encode()]))
        pieces.append((left + right).encode())
    content = tokenizer_json_of(pieces, merges, ["<|end_of_text|>"])
    tokenizer = Tokenizer(content, {"<|end_of_text|>": 0}, {"eos_token": "<|end_of_text|>"})
    encoder = open_encoder(tokenizer, EncoderConfig("numba", strict=True))
    for length in (300, 301):
        word = "".join(letters[:length])
        assert encoder.encode_batch([word])[0].tolist() == tokenizer.encode_text(word)


def test_texts_are_kept_apart_in_any_number_of_threads(tokenizer, texts, monkeypatch):
    monkeypatch.setattr("zero2all.tokenizer.encoders.kinds.TEXT_OF_THREAD", 100)
    given = [*texts, "", "x", "a\ud83db", ""]  # a lone surrogate counts as a replacement character
    expected = tokenizer.encode_batch(given)
    for threads in (1, 3):
        encoder = open_encoder(tokenizer, EncoderConfig("numba", threads=threads))
        assert [ids.tolist() for ids in encoder.encode_batch(given)] == expected
    assert len(encoder.encode_batch([])) == 0


def test_auto_takes_ours_for_chinese_and_says_why_and_the_reference_for_little_text(tokenizer, texts, monkeypatch):
    encoder = open_encoder(tokenizer, EncoderConfig(), texts, text_bytes=10_000)
    assert (encoder.name, encoder.choice.parity) == ("tokenizers", None)
    monkeypatch.setattr(choosing, "KINDS", {name: KINDS[name] for name in ("fastokens", "numba", "tokenizers")})
    encoder = open_encoder(tokenizer, EncoderConfig(), ["天地玄黄宇宙洪荒" * 20])
    assert (encoder.choice.asked, encoder.name) == ("auto", "numba")
    assert "0% ASCII" in encoder.reason


class _Wrong:
    """Right on everything but texts that hold the word."""

    word, ids = "wrong here", staticmethod(lambda _, ids: [*ids[:-1], ids[-1] + 1])

    def __init__(self, tokenizer, _):
        self.tokenizer = tokenizer

    def encode(self, texts):
        found = [(text, self.tokenizer.encode_text(text)) for text in texts]
        return batch_of([self.ids(self.tokenizer, ids) if self.word in text else ids for text, ids in found])


class _Injected(_Wrong):
    """Takes spelled control tokens for control tokens."""

    word, ids = "<|end_of_text|>", staticmethod(lambda tokenizer, _: [tokenizer.end_id])


class _Late(_Injected):
    """Gives a control id only for a text that no sample has."""

    word = "late"


def with_encoder(monkeypatch, encoder):
    kinds = {"numba": EncoderKind("numba", encoder, 1e9, 1e9), "tokenizers": KINDS["tokenizers"]}
    monkeypatch.setattr(choosing, "KINDS", kinds)


def test_an_encoder_that_differs_on_the_sample_is_replaced_loudly(tokenizer, monkeypatch):
    with pytest.raises(ParityError, match=r"on a document of the sample of 13 characters.*first at token"):
        check_parity(_Wrong(tokenizer, None), tokenizer, ["so wrong here"])
    with_encoder(monkeypatch, _Wrong)
    encoder = open_encoder(tokenizer, EncoderConfig("numba"), ["fine", "it is wrong here"])
    assert (encoder.choice.asked, encoder.choice.got) == ("numba", "tokenizers")
    assert "differs from the reference on a document of the sample" in encoder.reason
    assert "wrong here" in encoder.reason
    with pytest.raises(UsageError, match="cannot be used: it differs"):
        open_encoder(tokenizer, EncoderConfig("numba", strict=True), ["it is wrong here"])


def test_an_encoder_that_takes_text_for_control_tokens_is_never_used_and_later_stops_the_work(tokenizer, monkeypatch):
    with_encoder(monkeypatch, _Injected)
    encoder = open_encoder(tokenizer, EncoderConfig())
    assert encoder.name == "tokenizers"
    assert "control id" in encoder.reason
    with_encoder(monkeypatch, _Late)
    encoder = open_encoder(tokenizer, EncoderConfig("numba", strict=True), ["sample"])
    with pytest.raises(ParityError, match="control id"):
        encoder.encode_batch(["fine", "late"])


def test_an_encoder_that_is_not_installed_says_so(tokenizer, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    encoder = open_encoder(tokenizer, EncoderConfig("fastokens"), ["text"])
    assert encoder.name == "tokenizers"
    assert "fastokens is not installed" in encoder.reason
    with pytest.raises(UsageError, match="fastokens is not installed"):
        open_encoder(tokenizer, EncoderConfig("fastokens", strict=True))


def test_an_unknown_encoder_and_one_of_earlier_versions_are_answered(tokenizer):
    for name in ("gigatoken", "tiktoken"):
        with pytest.raises(UsageError, match=f"encoder {name} is no longer used"):
            EncoderConfig(name)
    with pytest.raises(UsageError, match=r"no encoder 'fast'.*auto, fastokens"):
        open_encoder(tokenizer, EncoderConfig("fast"))


@pytest.mark.parametrize("name", [installed("fastokens"), installed("numba")])
def test_added_tokens_of_foreign_folders_stay_text_in_every_encoder(name, folder, tmp_path):
    foreign = shutil.copytree(folder, tmp_path / "foreign")
    (foreign / "manifest.json").unlink()
    content = json.loads((foreign / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = {1: "<|end_of_text|>", size: "<|im_end|>"}
    content["added_tokens"] = [{"id": number, "content": name, **plain} for number, name in names.items()]
    (foreign / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(foreign)
    assert size in tokenizer.control_ids
    text = "x<|im_end|> <|end_of_text|>y"
    ids = open_encoder(tokenizer, EncoderConfig(name, strict=True)).encode_batch([text])[0]
    assert not set(ids.tolist()) & tokenizer.control_ids
    assert ids.tolist() == tokenizer.encode_text(text)


def test_long_texts_go_to_an_encoder_that_can_take_them(tokenizer, texts, monkeypatch):
    monkeypatch.setattr(choosing, "LONG_TEXT_CHARACTERS", 1000)
    encoder = open_encoder(tokenizer, EncoderConfig("tokenizers"))
    raw, seen = type(encoder._raw), []
    encode = raw.encode
    monkeypatch.setattr(raw, "encode", lambda self, texts: seen.extend(map(len, texts)) or encode(self, texts))
    given = ["short", "kalo" * 600, "b", "", "一" * 1500]
    assert [ids.tolist() for ids in encoder.encode_batch(given)] == tokenizer.encode_batch(given)
    assert max(seen) <= 1000


def test_hard_strings_spell_every_control_token_and_are_the_same_every_time(tokenizer):
    strings = hard_strings(list(tokenizer.control))
    assert strings == hard_strings(list(tokenizer.control))
    assert all(name in strings for name in tokenizer.control)


def test_characters_start_whole_only_where_no_merge_takes_them_apart():
    # é is C3 A9. In the first list it is made before the merge that takes its last byte away, in the second after.
    pieces = [bytes([byte]) for byte in range(256)] + ["é".encode(), b"\xa9a"]
    assert whole_characters(pieces, np.array([256, 257])) == {ord("é"): 256}
    assert whole_characters(pieces, np.array([257, 256])) == {}
    assert whole_characters([*pieces[:257], b"b\xc3"], np.array([257, 256])) == {}


def another_pattern(content):
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\S+|\s+"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content["model"].update(ignore_merges=True), "ignore_merges"),
        (lambda content: content["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda content: content["model"].update(type="Unigram"), "Unigram, not BPE"),
        (lambda content: content["model"]["merges"].reverse(), "before the merges that make its parts"),
        (another_pattern, "pattern"),
    ],
)
def test_what_our_encoder_cannot_reproduce_is_refused_with_the_reason(tokenizer, change, reason):
    content = json.loads(tokenizer.backend.to_str())
    change(content)
    with pytest.raises(NotSupported, match=reason):
        bpe_tables(content)


def test_a_batch_gives_the_ids_of_each_text():
    batch = batch_of([[1, 2], [], [3]])
    assert isinstance(batch, EncodedBatch)
    assert [row.tolist() for row in batch] == [[1, 2], [], [3]]
    assert batch.ids.dtype == np.uint32
    with pytest.raises(IndexError):
        batch[3]
