"""Text from a model: greedy or sampled, with a key/value cache and healed prompts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.infer.boundary import Vocabulary, heal
from zero2all.infer.load import LoadedModel
from zero2all.model.z2all import KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples from the model's own distribution."""
    top_p: float = 1.0
    """Sample only among the likeliest tokens that together hold this probability."""
    seed: int = 0
    """Key of the draws."""


def generate(
    loaded: LoadedModel,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    vocabulary: Vocabulary | None = None,
) -> str:
    """The text that follows `prompt`, up to the end of the document or max_new_tokens."""
    whole_characters = codecs.getincrementaldecoder("utf-8")("replace")
    # Not finalised: a character that max_new_tokens cut in two is left out.
    return "".join(map(whole_characters.decode, stream(loaded, prompt, max_new_tokens, sampling, vocabulary)))


@torch.no_grad()
def stream(
    loaded: LoadedModel,
    prompt: str,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    vocabulary: Vocabulary | None = None,
) -> Iterator[bytes]:
    """The same, token by token as bytes (a character may take several tokens)."""
    sampling = sampling or Sampling()
    vocabulary = vocabulary or Vocabulary(loaded.tokenizer, loaded.model.config.vocab_ids)
    healed = heal(prompt, loaded.tokenizer, vocabulary)
    limit, prompt_tokens = loaded.model.config.max_seq_len, len(healed.ids) + len(healed.given_back)
    if prompt_tokens > limit:
        raise UsageError(
            f"The prompt has {prompt_tokens} tokens; the model was made for {limit} (model.max_seq_len). Shorten it."
        )
    draws = torch.Generator().manual_seed(sampling.seed)
    cache = KeyValueCache(loaded.model.config.layers)
    pending, rest, new_tokens = healed.ids, healed.given_back, 0
    while new_tokens < max_new_tokens and cache.length + len(pending) <= limit:
        hidden = loaded.model(torch.tensor([pending], device=loaded.device), cache)
        logits = loaded.model.logits(hidden[0, -1]).float().cpu()
        logits[vocabulary.never] = -torch.inf
        tail = b"".join(vocabulary.pieces[token] for token in rest)
        if rest:
            logits = _only(logits, [rest[0], *vocabulary.starting_with(tail)])
        token = _pick(logits, sampling, draws)
        if token in loaded.tokenizer.end_ids:
            return
        fresh = vocabulary.pieces[token][len(tail) :]
        rest = rest[1:] if rest and token == rest[0] else []
        if fresh:
            yield fresh
            new_tokens += 1
        pending = [token]


def _only(logits: Tensor, allowed: list[int]) -> Tensor:
    """Logits with everything but `allowed` ruled out."""
    kept = torch.full_like(logits, -torch.inf)
    kept[allowed] = logits[allowed]
    return kept


def _pick(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    if sampling.temperature <= 0:
        return int(logits.argmax())
    probabilities = (logits / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        beyond[0] = False  # the likeliest stays, however small top_p is
        probabilities[order[beyond]] = 0
    return int(torch.multinomial(probabilities, 1, generator=draws))
