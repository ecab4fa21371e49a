"""A request to the engine, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero2all.infer.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """Token ids to continue, or to score."""

    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    given_back: Sequence[int] = ()
    """The last tokens of the prompt, which generation must write again, or a token that begins with their bytes."""
    alternatives: int | None = None
    """Log probabilities of each new token and of this many likeliest ones; None: not computed."""
    score_from: int | None = None
    """Log probabilities of ids[score_from:] too; at least 1."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end the text, beside those of the tokenizer."""
    grammar: tuple[str, str] | None = None
    """Its kind and text, which the new tokens follow (see `grammar`)."""
    pools: bool = False
    """The mean of the last hidden states of all ids is wanted, and no new token."""

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.ids) + len(self.given_back)


@dataclass(frozen=True)
class ChosenToken:
    """A token with its log probability, and the likeliest ones at its place."""

    id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    bytes_before: int = 0
    """How many of its bytes belong to the prompt."""


@dataclass(frozen=True)
class Scores:
    """What a model says of the tokens of a text."""

    logprobs: list[float]
    ranks: list[int]
    """How many ids are likelier at the place of each token."""


@dataclass(eq=False)
class Job:
    """A request and how far it is. The caller reads `new_ids`, `choices`, `scores` and `finish`."""

    request: Request
    number: int
    """The order of arrival."""
    ids: list[int]
    rest: list[int]
    """Tokens of the prompt that are still to be written again."""
    keys: list[bytes]
    new_ids: list[int] = field(default_factory=list)
    bytes_before: list[int] = field(default_factory=list)
    """For each new token, how many of its bytes belong to the prompt."""
    choices: list[ChosenToken] = field(default_factory=list)
    ending: ChosenToken | None = None
    """The token that ended the text, which is not in `new_ids`, where log probabilities were asked for."""
    scores: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    """For each scored token, how many ids are likelier at its place."""
    scored: list[ChosenToken] = field(default_factory=list)
    """The scored tokens with the likeliest ones at their places, where alternatives were asked for."""
    pooled: Tensor | None = None
    """The sum of the last hidden states so far (C,); at the end their mean."""
    finish: str | None = None
    error: str = ""
    """Why its grammar could not be followed any further."""
    blocks: list[int] = field(default_factory=list)
    done: int = 0
    """Tokens whose keys and values stand in the cache."""
    noted: int = 0
    reused_tokens: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    ended: float = 0.0

    @property
    def goal(self) -> int:
        """Tokens to compute before the next one can be chosen. Scoring needs nothing after the last token."""
        return len(self.ids) if self.request.max_new_tokens or self.request.pools else len(self.ids) - 1

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's own log probabilities are complete, or were not asked for."""
        start = self.request.score_from
        return start is None or len(self.scores) >= len(self.request.ids) - start

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being read; one last token alone is left to `decode`."""
        return self.goal - self.done > 1 or (not self.request.max_new_tokens and self.done < self.goal)
