"""What is learned from odd text and how it is split, and what is said when it cannot be learned."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from benchmarks import bpe_reference as reference
from benchmarks.bpe_reference import ReferenceEncoder
from tests.tokenizer.bpe.bpe_texts import chinese_like, in_parts
from zero2all.common.errors import UsageError
from zero2all.tokenizer.bpe import counting
from zero2all.tokenizer.bpe.learn import Memory
from zero2all.tokenizer.bpe.scan import BREAK, LETTER, NEWLINE, NUMBER, OTHER, SPACE, character_kinds, pretokens
from zero2all.tokenizer.save import tokenizer_json_of

TEXTS = chinese_like(seed=5, clauses=1000)


def test_layout_of_the_vocabulary(learn):
    learned = learn(TEXTS, 900)
    assert learned.pieces[:256] == [bytes([byte]) for byte in range(256)]
    assert (len(learned.pieces), len(learned.merges)) == (900, 900 - 256)
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
    backend = Tokenizer.from_str(json.dumps(tokenizer_json_of(learned.pieces, learned.merges, [])))
    encoder = ReferenceEncoder(learned.merges)
    odd = ["", "\x00\x00a", "龘龘 é😀\U00020000 don't", "\n\n  x\r\n", chinese_like(seed=77, clauses=20)[0]]
    for text in [*TEXTS[:20], *odd]:
        ids = backend.encode(text).ids
        assert ids == encoder.encode(text)
        assert b"".join(learned.pieces[place] for place in ids).decode() == text


def test_nul_is_text_and_a_control_token_spelled_only_after_normalising_is_taken_out(learn):
    assert learn(["\x00\x01\x00\x01" * 50], 258).pieces[256:] == [b"\x00\x01", b"\x00\x01\x00\x01"]
    learned = learn(["天地＜|end|＞" * 40], 261, forbidden=["<|end|>"], normalisation="nfkc")
    assert learned.facts["text"]["control_strings_removed"] == 40
    assert learned.facts["text"]["documents_changed_by_normalisation"] == 1


def test_no_room_for_anything_but_bytes_or_in_memory(learn):
    with pytest.raises(UsageError, match="too small"):
        learn(TEXTS, 256)
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
    assert learn(in_parts(TEXTS, 3), 700, exact=False, threads=2, say=messages.append).merges == learned.merges


def test_long_documents_are_split_only_where_no_pre_token_is(learn, monkeypatch):
    text = "".join(["天地，玄黄\n", "  indented\n\n", "word word\n", "\u3000\u3000全角\n"] * 200)
    whole = learn([text], 285)
    monkeypatch.setattr(counting.batches, "__defaults__", (50,))
    learned = learn([text], 285)
    assert learned.merges == whole.merges
    assert learned.facts["text"] == whole.facts["text"]


# Everything that some alternative of the pattern treats in its own way, and the case pairs of the English endings.
TELLING = "'sStTrReEvVmMlLdDſ中文，。 \t\n\r\v\x1c\u3000\xa0\x85\u2028aZ1２٣½Ⅷ!?-_ªé\u0301😀\U00020000\x00\u180e\u200b"


def test_kinds_are_those_of_the_library():
    """For every code point of the two planes that have scripts, all borders between kinds, and many of the others."""
    all_kinds = character_kinds()
    borders = np.flatnonzero(np.diff(all_kinds)).tolist()
    chosen = {*range(0x20000), *range(0x20000, 0x110000, 61), *borders, *(border + 1 for border in borders)}
    code_points = sorted(code for code in chosen if not 0xD800 <= code < 0xE000)
    text = "".join(map(chr, code_points))
    kinds = all_kinds[code_points]
    for pattern, ours in (
        (r"\p{L}+", kinds == LETTER),
        (r"\p{N}+", kinds == NUMBER),
        (r"\s+", (kinds == SPACE) | (kinds == NEWLINE)),
        (r"[\r\n]+", kinds == NEWLINE),
        (r"[^\s\p{L}\p{N}]+", kinds == OTHER),
    ):
        theirs = np.ones(len(text), bool)
        for _, (start, end) in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text):
            theirs[start:end] = False
        assert np.array_equal(ours, theirs), pattern
    assert (character_kinds()[0xD800:0xE000] == BREAK).all()


@settings(max_examples=800, deadline=None)
@given(st.text(alphabet=TELLING, max_size=14))
def test_telling_characters_in_any_order(text):
    assert pretokens(text) == reference.pretokens(text)


def test_random_unicode():
    chance = random.Random(1)
    for _ in range(150):
        codes = [chance.randrange(0x110000 if chance.random() < 0.5 else 0x3100) for _ in range(80)]
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        assert pretokens(text) == reference.pretokens(text)


def test_any_character_after_an_apostrophe():
    for start in range(0, 0x3000, 0x400):
        text = "".join(f"'{chr(code)} " for code in range(start, start + 0x400))
        assert pretokens(text) == reference.pretokens(text)
