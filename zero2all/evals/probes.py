"""Asking probes (`question_files.py`: short questions whose answer a model either knows or does not).

A probe is right when a whole right answer is what greedy decoding over the full vocabulary writes after the prompt, and
ends there. Beside that are measured log P(answer | prompt), its share among answers and foils, and the rank of the
answer's first token, which move long before the first answer is right.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Generic, TypeVar

import numpy as np

from zero2all.common.progress import Bar, progress
from zero2all.evals.judge import wilson
from zero2all.evals.question_files import Pair, Probe
from zero2all.evals.scorer import Question, Scored, score_questions
from zero2all.infer.engine import Engine
from zero2all.infer.job import Job
from zero2all.infer.text import TextJob, TextRequest

IMPOSSIBLE = -1e4
"""The least log probability that is reported: JSON has no infinity."""
RESAMPLES = 1000


@dataclass(frozen=True)
class ProbeResult:
    """What a model made of a probe."""

    probe: Probe
    correct: bool
    written: str
    probability: float
    """Of all right answers together."""
    share_among_foils: float | None
    """None where the probe has no foils."""
    logprob: float
    rank: int | None
    """How many tokens are likelier than the first of the answer; None where a token spans the border."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class Answers(Generic[Result]):
    """The results of some probes or pairs, and why others have none."""

    results: list[Result]
    skipped: dict[str, str]
    """By the id of the probe or pair."""


def run_probes(engine: Engine, probes: list[Probe]) -> Answers[ProbeResult]:
    """Ask them all: every answer of every probe is scored in one batch, then all are written in another."""
    with progress("probes", total=2 * len(probes), unit="question") as bar:
        questions = [Question(probe.prompt, (*probe.right, *probe.wrong)) for probe in probes]
        found = list(zip(probes, score_questions(engine, questions, bar), strict=True))
        skipped = {probe.id: scored for probe, scored in found if isinstance(scored, str)}
        bar.advance(len(skipped))
        scores = [(probe, scored) for probe, scored in found if not isinstance(scored, str)]
        written = _greedy_answers(engine, [probe for probe, _ in scores], bar)
    return Answers([_result(*each, text) for each, text in zip(scores, written, strict=True)], skipped)


def _result(probe: Probe, scored: list[Scored], written: str) -> ProbeResult:
    right, wrong = scored[: len(probe.right)], scored[len(probe.right) :]
    logprob, of_foils = _log_sum(right), _log_sum(wrong)
    likeliest = max(right, key=lambda answer: answer.logprob)
    return ProbeResult(
        probe=probe,
        correct=_is_right(probe, written),
        written=written,
        probability=math.exp(logprob),
        share_among_foils=_share(logprob, of_foils) if wrong else None,
        logprob=max(logprob, IMPOSSIBLE),
        rank=None if likeliest.spans_border else likeliest.ranks[0],
    )


def _log_sum(scored: list[Scored]) -> float:
    """log of the summed probabilities."""
    most = max((each.logprob for each in scored), default=-math.inf)
    if most == -math.inf:
        return most
    return min(0.0, most + math.log(math.fsum(math.exp(each.logprob - most) for each in scored)))


def _share(right: float, wrong: float) -> float:
    """right / (right + wrong), from their logs."""
    if right == -math.inf:
        return 0.0
    return 1 / (1 + math.exp(min(700.0, wrong - right)))


def summarize(asked: Answers[ProbeResult]) -> dict[str, Any]:
    """Means by channel and group, with intervals; those at the top are over the probes that count."""
    results = asked.results
    channels: dict[str, Any] = {}
    for channel in sorted({result.probe.channel for result in results}):
        mine = [result for result in results if result.probe.channel == channel]
        groups = {
            group: _means([result for result in mine if result.probe.group == group])
            for group in sorted({result.probe.group for result in mine})
        }
        counted = [result for result in mine if result.probe.counts]
        channels[channel] = {**(_means(counted) if counted else {}), "groups": groups}
    counted = [result for result in results if result.probe.counts]
    skipped = dict(Counter(asked.skipped.values()))
    return {**(_means(counted) if counted else {}), "channels": channels, "skipped": skipped}


