"""Loading and encoding: round trips, text that spells control tokens, fingerprints, folders made by others."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tokenizer_fuzz import adversarial
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.tokenizer import CONTROL_TOKENS, load_tokenizer
from zero2all.tokenizer.text import well_formed


@pytest.fixture(scope="session")
def auto(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def raw(folder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


PIECES = st.lists(st.sampled_from([*CONTROL_TOKENS, "\ud800", "\udfff", "天", " ", "a", "\n", "<|", "|>"]))


@settings(max_examples=300, deadline=None)
@given(text=st.text() | PIECES.map("".join))
def test_any_text_round_trips_without_a_control_id(tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == well_formed(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == well_formed(text).encode()
    assert tokenizer.control_ids.isdisjoint(ids)


def test_lone_surrogates_become_replacement_characters_and_batches_are_one_by_one(tokenizer, texts):
    assert tokenizer.decode(tokenizer.encode_text("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode_text("\ud83d\ude00\udc00")) == "😀\ufffd"
    assert tokenizer.encode_batch(["ok", "\ud83d"]) == [tokenizer.encode_text("ok"), tokenizer.encode_text("\ufffd")]
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode_text(text) for text in texts]
    assert sum(map(len, batch)) < 0.6 * sum(len(text.encode()) for text in texts), "training text compresses"


def test_a_long_text_has_the_same_ids_and_lets_other_threads_run(tokenizer, texts):
    text = " ".join(texts)
    text *= -(-200_000 // len(text))
    looks, is_done = 0, threading.Event()

    def watch() -> None:
        nonlocal looks
        while not is_done.wait(0.001):
            looks += 1

    thread = threading.Thread(target=watch)
    thread.start()
    end, most = time.monotonic() + 120, 0
    while most < 5 and time.monotonic() < end:  # on a busy machine the other thread gets no core for a while
        before = looks
        ids = tokenizer.encode_text(text)
        most = max(most, looks - before)
    is_done.set()
    thread.join()
    assert ids == tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert most >= 5


def test_autotokenizer_and_plain_tokenizers_give_our_ids_and_no_text_a_control_id(auto, raw, tokenizer, texts):
    glued, spaced = "".join(CONTROL_TOKENS), " ".join(CONTROL_TOKENS)
    for text in [*texts, "", " ", "\n\n", "  a  b ", "😀 e\u0301 \x00", glued, spaced, "<|pad|" * 9 + ">"]:
        ours = tokenizer.encode_text(text)
        assert tokenizer.control_ids.isdisjoint(ours), text
        assert raw.encode(text).ids == auto.encode(text) == auto(text)["input_ids"] == ours
        assert auto.decode(ours) == raw.decode(ours) == tokenizer.decode(ours) == text


def test_autotokenizer_knows_the_control_tokens(auto, tokenizer):
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (0, 1, 5)
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (0, 1, 5)
    assert sorted(auto.all_special_ids) == sorted(tokenizer.control_ids)
    assert len(auto) == tokenizer.vocab_size
    ours = list(map(tokenizer.encode_control, CONTROL_TOKENS))
    assert auto.convert_tokens_to_ids(list(CONTROL_TOKENS)) == ours == list(range(len(CONTROL_TOKENS)))


def test_decode_skips_control_tokens_or_names_them(auto, tokenizer):
    ids = [tokenizer.begin_id, *tokenizer.encode_text("你好 there"), tokenizer.end_id]
    assert tokenizer.decode(ids) == auto.decode(ids, skip_special_tokens=True) == "你好 there"
    named = "<|begin_of_text|>你好 there<|end_of_text|>"
    assert tokenizer.decode(ids, skip_control=False) == auto.decode(ids) == named
    with pytest.raises(ValueError, match="token id 700"):
        tokenizer.decode([700])
    with pytest.raises(UsageError, match=r"no control token '<\|eot\|>'.*<\|end_of_text\|>"):
        tokenizer.encode_control("<|eot|>")


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(min_value=0, max_value=699), max_size=20))
def test_any_ids_decode_with_replacement_like_the_library(raw, tokenizer, ids):
    assert tokenizer.decode(ids, skip_control=False) == raw.decode(ids)


def test_fingerprint_survives_reformatting_and_follows_every_change_that_matters(folder, tmp_path):
    def fingerprint_after(change) -> str:
        copy = shutil.copytree(folder, tmp_path / "copy")
        (copy / "manifest.json").unlink()
        content, config = read_json(copy / "tokenizer.json"), read_json(copy / "tokenizer_config.json")
        change(content, config)
        (copy / "tokenizer.json").write_text(json.dumps(content))
        write_json(copy / "tokenizer_config.json", config)
        found = load_tokenizer(copy).fingerprint
        shutil.rmtree(copy)
        return found

    def swap_two_merges(content, config):
        merges = content["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    def another_end(content, config):
        config["eos_token"] = "<|message_end|>"

    def one_control_less(content, config):
        del config["added_tokens_decoder"]["13"]
        config["additional_special_tokens"].remove("<|reserved_7|>")

    original = load_tokenizer(folder).fingerprint
    assert fingerprint_after(lambda *_: None) == original
    changed = [fingerprint_after(change) for change in (swap_two_merges, another_end, one_control_less)]
    assert len({original, *changed}) == 4


def test_tokenizer_changed_after_training_or_of_another_format_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    content = read_json(copy / "tokenizer.json")
    content["model"]["merges"].pop()
    write_json(copy / "tokenizer.json", content)
    with pytest.raises(BadInputError, match="was changed after it was trained"):
        load_tokenizer(copy)
    write_json(copy / "manifest.json", {**read_json(copy / "manifest.json"), "format": 99})
    with pytest.raises(BadInputError, match="format 99"):
        load_tokenizer(copy)


def test_damaged_or_absent_files_give_a_clear_error(tmp_path):
    with pytest.raises(BadInputError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    for damage in ("{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(damage)
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "a"})
        with pytest.raises(BadInputError):
            load_tokenizer(tmp_path)


def save_gpt2_like(folder: Path, texts: list[str], vocab_size: int, trained: list[str], **tokens: object) -> None:
    """Byte-level, with tokens in the model's own vocabulary and behind it, saved by transformers."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": trained, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, **options))
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens).save_pretrained(folder)


