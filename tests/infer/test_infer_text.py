"""Text in, text out: whole characters, stop strings, healed prompts."""

from __future__ import annotations

import pytest

from tests.infer.tiny import tiny_model
from zero2all.common.errors import UsageError
from zero2all.infer.engine import Engine, PromptTooLongError
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import Piece, TextRequest, complete, stream

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
    assert 0 < last.usage.first_token_seconds <= last.usage.seconds
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
