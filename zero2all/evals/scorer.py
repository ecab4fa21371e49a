"""The one primitive of scoring: log P(continuation | prompt), as text.

A continuation is counted in its usual spelling, the prompt in all of its spellings, so that the probabilities of
different continuations never add up to more than one.
"""

from __future__ import annotations

import math

from torch import Tensor

from zero2all.infer.boundary import split_scored
from zero2all.infer.engine import Engine

NEGLIGIBLE = 1e-3
"""Ways to begin the end of a prompt that are less likely than this, and that no continuation takes, are not followed
to their end."""


def continuation_log_probabilities(engine: Engine, prompt: str, continuations: list[str]) -> list[float]:
    """Natural log of P(continuation | prompt) for each, right also where a token spans the border."""
    scored = split_scored(prompt, continuations, engine.tokenizer)
    scores = engine.score(scored.texts, [scored.shared] * len(scored.texts))
    spelled = 1.0
    if scored.tail:
        context, paths = scored.texts[0][: scored.shared], [text[scored.shared :] for text in scored.texts]
        spelled = _spelling_probability(engine, context, scored.tail, engine.distribution(context).exp(), paths)
    return [min(0.0, math.fsum(each) - math.log(spelled)) if spelled > 0 else -math.inf for each in scores]


def _spelling_probability(
    engine: Engine, context: list[int], tail: bytes, following: Tensor, paths: list[list[int]], reached: float = 1.0
) -> float:
    """P(the text after `context` begins with `tail`), over all ways to spell it.

    `following` is P(next token). `paths` are the tokens of the continuations from here on: they are always followed,
    so that none of them can be likelier than this sum. `reached` is how likely it was to come here.
    """
    if not tail:
        return 1.0
    total = 0.0
    for token in engine.vocabulary.continuing(tail):
        probability, piece = float(following[token]), engine.vocabulary.pieces[token]
        ahead = [path[1:] for path in paths if path[:1] == [token]]
        if len(piece) >= len(tail):
            total += probability
        elif ahead or reached * probability > NEGLIGIBLE:
            there = [*context, token]
            after = engine.distribution(there).exp()
            total += probability * _spelling_probability(
                engine, there, tail[len(piece) :], after, ahead, reached * probability
            )
    return total
