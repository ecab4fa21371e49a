"""Loading and encoding: round trips, text that spells control tokens, fingerprints, folders made by others."""

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import read_json, write_json
from zero2all.tokenizer import CONTROL_TOKENS, load_tokenizer
from zero2all.tokenizer.text import well_formed


@pytest.fixture(scope="session")
def auto(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def raw(folder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def adversarial_texts() -> list[str]:
    rng = random.Random(1)
    glued, spaced = "".join(CONTROL_TOKENS), " ".join(CONTROL_TOKENS)
    fixed = [glued, spaced, "\n".join(CONTROL_TOKENS), glued.upper(), glued[1:], *CONTROL_TOKENS, "<|pad|" * 9 + ">"]
    around = ["", " ", "\n", "x", "中", "<", "|", ">", "\u200b", "\x00", "\ufeff", "Ġ", "▁"]
    return fixed + [
        "".join(rng.choice(around) + rng.choice(CONTROL_TOKENS) + rng.choice(around) for _ in range(rng.randint(1, 4)))
        for _ in range(500)
    ]


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_round_trips_without_a_control_id(tokenizer, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.control_ids.isdisjoint(ids)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from([*CONTROL_TOKENS, "\ud800", "\udfff", "天", " ", "a", "\n", "<|", "|>"])))
def test_surrogates_and_control_strings_encode_as_plain_text(tokenizer, pieces):
    text = "".join(pieces)
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == well_formed(text)
    assert tokenizer.control_ids.isdisjoint(ids)


def test_lone_surrogates_become_replacement_characters_and_pairs_are_joined(tokenizer):
    assert tokenizer.decode(tokenizer.encode_text("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode_text("\ud83d\ude00\udc00")) == "😀\ufffd"
    assert tokenizer.encode_batch(["ok", "\ud83d"]) == [tokenizer.encode_text("ok"), tokenizer.encode_text("\ufffd")]


def test_batch_equals_one_by_one_and_training_text_compresses(tokenizer, texts):
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode_text(text) for text in texts]
    assert sum(map(len, batch)) < 0.6 * sum(len(text.encode()) for text in texts)


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


def test_autotokenizer_and_plain_tokenizers_give_our_ids(auto, raw, tokenizer, texts):
    for text in [*texts, "", " ", "\n\n", "  a  b ", "😀 e\u0301 \x00", *adversarial_texts()]:
        ours = tokenizer.encode_text(text)
        assert raw.encode(text).ids == ours
        assert auto.encode(text) == ours
        assert auto(text)["input_ids"] == ours
        assert auto.decode(ours) == raw.decode(ours) == tokenizer.decode(ours) == text


def test_no_route_turns_text_into_a_control_id(auto, raw, tokenizer):
    for text in adversarial_texts():
        for ids in (tokenizer.encode_text(text), raw.encode(text).ids, auto.encode(text)):
            assert tokenizer.control_ids.isdisjoint(ids), text
    for ids in auto(adversarial_texts())["input_ids"]:
        assert tokenizer.control_ids.isdisjoint(ids)


def test_autotokenizer_knows_the_control_tokens(auto, tokenizer):
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (0, 1, 5)
    assert (tokenizer.begin_id, tokenizer.end_id, tokenizer.pad_id) == (0, 1, 5)
    assert sorted(auto.all_special_ids) == sorted(tokenizer.control_ids)
    assert len(auto) == tokenizer.vocab_size
    assert auto.convert_tokens_to_ids(list(CONTROL_TOKENS)) == list(range(len(CONTROL_TOKENS)))


def test_decode_skips_control_tokens_or_names_them(auto, tokenizer):
    ids = [tokenizer.begin_id, *tokenizer.encode_text("你好 there"), tokenizer.end_id]
    assert tokenizer.decode(ids) == auto.decode(ids, skip_special_tokens=True) == "你好 there"
    named = "<|begin_of_text|>你好 there<|end_of_text|>"
    assert tokenizer.decode(ids, skip_control=False) == auto.decode(ids) == named


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(min_value=0, max_value=699), max_size=20))
def test_any_ids_decode_with_replacement_like_the_library(raw, tokenizer, ids):
    assert tokenizer.decode(ids, skip_control=False) == raw.decode(ids)


def test_encode_control_gives_ids_and_names_the_choices_otherwise(tokenizer):
    assert [tokenizer.encode_control(name) for name in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
    with pytest.raises(UsageError, match=r"no control token '<\|eot\|>'.*<\|end_of_text\|>"):
        tokenizer.encode_control("<|eot|>")


def test_id_beyond_the_vocabulary_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="token id 700"):
        tokenizer.decode([700])


def test_fingerprint_survives_reformatting_and_follows_every_change_that_matters(folder, tmp_path):
    def fingerprint_after(change) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        (copy / "manifest.json").unlink()
        tokenizer_json, config = read_json(copy / "tokenizer.json"), read_json(copy / "tokenizer_config.json")
        change(tokenizer_json, config)
        (copy / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        write_json(copy / "tokenizer_config.json", config)
        return load_tokenizer(copy).fingerprint

    def swap_two_merges(tokenizer_json, config):
        merges = tokenizer_json["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]

    def another_end(tokenizer_json, config):
        config["eos_token"] = "<|message_end|>"

    def one_control_less(tokenizer_json, config):
        del config["added_tokens_decoder"]["13"]
        config["additional_special_tokens"].remove("<|reserved_7|>")

    original = load_tokenizer(folder).fingerprint
    assert fingerprint_after(lambda *_: None) == original
    changed = [fingerprint_after(change) for change in (swap_two_merges, another_end, one_control_less)]
    assert len({original, *changed}) == 4


def test_tokenizer_changed_after_training_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    tokenizer_json = read_json(copy / "tokenizer.json")
    tokenizer_json["model"]["merges"].pop()
    write_json(copy / "tokenizer.json", tokenizer_json)
    with pytest.raises(BadInputError, match="was changed after it was trained"):
        load_tokenizer(copy)


def test_folder_of_another_format_version_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
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


def test_importing_the_package_imports_no_tokenizer_library():
    check = "import sys, zero2all.tokenizer; sys.exit('tokenizers' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# ---- folders made by others ----


def save_gpt2_like(folder: Path) -> None:
    """Byte-level, one end token that is also the unknown token, saved by transformers."""
    transformers = pytest.importorskip("transformers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the end of the text is near the end"] * 5, trainer)
    end = "<|endoftext|>"
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=end, eos_token=end, unk_token=end, additional_special_tokens=["<|tool|>"]
    )
    wrapped.save_pretrained(folder)


def save_llama_like(folder: Path) -> None:
    """SentencePiece-style BPE with byte fallback, a template that adds <s>, and truncation left switched on."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens(["</s>"])  # not marked special, as in some folders in the wild
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(4)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})


def test_byte_level_folder_saved_by_transformers_loads_and_keeps_text_apart_from_control(tmp_path):
    save_gpt2_like(tmp_path / "foreign")
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
    assert foreign.decode([1, *ids, 2]) == text
    assert foreign.token_bytes(ids[0]) == b" ab"
    assert b"".join(map(foreign.token_bytes, ids)) == f" {text}".encode()


def test_our_folder_saved_again_by_transformers_still_keeps_text_apart(auto, tokenizer, tmp_path):
    auto.save_pretrained(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.control == tokenizer.control
    for text in adversarial_texts():
        assert again.encode_text(text) == tokenizer.encode_text(text)


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