def _means(results: list[ProbeResult]) -> dict[str, Any]:
    """Means over questions, each the mean over its wordings; wordings of one question are no independent samples, so
    intervals are over questions as well."""
    by_question: dict[str, list[ProbeResult]] = {}
    for result in results:
        by_question.setdefault(result.probe.question or result.probe.id, []).append(result)
    questions = list(by_question.values())

    def of_questions(value: Callable[[ProbeResult], float]) -> list[float]:
        return [fmean(map(value, wordings)) for wordings in questions]

    found = [[one.share_among_foils for one in wordings if one.share_among_foils is not None] for wordings in questions]
    of_shares: dict[str, Any] = {}
    if shares := [each for each in found if each]:
        means = [fmean(each) for each in shares]
        of_shares = {"share_among_foils": fmean(means), "share_interval": list(mean_interval(means))}
        of_shares["share_range_of_wordings"] = fmean(map(_range, shares))
    logprobs = of_questions(lambda one: one.logprob)
    ranks = [result.rank for result in results if result.rank is not None]
    return {
        "accuracy": fmean(of_questions(lambda one: one.correct)),
        "probability": fmean(of_questions(lambda one: one.probability)),
        **of_shares,
        "logprob": fmean(logprobs),
        "logprob_interval": list(mean_interval(logprobs)),
        "logprob_range_of_wordings": fmean(_range([one.logprob for one in wordings]) for wordings in questions),
        "median_rank": median(ranks) if ranks else None,
        "questions": len(questions),
        "probes": len(results),
    }


def _range(values: list[float]) -> float:
    return max(values) - min(values)


def _greedy_answers(engine: Engine, probes: list[Probe], bar: Bar) -> list[str]:
    """What greedy decoding writes after each prompt, until an answer is complete or all impossible; in one batch."""
    jobs: dict[Job, Probe] = {}
    for probe in probes:
        longest = max(len(text.encode()) for text in probe.right)
        jobs[TextJob(engine, TextRequest(probe.prompt, longest + 4)).job] = probe
    left = set(jobs)
    while left:
        for job in engine.step():
            if job in left and (job.finish is not None or _is_decided(jobs[job], _bytes_of(engine, job))):
                engine.cancel(job)
                left.remove(job)
                bar.advance(1)
    return [_bytes_of(engine, job).decode("utf-8", "replace") for job in jobs]


def _bytes_of(engine: Engine, job: Job) -> bytes:
    pieces = zip(job.new_ids, job.bytes_before, strict=True)
    return b"".join(engine.vocabulary.pieces[token][before:] for token, before in pieces)


def _is_decided(probe: Probe, written: bytes) -> bool:
    """Whether every answer has become impossible, or one is there with a whole character after it."""
    possible = [text for text in probe.right if written.startswith(text.encode()) or text.encode().startswith(written)]
    return not possible or any(len(written.decode("utf-8", "ignore")) > len(text) for text in possible)


def _is_right(probe: Probe, written: str) -> bool:
    """A whole right answer, and no letter or digit follows it, unless one may."""
    for expected in probe.right:
        if written.startswith(expected):
            goes_on = written[len(expected) : len(expected) + 1].isalnum()
            if probe.may_go_on or not goes_on or not expected[-1].isalnum():
                return True
    return False


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean: the middle of the means of samples drawn with replacement, the same each time. (That
    of a share of right answers is `judge.wilson`.)"""
    found = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(found), (RESAMPLES, len(found)))
    low, high = np.quantile(found[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


# Contrast pairs: a right sentence against one that is wrong by as little as possible. Which is likelier to a model?
#
# The whole sentence is scored from its beginning, so a pair tests what no single next word does: word order, agreement
# over a distance, which of two entities did it. Right by the log probability of the sentence, and also by that per
# byte, where the two sentences differ in length.


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


def compare_pairs(engine: Engine, pairs: list[Pair]) -> Answers[PairResult]:
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
    return Answers(results, skipped)


def summarize_pairs(compared: Answers[PairResult]) -> dict[str, Any]:
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
