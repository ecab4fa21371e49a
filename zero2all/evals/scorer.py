"""The one primitive of scoring: log P(continuation | prompt), as text.

Several continuations of one prompt are scored in one padded forward pass; under a causal mask, padding on the right
changes nothing on its left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zero2all.evals.boundary import Vocabulary, split_scored
from zero2all.evals.load import LoadedModel

NEGLIGIBLE = 1e-3
"""Ways to spell the end of a prompt whose first token is less likely than this are not followed further."""


@torch.no_grad()
def continuation_log_probabilities(
    loaded: LoadedModel, prompt: str, continuations: list[str], vocabulary: Vocabulary
) -> list[float]:
    """Natural log of P(continuation | prompt) for each, right also where a token spans the border."""
    texts = [split_scored(prompt, continuation, loaded.tokenizer) for continuation in continuations]
    longest = max(len(text.tokens) for text in texts)
    rows = [text.tokens + [loaded.tokenizer.end_id] * (longest - len(text.tokens)) for text in texts]
    ids = torch.tensor(rows, device=loaded.device)  # (B, T)
    log_probabilities = loaded.model.logits(loaded.model(ids)).float().log_softmax(dim=-1).cpu()  # (B, T, V)
    found = []
    for text, table in zip(texts, log_probabilities, strict=True):
        wanted = torch.tensor(text.tokens[text.shared :])
        places = torch.arange(text.shared - 1, len(text.tokens) - 1)
        whole = float(table[places, wanted].double().sum())
        spelled = _spelling_probability(
            loaded, text.tokens[: text.shared], text.tail, table[text.shared - 1].exp(), vocabulary
        )
        found.append(whole - math.log(max(spelled, 1e-300)))
    return found


def _spelling_probability(
    loaded: LoadedModel, context: list[int], tail: bytes, following: Tensor, vocabulary: Vocabulary
) -> float:
    """P(the text after `context` begins with `tail`), over all ways to spell it; `following` is P(next token)."""
    if not tail:
        return 1.0
    total = 0.0
    for token in vocabulary.continuing(tail).tolist():
        probability, piece = float(following[token]), vocabulary.pieces[token]
        if len(piece) >= len(tail):
            total += probability
        elif probability > NEGLIGIBLE:
            ids = torch.tensor([[*context, token]], device=loaded.device)
            after = loaded.model.logits(loaded.model(ids)[0, -1]).float().softmax(dim=-1).cpu()
            rest = tail[len(piece) :]
            total += probability * _spelling_probability(loaded, [*context, token], rest, after, vocabulary)
    return total
