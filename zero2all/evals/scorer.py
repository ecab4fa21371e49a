"""The one primitive of scoring: log P(continuation | prompt), as text.

Several continuations of one prompt are scored in one padded forward pass; under a causal mask, padding on the right
changes nothing on its left. A continuation is counted in its usual spelling, the prompt in all of its spellings, so
that the probabilities of different continuations never add up to more than one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.infer.boundary import Vocabulary, split_scored
from zero2all.infer.load import LoadedModel

NEGLIGIBLE = 1e-3
"""Ways to begin the end of a prompt that are less likely than this, and that no continuation takes, are not followed
to their end."""


@torch.no_grad()
def continuation_log_probabilities(
    loaded: LoadedModel, prompt: str, continuations: list[str], vocabulary: Vocabulary
) -> list[float]:
    """Natural log of P(continuation | prompt) for each, right also where a token spans the border."""
    scored = split_scored(prompt, continuations, loaded.tokenizer)
    longest, limit = max(map(len, scored.texts)), loaded.model.config.max_seq_len
    if longest > limit:
        raise UsageError(
            f"Prompt and continuation have {longest} tokens; the model was made for {limit} (model.max_seq_len). "
            f"Shorten {prompt[:40]!r}…"
        )
    rows = [text + [loaded.tokenizer.end_id] * (longest - len(text)) for text in scored.texts]
    log_probabilities = _log_probabilities(loaded, rows)  # (B, T, V)
    spelled = _spelling_probability(
        loaded,
        scored.texts[0][: scored.shared],
        scored.tail,
        log_probabilities[0, scored.shared - 1].exp(),
        [text[scored.shared :] for text in scored.texts],
        vocabulary,
    )
    found = []
    for text, table in zip(scored.texts, log_probabilities, strict=True):
        wanted = torch.tensor(text[scored.shared :])
        places = torch.arange(scored.shared - 1, len(text) - 1)
        whole = float(table[places, wanted].double().sum())
        found.append(min(0.0, whole - math.log(spelled)) if spelled > 0 else -math.inf)
    return found


def _spelling_probability(
    loaded: LoadedModel,
    context: list[int],
    tail: bytes,
    following: Tensor,
    paths: list[list[int]],
    vocabulary: Vocabulary,
    reached: float = 1.0,
) -> float:
    """P(the text after `context` begins with `tail`), over all ways to spell it.

    `following` is P(next token). `paths` are the tokens of the continuations from here on: they are always followed,
    so that none of them can be likelier than this sum. `reached` is how likely it was to come here.
    """
    if not tail:
        return 1.0
    total = 0.0
    for token in vocabulary.continuing(tail):
        probability, piece = float(following[token]), vocabulary.pieces[token]
        ahead = [path[1:] for path in paths if path[:1] == [token]]
        if len(piece) >= len(tail):
            total += probability
        elif ahead or reached * probability > NEGLIGIBLE:
            there = [*context, token]
            after = _log_probabilities(loaded, [there])[0, -1].exp()
            total += probability * _spelling_probability(
                loaded, there, tail[len(piece) :], after, ahead, vocabulary, reached * probability
            )
    return total


def _log_probabilities(loaded: LoadedModel, rows: list[list[int]]) -> Tensor:
    """Log of P(next token) after every token of every row: (B, T) ids -> (B, T, V)."""
    ids = torch.tensor(rows, device=loaded.device)
    return loaded.model.logits(loaded.model(ids)).float().log_softmax(dim=-1).cpu()
