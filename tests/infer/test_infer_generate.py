"""Greedy and sampled text: what may be written, when it stops, and that it repeats; healed prompts."""

from collections import Counter

import pytest
import torch

from tests.infer.tiny import tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer import text as text_module
from zero2all.infer.boundary import Vocabulary, heal, split_scored
from zero2all.infer.engine import Engine, PromptTooLongError
from zero2all.infer.sampling import Picker, Sampling, penalised, uniform
from zero2all.infer.text import Piece, TextJob, TextRequest, complete, stream


def generate(loaded, prompt, max_new_tokens, sampling=None):
    return text_module.generate(Engine(loaded), prompt, max_new_tokens, sampling)


def stream_bytes(loaded, prompt, max_new_tokens, sampling=None):
    """The bytes of each new token."""
    engine = Engine(loaded)
    job = TextJob(engine, TextRequest(prompt, max_new_tokens, sampling or Sampling())).job
    while job.finish is None:
        engine.step()
    pieces = zip(job.new_ids, job.bytes_before, strict=True)
    return [engine.vocabulary.pieces[token][before:] for token, before in pieces]


def test_prompt_is_never_part_of_the_text_and_the_model_is_left_as_it_was(trained):
    before = {name: value.clone() for name, value in trained.model.state_dict().items()}
    for prompt in ("中国的首都是", "The capital of France is", "The capi", ""):
        text = generate(trained, prompt, 5)
        assert not (prompt and text.startswith(prompt))
    assert not trained.model.training
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())


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
    assert b"".join(stream_bytes(loaded, "首都", 2)) == "黎".encode()[:2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_control_tokens_and_padding_rows_are_never_written(bigram, border_tokenizer, temperature, logits):
    forbidden = sorted(border_tokenizer.control_ids - {border_tokenizer.end_id}) + list(range(291, len(logits)))
    logits[:, forbidden] = 30.0
    logits[:, border_tokenizer.end_id] = -30.0
    produced = list(stream_bytes(bigram(logits), "首都", 40, Sampling(temperature, seed=3)))
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
    draws = [b"".join(stream_bytes(loaded, "首都", 50, Sampling(1.0, seed=seed))) for seed in range(4)]
    share = sum(text.count(b"lan") for text in draws) / 200
    assert share == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.1)


def test_prompt_and_answer_fill_the_model_and_a_prompt_without_room_for_an_answer_is_refused(
    bigram, border_tokenizer, logits
):
    # ` Rom` ends a prompt with three tokens that are given back and, here, taken again: they count all the same.
    logits[:, border_tokenizer.encode_text(" Rome")[0]] = logits[:, border_tokenizer.end_id] = -30.0
    loaded = bigram(logits, max_seq_len=8)
    assert len(stream_bytes(loaded, "xxx Rom", 5)) == 1
    with pytest.raises(UsageError, match=r"prompt has 8 tokens; prompt and answer together may have 8 .*Shorten"):
        generate(loaded, "xxxx Rom", 5)


# ---- prompts that end inside a token ------------------------------------------------------------------------


def pieces(tokenizer, ids):
    return [tokenizer.token_bytes(token).decode() for token in ids]


@pytest.mark.parametrize(
    ("prompt", "kept", "given_back"),
    [
        ("首都是", ["首都"], ["是"]),
        # ` Rom` is three tokens, and ` Rome` is one that goes on from there; nothing goes on from `a Rom`.
        ("a Rom", ["a"], [" ", "Ro", "m"]),
        ("是", [], ["是"]),
        ("", [], []),
        *((prompt, None, None) for prompt in ("城市是", " Rome", "x y\n", "是北", "🌍")),
    ],
)
def test_healed_prompt_gives_back_every_token_that_one_token_spells_and_goes_on_from(
    border_tokenizer, prompt, kept, given_back
):
    healed = heal(prompt, border_tokenizer, Vocabulary(border_tokenizer, border_tokenizer.vocab_size))
    assert healed.ids[0] == border_tokenizer.begin_id
    spelled = b"".join(map(border_tokenizer.token_bytes, [*healed.ids[1:], *healed.given_back]))
    assert spelled == prompt.encode()
    if kept is not None:
        assert pieces(border_tokenizer, healed.ids[1:]) == kept
        assert pieces(border_tokenizer, healed.given_back) == given_back


def test_scoring_starts_before_the_token_that_spans_the_border(border_tokenizer):
    scored = split_scored("首都是", ["北京"], border_tokenizer)
    (text,) = scored.texts
    assert pieces(border_tokenizer, text[1 : scored.shared]) == ["首都"]
    assert pieces(border_tokenizer, text[scored.shared :]) == ["是北京"]
    assert scored.tail == "是".encode()
    # All continuations start at the same place, whether they merge or not.
    together = split_scored("首都是", ["北京", "Rome", "是北京"], border_tokenizer)
    assert {tuple(text[: together.shared]) for text in together.texts} == {tuple(together.texts[0][: together.shared])}
    alone = [split_scored("首都是", [text], border_tokenizer) for text in ("北京", "Rome", "是北京")]
    assert {(one.shared, one.tail) for one in (scored, together, *alone)} == {(scored.shared, scored.tail)}
    # ` Rom` is three tokens, ` Rome` is one: the whole prompt is respelled.
    assert len(border_tokenizer.encode_text(" Rom")) == 3
    scored = split_scored(" Rom", ["e", "a"], border_tokenizer)
    assert (scored.shared, scored.tail) == (1, b" Rom")


