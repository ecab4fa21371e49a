"""The native scanner splits as the library's regex engine does, on every code point and combination tried."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from benchmarks import bpe_reference as reference
from zero2all.tokenizer.bpe.scan import BREAK, LETTER, NEWLINE, NUMBER, OTHER, SPACE, character_kinds, pretokens

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
        outside = pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text)
        theirs = np.ones(len(text), bool)
        for _, (start, end) in outside:
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
