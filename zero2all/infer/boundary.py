"""Prompts that end in the middle of a token.

A model trained on `中国|的首都|是北京` has never seen `是` alone before `北京`, so the tokens of the prompt
`中国的首都是` would be new to it. Both remedies give back the last tokens of the prompt and are exact about the text:

`heal` is for generation, which must first reproduce the bytes given back, and may do so with a token that reaches
beyond the prompt.
`split_scored` is for scoring: prompt and continuation are tokenised as one text, scoring starts before the last token
of the prompt (earlier, where even that one comes out differently), and the probability of the part that belongs to the
prompt is divided out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import torch

from zero2all.tokenizer.load import Tokenizer

MAX_GIVEN_BACK = 4


class Vocabulary:
    """The bytes of every token, and their order, so that 'which tokens may come next' is a search in it."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.pieces = [tokenizer.text_pieces.get(token, b"") for token in range(rows)]
        """What each row of the model writes; nothing for control tokens, unused ids and padding rows."""
        silent = [token for token, piece in enumerate(self.pieces) if not piece and token not in tokenizer.end_ids]
        self.never = torch.tensor(silent, dtype=torch.long)
        """Ids that text generation must not produce: all that write nothing, but for the end of the text."""

        self._order = sorted(range(rows), key=self.pieces.__getitem__)
        self._sorted = [self.pieces[token] for token in self._order]

    def starting_with(self, tail: bytes) -> list[int]:
        """Ids whose bytes begin with `tail`."""
        first = last = bisect_left(self._sorted, tail)
        while last < len(self._sorted) and self._sorted[last].startswith(tail):
            last += 1
        return sorted(self._order[first:last])

    def continuing(self, tail: bytes) -> list[int]:
        """Ids whose bytes begin with `tail`, or with which `tail` begins."""
        beginnings = (tail[:length] for length in range(1, len(tail)))
        shorter = (self._order[_spelled(self._sorted, piece)] for piece in beginnings)
        return sorted([*self.starting_with(tail), *(token for tokens in shorter for token in tokens)])


@dataclass(frozen=True)
class HealedPrompt:
    """Tokens to feed, and the last tokens of the prompt, which generation may replace by one that spans the border."""

    ids: list[int]
    given_back: list[int]


def heal(prompt: str, tokenizer: Tokenizer, vocabulary: Vocabulary) -> HealedPrompt:
    """Give back the last token, and more where one token of the vocabulary begins with all of them and goes further.

    Generation then takes, at each step, either the prompt's own next token or a token that spells all that is left of
    the prompt and may reach beyond it. Shorter tokens are not offered: they would lead away from how the text is
    tokenised in training.
    """
    ids = tokenizer.encode_text(prompt)
    count = min(1, len(ids))
    for longer in range(2, min(MAX_GIVEN_BACK, len(ids)) + 1):
        tail = b"".join(vocabulary.pieces[token] for token in ids[-longer:])
        if any(vocabulary.pieces[token] != tail for token in vocabulary.starting_with(tail)):
            count = longer
    border = len(ids) - count
    return HealedPrompt([opening_id(tokenizer), *ids[:border]], ids[border:])


@dataclass(frozen=True)
class ScoredTexts:
    """The tokens of one prompt with each of its continuations, and where scoring starts.

    All of `texts` have their first `shared` tokens in common with the prompt; `tail` are the bytes of the prompt that
    lie beyond. P(continuation | prompt) is then
    P(text[shared:] | text[:shared]) / P(some tokens that spell `tail` | text[:shared]).
    One start for all of them, so that the probabilities of different continuations can be compared and added.
    """

    texts: list[list[int]]
    shared: int
    tail: bytes


def split_scored(prompt: str, continuations: list[str], tokenizer: Tokenizer) -> ScoredTexts:
    """The tokens to score for log P(continuation | prompt)."""
    opening = opening_id(tokenizer)
    before = tokenizer.encode_text(prompt)
    texts = [[opening, *tokenizer.encode_text(prompt + continuation)] for continuation in continuations]
    shared = _common_length([[opening, *before[:-1]], *texts])
    tail = b"".join(tokenizer.token_bytes(token) for token in before[shared - 1 :])
    return ScoredTexts(texts, shared, tail)


def opening_id(tokenizer: Tokenizer) -> int:
    """The id before the first token of a document: the begin token or, where there is none, the end token."""
    return tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id


def _spelled(pieces: list[bytes], piece: bytes) -> slice:
    """The places of `piece` in sorted pieces: several ids may be spelled alike."""
    return slice(bisect_left(pieces, piece), bisect_right(pieces, piece))


def _common_length(rows: list[list[int]]) -> int:
    """How many leading tokens all rows share."""
    length = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length
