"""Where a prompt ends in the middle of a token.

A model trained on `中国|的首都|是北京` has never seen `是` alone before `北京`, so the tokens of the prompt
`中国的首都是` would put it on unknown ground. Two remedies, both exact about the text:

`heal` gives back the last tokens of a prompt; generation must first reproduce their bytes, with any tokens that do.
`split_scored` tokenises prompt and continuation as one text; scoring starts at the first token that differs from the
prompt's own, and the probability of the part of those tokens that belongs to the prompt is divided out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.tokenizer.load import Tokenizer


class Vocabulary:
    """The bytes of every token, laid out so that 'which tokens may come next' is one pass over a table."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer, self.rows = tokenizer, rows
        control = tokenizer.control_ids
        self.pieces = [
            b"" if token in control else tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)
        ]
        never = [token for token in range(rows) if token >= tokenizer.vocab_size]
        never += [token for token in control if token != tokenizer.end_id]
        self.never = torch.tensor(sorted(never), dtype=torch.long)
        """Ids that text generation must not produce: padding rows and control tokens other than the end."""

    def continuing(self, tail: bytes) -> Tensor:
        """Ids whose bytes begin with `tail`, or with which `tail` begins."""
        ids = [token for token, piece in enumerate(self.pieces) if piece and _agree(piece, tail)]
        return torch.tensor(ids, dtype=torch.long)


@dataclass(frozen=True)
class HealedPrompt:
    """Tokens to feed, and the bytes of the prompt that generation has to reproduce first."""

    ids: list[int]
    tail: bytes


def heal(prompt: str, tokenizer: Tokenizer) -> HealedPrompt:
    """Begin-of-text and the prompt's tokens without the last one, whose bytes become the tail."""
    opening = [tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id]
    ids = tokenizer.encode_text(prompt)
    if not ids:
        return HealedPrompt(opening, b"")
    return HealedPrompt([*opening, *ids[:-1]], tokenizer.token_bytes(ids[-1]))


@dataclass(frozen=True)
class ScoredText:
    """The tokens of prompt and continuation together, and where scoring starts.

    `tokens[:shared]` is what they have in common with the prompt's own tokens; `tail` are the bytes of the prompt that
    lie beyond, inside tokens that also carry the continuation. P(continuation | prompt) is then
    P(tokens[shared:] | tokens[:shared]) / P(some tokens that spell `tail` | tokens[:shared]).
    """

    tokens: list[int]
    shared: int
    tail: bytes


def split_scored(prompt: str, continuation: str, tokenizer: Tokenizer) -> ScoredText:
    """The tokens to score for log P(continuation | prompt)."""
    opening = [tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id]
    before = opening + tokenizer.encode_text(prompt)
    whole = opening + tokenizer.encode_text(prompt + continuation)
    shared = 1
    while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
        shared += 1
    tail = b"".join(tokenizer.token_bytes(token) for token in before[shared:])
    return ScoredText(whole, shared, tail)


def _agree(piece: bytes, tail: bytes) -> bool:
    return piece.startswith(tail) or tail.startswith(piece)
