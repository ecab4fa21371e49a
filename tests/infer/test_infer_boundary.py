"""Prompts that end inside a token of the text they begin."""

import pytest

from zero2all.infer.boundary import Vocabulary, heal, split_scored


def pieces(tokenizer, ids):
    return [tokenizer.token_bytes(token).decode() for token in ids]


def vocabulary_of(tokenizer):
    return Vocabulary(tokenizer, tokenizer.vocab_size)


def test_healed_prompt_gives_back_its_last_token(border_tokenizer):
    healed = heal("首都是", border_tokenizer, vocabulary_of(border_tokenizer))
    assert healed.ids[0] == border_tokenizer.begin_id
    assert pieces(border_tokenizer, healed.ids[1:]) == ["首都"]
    assert pieces(border_tokenizer, healed.given_back) == ["是"]


def test_healed_prompt_gives_back_every_token_that_one_token_spells_and_goes_on_from(border_tokenizer):
    vocabulary = vocabulary_of(border_tokenizer)
    # ` Rom` is three tokens, and ` Rome` is one that goes on from there; nothing goes on from `a Rom`.
    healed = heal("a Rom", border_tokenizer, vocabulary)
    assert pieces(border_tokenizer, healed.ids[1:]) == ["a"]
    assert pieces(border_tokenizer, healed.given_back) == [" ", "Ro", "m"]


def test_healed_prompt_of_one_token_is_given_back_whole(border_tokenizer):
    healed = heal("是", border_tokenizer, vocabulary_of(border_tokenizer))
    assert healed.ids == [border_tokenizer.begin_id]
    assert pieces(border_tokenizer, healed.given_back) == ["是"]


def test_empty_prompt_has_nothing_to_heal(border_tokenizer):
    healed = heal("", border_tokenizer, vocabulary_of(border_tokenizer))
    assert (healed.ids, healed.given_back) == ([border_tokenizer.begin_id], [])


@pytest.mark.parametrize("prompt", ["首都是", "城市是", " Rome", "x y\n", "是北", "🌍"])
def test_healed_ids_and_what_is_given_back_spell_the_prompt(border_tokenizer, prompt):
    healed = heal(prompt, border_tokenizer, vocabulary_of(border_tokenizer))
    spelled = b"".join(map(border_tokenizer.token_bytes, [*healed.ids[1:], *healed.given_back]))
    assert spelled == prompt.encode()


def test_scoring_starts_before_the_token_that_spans_the_border(border_tokenizer):
    scored = split_scored("首都是", ["北京"], border_tokenizer)
    (text,) = scored.texts
    assert pieces(border_tokenizer, text[1 : scored.shared]) == ["首都"]
    assert pieces(border_tokenizer, text[scored.shared :]) == ["是北京"]
    assert scored.tail == "是".encode()


def test_all_continuations_start_at_the_same_place_whether_they_merge_or_not(border_tokenizer):
    scored = split_scored("首都是", ["北京", "Rome", "是北京"], border_tokenizer)
    assert {tuple(text[: scored.shared]) for text in scored.texts} == {tuple(scored.texts[0][: scored.shared])}
    assert scored.tail == "是".encode()
    alone = [split_scored("首都是", [text], border_tokenizer) for text in ("北京", "Rome", "是北京")]
    assert {(one.shared, one.tail) for one in alone} == {(scored.shared, scored.tail)}


def test_scoring_goes_back_as_far_as_the_tokens_differ(border_tokenizer):
    # ` Rom` is three tokens, ` Rome` is one: the whole prompt is respelled.
    assert len(border_tokenizer.encode_text(" Rom")) == 3
    scored = split_scored(" Rom", ["e", "a"], border_tokenizer)
    assert (scored.shared, scored.tail) == (1, b" Rom")


def test_vocabulary_finds_tokens_on_both_sides_of_the_tail(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    found = {vocabulary.pieces[token] for token in vocabulary.continuing("是".encode())}
    assert found == {"是".encode()[:1], "是".encode()[:2], "是".encode(), "是北京".encode()}


def test_vocabulary_forbids_all_that_writes_no_text_but_the_end(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    control_but_end = border_tokenizer.control_ids - {border_tokenizer.end_id}
    assert set(vocabulary.never.tolist()) == control_but_end | set(range(border_tokenizer.vocab_size, 320))


def test_search_for_tokens_finds_what_a_look_at_every_token_finds(border_tokenizer):
    vocabulary = Vocabulary(border_tokenizer, 320)
    for tail in (b" ", b" Rome", b"\xe6", "是".encode(), "是北京".encode(), b"Romeland", b"\xff", b"nowhere"):
        whole = list(enumerate(vocabulary.pieces))
        beginning = [token for token, piece in whole if piece.startswith(tail)]
        assert vocabulary.starting_with(tail) == beginning
        assert vocabulary.continuing(tail) == [
            token for token, piece in whole if piece and (piece.startswith(tail) or tail.startswith(piece))
        ]
