"""Drawn answers as rows of a step: packed best-fit, each with the advantage of its answer and its share of the mean.

Legend: B rows, T targets of a row.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero2all.config.finetune import GrpoConfig
from zero2all.finetune.rollouts import Answer
from zero2all.packed.bestfit import best_fit_rows
from zero2all.packed.loader import Batch, rank_rows
from zero2all.packed.samples import NO_DOCUMENT, PADDING_ID, Borders

SPREAD_FLOOR = 1e-4
FACTS = (
    *("rollout/reward", "rollout/reward_std", "rollout/right", "rollout/length", "rollout/ended", "rollout/calls"),
    *("rollout/not_judged", "rollout/groups_without_advantage", "rollout/entropy"),
    *("time/rollout", "time/reward"),
)
"""What is known of the answers of a step, all processes together."""


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """Rows of answers. (B, T) each; zeros where nobody drew the target."""

    old: np.ndarray | None = None
    """Log-probability of each target when it was drawn."""
    advantages: np.ndarray | None = None
    shares: np.ndarray | None = None
    """Of each target in the mean; over all rows of the step they sum to 1 (dr_grpo: to less)."""
    facts: tuple[float, ...] = ()
    """The values of FACTS."""


@dataclass(frozen=True)
class Drawn:
    """Answers in order of their prompts, and what rewards say of each."""

    answers: Sequence[Answer]
    totals: Sequence[float | None]
    """The weighted sum of the rewards; None: it could not be judged."""
    right: Sequence[bool | None]
    """Whether the first reward is at least 1; None: it could not be judged."""
    seconds: Sequence[float]
    """For drawing and for judging, of the slowest process."""

    def mean(self, values: Sequence[float | None]) -> float:
        """Over the answers that have a value; 0 where none has."""
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else 0.0

    @property
    def groups(self) -> list[list[int]]:
        """The places of the answers to each prompt."""
        found: dict[int, list[int]] = defaultdict(list)
        for at, answer in enumerate(self.answers):
            found[answer.prompt].append(at)
        return list(found.values())

    def facts(self) -> tuple[float, ...]:
        """The values of FACTS."""
        judged = [[value for at in group if (value := self.totals[at]) is not None] for group in self.groups]
        spreads = [float(np.std(rewards)) for rewards in judged if rewards]
        logps = [logp for answer in self.answers for logp in answer.logps if logp is not None]
        return (
            self.mean(self.totals),
            self.mean(spreads),
            self.mean(self.right),
            self.mean([float(answer.drawn) for answer in self.answers]),
            self.mean([float(answer.ended) for answer in self.answers]),
            self.mean([float(answer.calls) for answer in self.answers]),
            float(sum(total is None for total in self.totals)),
            self.mean([float(spread == 0) for spread in spreads]),
            -self.mean(logps),
            *self.seconds,
        )


def advantages_of(rewards: Sequence[float | None], loss: str) -> list[float | None]:
    """The advantages of the answers to one prompt."""
    known = np.array([reward for reward in rewards if reward is not None])
    if not known.size:
        return [None] * len(rewards)
    spread = 1.0 if loss == "dr_grpo" else (known.std(ddof=1) if known.size > 1 else 0.0) + SPREAD_FLOOR
    return [None if reward is None else float((reward - known.mean()) / spread) for reward in rewards]


def shares_of(lengths: Sequence[int], config: GrpoConfig) -> list[float]:
    """The share of each token of an answer in the mean, by answer; from the tokens of each."""
    if config.loss == "grpo":
        return [1 / max(1, length) / len(lengths) for length in lengths]
    if config.loss == "dr_grpo":
        return [1 / len(lengths) / config.max_new_tokens] * len(lengths)
    return [1 / max(1, sum(lengths))] * len(lengths)


def rollout_rows(
    drawn: Drawn, config: GrpoConfig, seq_len: int, place: tuple[int, int], first_token: int
) -> RolloutBatch:
    """The rows of one process, `place` (rank, ranks), of a step that begins at `first_token` of the run."""
    advantages: dict[int, float] = {}
    for group in drawn.groups:
        values = advantages_of([drawn.totals[at] for at in group], config.loss)
        advantages |= {at: value for at, value in zip(group, values, strict=True) if value is not None}
    each = shares_of([drawn.answers[at].drawn for at in advantages], config)
    shares = dict(zip(advantages, each, strict=True))
    row_of = best_fit_rows(np.array([len(answer.ids) for answer in drawn.answers]), seq_len + 1)
    count = int(row_of.max()) + 1
    first, own, rows = rank_rows(count, *place)
    tokens = np.full((rows, seq_len + 1), PADDING_ID, np.int64)
    old, advantage, share = (np.zeros((rows, seq_len)) for _ in range(3))
    weights, borders = np.zeros((rows, seq_len), np.float32), Borders()
    for row in range(own):
        column, columns, numbers = 0, [], []
        for at in np.flatnonzero(row_of == first + row).tolist():
            answer = drawn.answers[at]
            end = column + len(answer.ids)
            tokens[row, column:end] = answer.ids
            targets = slice(end - len(answer.logps) - 1, end - 1)  # they are shifted by one
            is_drawn = np.array([logp is not None for logp in answer.logps])
            weights[row, targets] = is_drawn
            old[row, targets] = [logp or 0.0 for logp in answer.logps]
            advantage[row, targets] = is_drawn * advantages.get(at, 0.0)
            share[row, targets] = is_drawn * shares.get(at, 0.0)
            columns.append(column)
            numbers.append(at)
            column = end
        if column <= seq_len:
            columns.append(column)
            numbers.append(NO_DOCUMENT)
        borders.add(row, np.array(columns), np.array(numbers))
    documents, sources = borders.documents(rows, seq_len + 1), np.zeros(rows, np.int64)
    return RolloutBatch(
        *(tokens, sources, sources, 0, weights, float(weights.sum(dtype=np.float64)), documents, documents.ids),
        *(first_token, count, own, first, old, advantage, share, drawn.facts()),
    )
