"""Greedy and sampled text: what may be written, when it stops, and that it repeats; healed prompts."""

from collections import Counter

import pytest
import torch

from tests.infer.tiny import tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer import text
from zero2all.infer.boundary import Vocabulary, heal, split_scored
from zero2all.infer.engine import Engine, PromptTooLongError
from zero2all.infer.sampling import Picker, Sampling, penalised
from zero2all.infer.text import Piece, TextJob, TextRequest, complete, stream


def generate(loaded, prompt, max_new_tokens):
    return text.generate(Engine(loaded), prompt, max_new_tokens)


def pieces(tokenizer, ids):
    return [tokenizer.token_bytes(token).decode() for token in ids]


def test_greedy_text_goes_through_the_token_that_spans_the_border_and_stops_at_its_end(speller):
    # The model only knows 首都|是北京; a prompt cut after 是 must lead there all the same.
    assert generate(speller("首都", "是北京", "。"), "首都是", 10) == "北京。"
    assert generate(speller(" Rome", "lan", "d"), " Rome", 100) == "land"
    # Giving 是 back and writing it again is not new text.
    loaded = speller("首都", "是", "北京", "Rome", "lan", "d", ends=False)
    assert generate(loaded, "首都是", 1) == "北京"
    assert generate(loaded, "首都是", 3) == "北京Romelan"


def test_character_cut_in_two_by_max_new_tokens_is_left_out(speller, border_tokenizer):
    assert len(border_tokenizer.encode_text("黎")) == 3
    loaded = speller("首都", "黎", "Rome")
    assert generate(loaded, "首都", 2) == ""
    assert generate(loaded, "首都", 3) == "黎"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_control_tokens_and_padding_rows_are_never_written(bigram, border_tokenizer, temperature, logits):
    forbidden = sorted(border_tokenizer.control_ids - {border_tokenizer.end_id}) + list(range(291, len(logits)))
    logits[:, forbidden] = 30.0
    logits[:, border_tokenizer.end_id] = -30.0
    job = TextJob(engine := Engine(bigram(logits)), TextRequest("首都", 40, Sampling(temperature, seed=3))).job
    while job.finish is None:
        engine.step()
    assert len(job.new_ids) == 40
    assert not set(job.new_ids) & set(forbidden)


def test_prompt_and_answer_fill_the_model_and_a_prompt_without_room_is_refused(bigram, border_tokenizer, logits):
    # ` Rom` ends a prompt with three tokens that are given back and, here, taken again: they count all the same.
    logits[:, border_tokenizer.encode_text(" Rome")[0]] = logits[:, border_tokenizer.end_id] = -30.0
    loaded = bigram(logits, max_seq_len=8)
    assert sum(len(piece.tokens) for piece in stream(Engine(loaded), TextRequest("xxx Rom", 5))) == 1
    with pytest.raises(UsageError, match=r"prompt has 8 tokens; prompt and answer together may have 8 .*Shorten"):
        generate(loaded, "xxxx Rom", 5)


def test_healed_prompt_gives_back_every_token_that_one_token_spells_and_goes_on_from(border_tokenizer):
    # ` Rom` is three tokens, and ` Rome` is one that goes on from there; nothing goes on from `a Rom`.
    parts = {"首都是": (["首都"], ["是"]), "a Rom": (["a"], [" ", "Ro", "m"]), "是": ([], ["是"]), "": ([], [])}
    for prompt in (*parts, "城市是", " Rome", "x y\n", "是北", "🌍"):
        healed = heal(prompt, border_tokenizer, Vocabulary(border_tokenizer, border_tokenizer.vocab_size))
        assert healed.ids[0] == border_tokenizer.begin_id
        spelled = b"".join(map(border_tokenizer.token_bytes, [*healed.ids[1:], *healed.given_back]))
        assert spelled == prompt.encode()
        if prompt in parts:
            assert tuple(pieces(border_tokenizer, ids) for ids in (healed.ids[1:], healed.given_back)) == parts[prompt]


def test_scoring_starts_before_the_token_that_spans_the_border(border_tokenizer):
    scored = split_scored("首都是", ["北京"], border_tokenizer)
    (ids,) = scored.texts
    assert pieces(border_tokenizer, ids[1 : scored.shared]) == ["首都"]
    assert pieces(border_tokenizer, ids[scored.shared :]) == ["是北京"]
    assert scored.tail == "是".encode()
    # All continuations start at the same place, whether they merge or not.
    continuations = ["北京", "Rome", "是北京"]
    together = split_scored("首都是", continuations, border_tokenizer)
    assert len({tuple(ids[: together.shared]) for ids in together.texts}) == 1
    alone = [split_scored("首都是", [each], border_tokenizer) for each in continuations]
    assert {(one.shared, one.tail) for one in (scored, together, *alone)} == {(scored.shared, scored.tail)}
    # ` Rom` is three tokens, ` Rome` is one: the whole prompt is respelled.
    assert len(border_tokenizer.encode_text(" Rom")) == 3
    scored = split_scored(" Rom", ["e", "a"], border_tokenizer)
    assert (scored.shared, scored.tail) == (1, b" Rom")


