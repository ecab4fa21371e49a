"""Greedy and sampled text: what may be written, when it stops, and that it repeats."""

import dataclasses

import pytest
import torch

from zero2all.common.errors import UsageError
from zero2all.infer import text as text_module
from zero2all.infer.engine import Engine
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextJob, TextRequest


def generate(loaded, prompt, max_new_tokens, sampling=None):
    return text_module.generate(Engine(loaded), prompt, max_new_tokens, sampling)


def stream(loaded, prompt, max_new_tokens, sampling=None):
    """The bytes of each new token."""
    engine = Engine(loaded)
    job = TextJob(engine, TextRequest(prompt, max_new_tokens, sampling or Sampling())).job
    while job.finish is None:
        engine.step()
    pieces = zip(job.new_ids, job.bytes_before, strict=True)
    return [engine.vocabulary.pieces[token][before:] for token, before in pieces]


def test_greedy_text_goes_through_the_token_that_spans_the_border(speller):
    # The model only knows 首都|是北京; a prompt cut after 是 must lead there all the same.
    loaded = speller("首都", "是北京", "。")
    assert generate(loaded, "首都是", 10) == "北京。"


def test_prompt_is_never_part_of_the_text(trained):
    for prompt in ("中国的首都是", "The capital of France is", "The capi", ""):
        text = generate(trained, prompt, 5)
        assert not (prompt and text.startswith(prompt))


def test_generation_stops_at_the_end_of_the_text(speller):
    loaded = speller(" Rome", "lan", "d")
    assert generate(loaded, " Rome", 100) == "land"


def test_max_new_tokens_counts_what_comes_after_the_prompt(speller):
    loaded = speller("首都", "是", "北京", "Rome", "lan", "d", ends=False)
    # Giving 是 back and writing it again is not new text.
    assert generate(loaded, "首都是", 1) == "北京"
    assert generate(loaded, "首都是", 3) == "北京Romelan"


def test_character_cut_in_two_by_max_new_tokens_is_left_out(speller, border_tokenizer):
    assert len(border_tokenizer.encode_text("黎")) == 3
    loaded = speller("首都", "黎", "Rome")
    assert generate(loaded, "首都", 2) == ""
    assert generate(loaded, "首都", 3) == "黎"
    assert b"".join(stream(loaded, "首都", 2)) == "黎".encode()[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_control_tokens_and_padding_rows_are_never_written(bigram, border_tokenizer, temperature, logits):
    forbidden = sorted(border_tokenizer.control_ids - {border_tokenizer.end_id}) + list(range(291, len(logits)))
    logits[:, forbidden] = 30.0
    logits[:, border_tokenizer.end_id] = -30.0
    produced = list(stream(bigram(logits), "首都", 40, Sampling(temperature, seed=3)))
    assert len(produced) == 40
    text_pieces = {border_tokenizer.token_bytes(token) for token in range(291)} - {
        name.encode() for name in border_tokenizer.control
    }
    assert set(produced) <= text_pieces


def test_samples_follow_the_distribution_of_the_model(bigram, border_tokenizer, logits):
    logits[:] = -30.0
    rome, land = border_tokenizer.encode_text("Rome")[0], border_tokenizer.encode_text("lan")[0]
    logits[:, rome], logits[:, land] = 0.0, 1.0
    loaded = bigram(logits)
    draws = [b"".join(stream(loaded, "首都", 50, Sampling(1.0, seed=seed))) for seed in range(4)]
    share = sum(text.count(b"lan") for text in draws) / 200
    assert share == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.1)


def test_prompt_and_answer_fill_the_model_and_a_prompt_without_room_for_an_answer_is_refused(
    bigram, border_tokenizer, logits
):
    # ` Rom` ends a prompt with three tokens that are given back and, here, taken again: they count all the same.
    logits[:, border_tokenizer.encode_text(" Rome")[0]] = logits[:, border_tokenizer.end_id] = -30.0
    loaded = bigram(logits, max_seq_len=8)
    assert len(stream(loaded, "xxx Rom", 5)) == 1
    with pytest.raises(UsageError, match=r"prompt has 8 tokens; prompt and answer together may have 8 .*Shorten"):
        generate(loaded, "xxxx Rom", 5)


def test_generation_leaves_the_loaded_model_as_it_was(trained):
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    generate(trained, "The", 5)
    assert not trained.model.training
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())
    assert dataclasses.replace(trained) == trained