def save_llama_like(folder: Path) -> None:
    """SentencePiece-style BPE with byte fallback, a template that adds <s>, and truncation left switched on."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend, norm, dec = tokenizers.Tokenizer(model), tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
    backend.decoder = dec.Sequence([dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse(), dec.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens(["</s>"])  # not marked special, as in some folders in the wild
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})


def test_byte_level_folder_saved_by_transformers_loads_and_keeps_text_apart_from_control(tmp_path):
    end, texts = "<|endoftext|>", ["the end of the text is near the end"] * 5
    roles = {"bos_token": end, "eos_token": end, "unk_token": end}
    save_gpt2_like(tmp_path / "foreign", texts, 270, [end], **roles, additional_special_tokens=["<|tool|>"])
    foreign = load_tokenizer(tmp_path / "foreign")
    assert foreign.control == {"<|endoftext|>": 0, "<|tool|>": 270}
    assert (foreign.begin_id, foreign.end_id, foreign.pad_id, foreign.vocab_size) == (0, 0, None, 271)
    text = "the end<|endoftext|><|tool|> 中文 \ud800"
    ids = foreign.encode_text(text)
    assert foreign.control_ids.isdisjoint(ids)
    assert foreign.decode([*ids, 0]) == well_formed(text)
    assert b"".join(map(foreign.token_bytes, ids)) == well_formed(text).encode()
    assert foreign.decode([270], skip_control=False) == "<|tool|>"


def test_sentencepiece_style_folder_loads_and_keeps_text_apart_from_control(tmp_path):
    save_llama_like(tmp_path / "foreign")
    foreign = load_tokenizer(tmp_path / "foreign")
    assert foreign.control == {"<s>": 1, "</s>": 2}
    text = "ab ab</s><s> 中"
    ids = foreign.encode_text(text)
    assert foreign.control_ids.isdisjoint(ids)
    assert len(ids) > 4
    assert (foreign.decode([1, *ids, 2]), foreign.token_bytes(ids[0])) == (text, b" ab")
    assert b"".join(map(foreign.token_bytes, ids)) == f" {text}".encode()


def test_our_folder_saved_by_transformers_keeps_text_apart_for_all_but_plain_tokenizers(auto, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    auto.save_pretrained(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.control == tokenizer.control
    for text in adversarial(list(CONTROL_TOKENS), ["x"], 500):
        assert again.encode_text(text) == tokenizer.encode_text(text)
    assert 1 in tokenizers.Tokenizer.from_file(str(tmp_path / "again/tokenizer.json")).encode("a<|end_of_text|>b").ids
    assert 1 not in transformers.AutoTokenizer.from_pretrained(tmp_path / "again")("a<|end_of_text|>b")["input_ids"]


def test_folder_without_a_declared_end_takes_the_usual_name_or_says_what_to_add(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "manifest.json").unlink()
    config = read_json(copy / "tokenizer_config.json")
    del config["eos_token"]
    write_json(copy / "tokenizer_config.json", config)
    assert load_tokenizer(copy).end_id == CONTROL_TOKENS.index("<|end_of_text|>")
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(BadInputError, match='"eos_token"'):
        load_tokenizer(copy)
    write_json(copy / "tokenizer_config.json", {"eos_token": "<|nowhere|>"})
    with pytest.raises(BadInputError, match="no such token"):
        load_tokenizer(copy)