def test_search_for_tokens_finds_what_a_look_at_every_token_finds_on_both_sides_of_the_tail(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    found = {vocabulary.pieces[token] for token in vocabulary.continuing("是".encode())}
    assert found == {"是".encode()[:1], "是".encode()[:2], "是".encode(), "是北京".encode()}
    for tail in (b" ", b" Rome", b"\xe6", "是".encode(), "是北京".encode(), b"Romeland", b"\xff", b"nowhere"):
        whole = [(token, piece) for token, piece in enumerate(vocabulary.pieces) if piece]
        beginning = [token for token, piece in whole if piece.startswith(tail)]
        assert vocabulary.starting_with(tail) == beginning
        shorter = [token for token, piece in whole if tail.startswith(piece)]
        assert vocabulary.continuing(tail) == sorted({*beginning, *shorter})


ANY = Sampling(temperature=1, seed=1)


def pieces_of(request: TextRequest) -> list[Piece]:
    return list(stream(Engine(tiny_model()), request))


def text_of(request: TextRequest) -> str:
    return "".join(piece.text for piece in pieces_of(request))


def test_only_the_last_piece_has_a_finish_and_it_says_what_was_used():
    *first, last = pieces_of(TextRequest("hello world", 12, ANY))
    assert {piece.finish for piece in first} == {None}
    assert last.finish == "length"
    assert (last.usage.new_tokens, last.usage.cached_tokens) == (12, 0)
    assert last.usage.seconds > 0
    assert sum(len(piece.tokens) for piece in [*first, last]) == 12


def test_the_text_ends_before_a_stop_string_wherever_tokens_cut_it():
    whole = text_of(TextRequest("hello world", 30, ANY))
    for begin in range(1, len(whole) - 4, 2):
        stop = whole[begin : begin + 3]
        *first, last = pieces_of(TextRequest("hello world", 30, ANY, stop=(stop, "never written")))
        assert "".join(piece.text for piece in [*first, last]) == whole[: whole.index(stop)]
        assert last.finish == "stop"
    # What looks like a stop string but is none is not lost.
    assert text_of(TextRequest("hello world", 30, ANY, stop=(whole[-2:] + "x", whole[4:8] + "☃"))) == whole


def test_megabytes_that_cannot_fit_are_refused_before_they_are_encoded(monkeypatch):
    tokenizer = tiny_model().tokenizer
    for written in ("hello world, 中国的首都是北京。\n    return", " " * 40, "中" * 20, "e\u0301"):
        assert 0 < tokenizer.fewest_tokens(written) <= len(tokenizer.encode_text(written))
    monkeypatch.setattr(tokenizer, "encode_text", None)
    with pytest.raises(PromptTooLongError, match=r"at least [\d,]+ tokens; prompt and answer together may have 160"):
        pieces_of(TextRequest("x" * 3_000_000))


def test_an_id_named_as_an_end_ends_the_text():
    job = next(iter(complete(Engine(tiny_model()), [TextRequest("hello", 20, ANY)])))[2]
    end = job.new_ids[5]
    *first, last = pieces_of(TextRequest("hello", 20, ANY, end_ids=(end,)))
    assert last.finish == "stop"
    assert [token for piece in [*first, last] for token in piece.tokens] == job.new_ids[: job.new_ids.index(end)]


def test_stop_strings_and_lengths_that_make_no_sense_are_refused():
    refused = {"string is empty": (5, ("",)), "17 stop strings": (5, ("x",) * 17), "max_new_tokens is 0": (0, ())}
    for words, (count, stop) in refused.items():
        with pytest.raises(UsageError, match=words):
            pieces_of(TextRequest("a", count, stop=stop))


CPU = torch.device("cpu")


def test_draws_follow_the_distribution_that_is_left():
    for sampling, expected in (
        (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(temperature=0.5), [0.25, 0.0625, 0.0225, 0.01]),
        (Sampling(temperature=1, top_k=2), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.7), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(temperature=1, min_p=0.3), [0.5, 0.25, 0.15, 0]),
        (Sampling(temperature=1, top_k=3, top_p=0.8), [0.5, 0.25, 0, 0]),
        (Sampling(), [1, 0, 0, 0]),
    ):
        logits, draws = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])), 4000
        found = Counter(Picker([sampling] * draws, CPU).pick(logits.repeat(draws, 1), range(draws)).tolist())
        for token, share in enumerate(expected):
            assert abs(found[token] / draws - share / sum(expected)) < (0.03 if share else 1e-9)


def test_a_token_that_cannot_be_drawn_is_not_and_a_known_one_is_less_likely():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    picker = Picker([Sampling(temperature=1)], CPU)
    assert {int(picker.pick(logits.clone(), [number])) for number in range(300)} == {1, 3}
    logits, seen = torch.tensor([[2.0, -2.0, 2.0]]), torch.tensor([[True, True, False]])
    assert penalised(logits, seen, torch.tensor([[2.0]])).tolist() == [[1.0, -4.0, 2.0]]


def test_what_has_no_meaning_is_refused():
    wrong = (("temperature", -1), ("top_k", -1), ("top_p", 0), ("top_p", 1.1), ("min_p", 2), ("repetition_penalty", 0))
    for name, value in wrong:
        with pytest.raises(UsageError, match=f"{name} is .*it must be"):
            Sampling(**{name: value})