def test_vocabulary_forbids_all_that_writes_no_text_but_the_end(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    control_but_end = border_tokenizer.control_ids - {border_tokenizer.end_id}
    assert set(vocabulary.never.tolist()) == control_but_end | set(range(border_tokenizer.vocab_size, 320))


def test_search_for_tokens_finds_what_a_look_at_every_token_finds_on_both_sides_of_the_tail(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    found = {vocabulary.pieces[token] for token in vocabulary.continuing("是".encode())}
    assert found == {"是".encode()[:1], "是".encode()[:2], "是".encode(), "是北京".encode()}
    for tail in (b" ", b" Rome", b"\xe6", "是".encode(), "是北京".encode(), b"Romeland", b"\xff", b"nowhere"):
        whole = list(enumerate(vocabulary.pieces))
        beginning = [token for token, piece in whole if piece.startswith(tail)]
        assert vocabulary.starting_with(tail) == beginning
        assert vocabulary.continuing(tail) == [
            token for token, piece in whole if piece and (piece.startswith(tail) or tail.startswith(piece))
        ]


# ---- whole characters, stop strings -------------------------------------------------------------------------


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
        pieces = pieces_of(TextRequest("hello world", 30, ANY, stop=(stop, "never written")))
        assert "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
        assert pieces[-1].finish == "stop"


def test_what_looks_like_a_stop_string_but_is_none_is_not_lost():
    whole = text_of(TextRequest("hello world", 30, ANY))
    assert text_of(TextRequest("hello world", 30, ANY, stop=(whole[-2:] + "x", whole[4:8] + "☃"))) == whole


def test_many_requests_at_once_give_the_texts_of_each_alone():
    requests = [
        TextRequest("hello world 中国的首都"[:length], 12, ANY, heal=length % 2 == 0) for length in range(3, 15)
    ]
    found = {number: text for number, text, _ in complete(Engine(tiny_model()), requests)}
    assert found == {number: text_of(request) for number, request in enumerate(requests)}


def test_ids_are_taken_as_they_are():
    tokenizer = tiny_model().tokenizer
    ids = [tokenizer.begin_id, *tokenizer.encode_text("hello")]
    assert text_of(TextRequest(ids, 8, ANY)) == text_of(TextRequest("hello", 8, ANY, heal=False))


def test_megabytes_that_cannot_fit_are_refused_before_they_are_encoded(monkeypatch):
    tokenizer = tiny_model().tokenizer
    for text in ("hello world, 中国的首都是北京。\n    return", " " * 40, "中" * 20, "e\u0301"):
        assert 0 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode_text(text))
    monkeypatch.setattr(tokenizer, "encode_text", None)
    with pytest.raises(PromptTooLongError, match=r"at least [\d,]+ tokens; prompt and answer together may have 160"):
        pieces_of(TextRequest("x" * 3_000_000))


def test_an_id_named_as_an_end_ends_the_text():
    job = next(iter(complete(Engine(tiny_model()), [TextRequest("hello", 20, ANY)])))[2]
    end = job.new_ids[5]
    pieces = pieces_of(TextRequest("hello", 20, ANY, end_ids=(end,)))
    assert pieces[-1].finish == "stop"
    assert [token for piece in pieces for token in piece.tokens] == job.new_ids[: job.new_ids.index(end)]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (TextRequest("a", 5, stop=("",)), "stop string is empty"),
        (TextRequest("a", 5, stop=("x",) * 17), "17 stop strings"),
        (TextRequest("a", 0), "max_new_tokens is 0"),
        (TextRequest("a" * 5000, 5), "tokens; prompt and answer together may have 160"),
        (TextRequest([], 5), "no tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_cannot_be_served_is_refused(request_, words):
    with pytest.raises(UsageError, match=words):
        pieces_of(request_)


# ---- draws follow the distribution and depend on nothing but seed and number --------------------------------


LOGITS = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))
CPU = torch.device("cpu")


def frequencies(sampling: Sampling, draws: int = 4000) -> list[float]:
    picker = Picker([sampling] * draws, CPU)
    found = Counter(picker.pick(LOGITS.repeat(draws, 1), range(draws)).tolist())
    return [found[token] / draws for token in range(4)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(temperature=0.5), [0.25, 0.0625, 0.0225, 0.01]),
        (Sampling(temperature=1, top_k=2), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.7), [0.5, 0.25, 0, 0]),
        (Sampling(temperature=1, top_p=0.76), [0.5, 0.25, 0.15, 0]),
        (Sampling(temperature=1, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(temperature=1, min_p=0.3), [0.5, 0.25, 0.15, 0]),
        (Sampling(temperature=1, top_k=3, top_p=0.8), [0.5, 0.25, 0, 0]),
        (Sampling(), [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_is_left(sampling, expected):
    wanted = [share / sum(expected) for share in expected]
    found = frequencies(sampling)
    assert all(abs(have - want) < 0.03 for have, want in zip(found, wanted, strict=True))
    assert all(have == 0 for have, want in zip(found, wanted, strict=True) if want == 0)


def test_a_draw_does_not_depend_on_its_neighbours():
    rows = [Sampling(temperature=1, seed=3), Sampling(temperature=0.7, top_k=2, seed=4), Sampling()]
    rows.append(Sampling(temperature=1.5, top_p=0.6, min_p=0.1, seed=3))
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)) * 2
    for number in range(50):
        alone = [int(Picker([row], CPU).pick(logits[at : at + 1].clone(), [number])) for at, row in enumerate(rows)]
        assert Picker(rows, CPU).pick(logits.clone(), [number] * 4).tolist() == alone


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_number():
    numbers = [uniform(seed, number) for seed in range(50) for number in range(50)]
    assert all(0 <= each < 1 for each in numbers)
    assert len(set(numbers)) == 2500
    shares = Counter(int(each * 10) for each in numbers)
    assert all(200 <= shares[tenth] <= 300 for tenth in range(10))


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
