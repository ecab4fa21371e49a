"""What is learned from odd text, and what is said when it cannot be learned."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.bpe_reference import ReferenceEncoder
from tests.tokenizer.bpe.bpe_texts import TextList, chinese_like, in_parts
from zero2all.common.errors import UsageError
from zero2all.tokenizer.bpe.learn import Memory

TEXTS = chinese_like(seed=5, clauses=1000)


def test_layout_of_the_vocabulary(learn):
    learned = learn(TEXTS, 900)
    assert learned.pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert len(learned.pieces) == 900
    assert len(learned.merges) == 900 - 256
    for number, (left, right) in enumerate(learned.merges):
        assert max(left, right) < 256 + number
        assert learned.pieces[256 + number] == learned.pieces[left] + learned.pieces[right]
    assert len(set(learned.pieces)) == 900
    for piece in learned.pieces[256 + 20 :]:
        whole = piece.decode("utf-8", "ignore").encode() == piece
        assert whole or len(piece) < 4, "only bytes and prefixes may be parts of characters"


def test_a_byte_level_encoder_gives_what_the_merges_say(learn):
    """The library's encoder, loaded with our pieces, agrees with the plain one on seen, unseen and odd text."""
    learned = learn(TEXTS, 900)
    visible = _byte_alphabet()
    names = ["".join(visible[byte] for byte in piece) for piece in learned.pieces]
    model = models.BPE(
        {name: place for place, name in enumerate(names)},
        [(names[left], names[right]) for left, right in learned.merges],
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Sequence([_pattern(), pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    encoder = ReferenceEncoder(learned.merges)
    odd = ["", "\x00\x00a", "龘龘 é😀\U00020000 don't", "\n\n  x\r\n", chinese_like(seed=77, clauses=20)[0]]
    for text in [*TEXTS[:20], *odd]:
        ids = backend.encode(text).ids
        assert ids == encoder.encode(text)
        assert b"".join(learned.pieces[place] for place in ids).decode() == text


def test_nul_and_control_bytes_are_text(learn):
    learned = learn(["\x00\x01\x00\x01" * 50], 258)
    assert learned.pieces[256:] == [b"\x00\x01", b"\x00\x01\x00\x01"]


def test_a_control_token_spelled_only_after_normalising_is_taken_out(learn):
    learned = learn(["天地＜|end|＞" * 40], 261, forbidden=["<|end|>"], normalisation="nfkc")
    assert learned.facts["text"]["control_strings_removed"] == 40
    assert learned.facts["text"]["documents_changed_by_normalisation"] == 1


def test_no_room_for_anything_but_bytes(learn):
    with pytest.raises(UsageError, match="too small"):
        learn(TEXTS, 256)


def test_memory_limit_below_what_the_program_needs(learn):
    with pytest.raises(UsageError, match=r"too small to hold the alphabet.*--max-memory to"):
        learn(TEXTS, 700, max_memory=64_000_000)


def test_words_that_do_not_fit_are_an_error_or_by_leave_an_approximation(learn, monkeypatch):
    needed = 2 * learn(TEXTS, 700).facts["symbols"]
    monkeypatch.setattr(Memory, "for_words", lambda _: needed * 3 // 4)
    with pytest.raises(UsageError, match=r"too small for an exact result.*approximate"):
        learn(TEXTS, 700)
    messages: list[str] = []
    learned = learn(TEXTS, 700, exact=False, say=messages.append)
    assert not learned.exact
    assert learned.facts["dropped_pieces"] > 0
    assert "APPROXIMATE" in messages[0]
    again = learn(in_parts(TEXTS, 3), 700, exact=False, threads=2, say=messages.append)
    assert again.merges == learned.merges


def test_long_documents_are_split_only_where_no_pre_token_is(learn, monkeypatch):
    from zero2all.tokenizer.bpe import counting

    lines = ["天地，玄黄\n", "  indented\n\n", "word word\n", "\u3000\u3000全角\n"] * 200
    text = "".join(lines)
    whole = learn([text], 285)
    monkeypatch.setattr(counting.batches, "__defaults__", (50,))
    parts = [TextList([text])]
    learned = learn(parts, 285)
    assert learned.merges == whole.merges
    assert learned.facts["text"] == whole.facts["text"]


def _pattern():
    from tokenizers import Regex

    from zero2all.tokenizer.config import PRETOKEN_PATTERN

    return pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), "isolated")


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
