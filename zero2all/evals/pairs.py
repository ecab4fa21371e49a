"""Contrast pairs: a right sentence against one that is wrong by as little as possible. Which is likelier to a model?

The whole sentence is scored from its beginning, so a pair tests what no single next word does: word order, agreement
over a distance, which of two entities did it. Right by the log probability of the sentence, and also by that per byte,
where the two sentences differ in length.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zero2all.common.progress import progress
from zero2all.evals.judge import wilson
from zero2all.evals.pair_file import Pair
from zero2all.evals.probes import IMPOSSIBLE
from zero2all.evals.scorer import Question, score_questions
from zero2all.infer.engine import Engine


@dataclass(frozen=True)
class PairResult:
    """What a model says of a pair."""

    pair: Pair
    right_logprob: float
    wrong_logprob: float

    @property
    def told_apart(self) -> bool:
        """Whether the right sentence is the likelier one; a tie is not."""
        return self.right_logprob > self.wrong_logprob

    @property
    def told_apart_per_byte(self) -> bool:
        """The same by log probability per byte."""
        right, wrong = len(self.pair.right.encode()), len(self.pair.wrong.encode())
        return self.right_logprob / right > self.wrong_logprob / wrong


@dataclass(frozen=True)
class Compared:
    """The results of some pairs, and why others have none."""

    results: list[PairResult]
    skipped: dict[str, str]
    """By the id of the pair."""


def compare_pairs(engine: Engine, pairs: list[Pair]) -> Compared:
    """Score both sentences of every pair, all in one batch."""
    with progress("pairs", total=len(pairs), unit="pair") as bar:
        found = score_questions(engine, [Question("", (pair.right, pair.wrong)) for pair in pairs], bar)
    results, skipped = [], {}
    for pair, scored in zip(pairs, found, strict=True):
        if isinstance(scored, str):
            skipped[pair.id] = scored
        else:
            right, wrong = (max(each.logprob, IMPOSSIBLE) for each in scored)
            results.append(PairResult(pair, right, wrong))
    return Compared(results, skipped)


def summarize_pairs(compared: Compared) -> dict[str, Any]:
    """Accuracy with its interval, and the mean difference in nats, by channel and kind. Chance is one half."""
    results = compared.results
    channels: dict[str, Any] = {}
    for channel in sorted({result.pair.channel for result in results}):
        mine = [result for result in results if result.pair.channel == channel]
        kinds = sorted({result.pair.kind for result in mine})
        channels[channel] = {
            **_figures(mine),
            "kinds": {kind: _figures([result for result in mine if result.pair.kind == kind]) for kind in kinds},
        }
    skipped = dict(Counter(compared.skipped.values()))
    return {**(_figures(results) if results else {}), "channels": channels, "skipped": skipped}


def _figures(results: list[PairResult]) -> dict[str, Any]:
    right = sum(result.told_apart for result in results)
    return {
        "accuracy": right / len(results),
        "interval": list(wilson(right, len(results))),
        "accuracy_per_byte": fmean(result.told_apart_per_byte for result in results),
        "nats": fmean(result.right_logprob - result.wrong_logprob for result in results),
        "pairs": len(results),
    }
