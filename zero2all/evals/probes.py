"""Asking probes (`probe_file.py`: short questions whose answer a model either knows or does not).

A probe is right when the whole answer is what greedy decoding over the full vocabulary writes after the prompt, and
ends there. Beside that, P(answer | prompt) and its share among answer and foils are measured, which move long before
the first answer is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from zero2all.common.progress import progress
from zero2all.evals.generate import stream
from zero2all.evals.probe_file import Probe
from zero2all.evals.scorer import continuation_log_probabilities
from zero2all.infer.boundary import Vocabulary
from zero2all.infer.load import LoadedModel

MAX_FOILS = 4


@dataclass(frozen=True)
class ProbeResult:
    """What a model made of a probe."""

    probe: Probe
    correct: bool
    written: str
    probability: float
    share_among_foils: float


def run_probes(loaded: LoadedModel, probes: list[Probe]) -> list[ProbeResult]:
    """Ask them all."""
    vocabulary = Vocabulary(loaded.tokenizer, loaded.model.config.vocab_ids)
    results = []
    with progress("probes", total=len(probes), unit="probe") as bar:
        for probe in probes:
            correct, written = _greedy_answer(loaded, probe, vocabulary)
            probability, share = _probabilities(loaded, probe, vocabulary)
            results.append(ProbeResult(probe, correct, written, probability, share))
            bar.advance(1)
    return results


def summarize(results: list[ProbeResult]) -> dict[str, Any]:
    """Accuracy and mean P(answer) by channel and group; `accuracy` is the mean over the probes that count."""
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
    return {**(_means(counted) if counted else {}), "channels": channels}


def _means(results: list[ProbeResult]) -> dict[str, float]:
    return {
        "accuracy": fmean(result.correct for result in results),
        "probability": fmean(result.probability for result in results),
        "share_among_foils": fmean(result.share_among_foils for result in results),
        "probes": len(results),
    }


def _greedy_answer(loaded: LoadedModel, probe: Probe, vocabulary: Vocabulary) -> tuple[bool, str]:
    """Decode until the answer is complete or impossible; complete means: no letter or digit follows it."""
    expected = probe.joiner + probe.answer
    wanted, produced = expected.encode(), b""
    for piece in stream(loaded, probe.prompt, max_new_tokens=len(wanted) + 4, vocabulary=vocabulary):
        produced += piece
        possible = produced.startswith(wanted) or wanted.startswith(produced)
        if not possible or len(produced.decode("utf-8", "ignore")) > len(expected):
            break
    written = produced.decode("utf-8", "replace")
    following = written[len(expected) : len(expected) + 1]
    return written.startswith(expected) and not following.isalnum(), written


def _probabilities(loaded: LoadedModel, probe: Probe, vocabulary: Vocabulary) -> tuple[float, float]:
    """P(answer | prompt), and that divided by the sum over answer and foils."""
    candidates = [probe.joiner + text for text in (probe.answer, *probe.foils[:MAX_FOILS])]
    logs = continuation_log_probabilities(loaded, probe.prompt, candidates, vocabulary)
    answer, *foils = (math.exp(value) for value in logs)
    total = answer + sum(foils)
    return answer, answer / total if total > 0 else 0.0
