"""Estimates of the memory of kind hf-bbpe, and the refusal when it does not fit."""

import random

import pytest

from zero2all.common.errors import BadInputError
from zero2all.tokenizer import TokenizerConfig, train_tokenizer
from zero2all.tokenizer import train as memory
from zero2all.tokenizer.parts import parts_from_texts


class Repeated:
    """A text that claims to be a thousand times longer than what it shows."""

    def __init__(self, texts, times=1000):
        self.kept, self.name, self.fingerprint = texts, "repeated", ""
        self.size_bytes = times * sum(len(text.encode()) for text in texts)

    def texts(self):
        return iter(self.kept)


def chinese(documents):
    rng = random.Random(0)
    return ["".join(chr(rng.randint(0x4E00, 0x5E00)) for _ in range(300)) for _ in range(documents)]


def english(documents):
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(500)]
    return [" ".join(rng.choices(words, k=120)) for _ in range(documents)]


def test_chinese_is_expected_to_need_many_times_the_memory_of_english():
    config = TokenizerConfig(kind="hf-bbpe")
    zh, en = (memory.estimate_memory([Repeated(texts)], config, 0) for texts in (chinese(300), english(300)))
    assert zh.text_bytes == pytest.approx(en.text_bytes, rel=0.5)
    assert zh.distinct_bytes > 20 * en.distinct_bytes
    assert zh.memory_bytes > 4 * en.memory_bytes


def test_small_text_is_not_sampled(tmp_path):
    parts = parts_from_texts(["text"], tmp_path)
    assert memory.estimate_memory(parts, TokenizerConfig(kind="hf-bbpe"), 10**9).sampled_bytes == 0


def test_what_does_not_fit_is_refused_with_advice_and_can_be_overridden():
    config = TokenizerConfig(kind="hf-bbpe", max_memory="1GB")
    with pytest.raises(
        BadInputError, match=r"would need about .* --max-memory allows 1.0 GB.*--kind bpe.*--take \d+/100"
    ):
        memory.check_memory([Repeated(chinese(300))], config)
    assert memory.check_memory([Repeated(chinese(300))], config, ignore=True).memory_bytes > 10**9


def test_refusal_comes_before_training_and_leaves_nothing(tmp_path):
    with pytest.raises(BadInputError, match="would need about"):
        train_tokenizer(chinese(300), 1000, tmp_path / "t", "inputs", kind="hf-bbpe", max_memory="100MB")
    assert list(tmp_path.iterdir()) == []
