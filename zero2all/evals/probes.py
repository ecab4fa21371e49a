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

from zero2all.common.progress import Bar, progress
from zero2all.evals.probe_file import Probe
from zero2all.evals.scorer import continuation_log_probabilities
from zero2all.infer.engine import Engine
from zero2all.infer.job import Job
from zero2all.infer.text import TextJob, TextRequest

MAX_FOILS = 4


@dataclass(frozen=True)
class ProbeResult:
    """What a model made of a probe."""

    probe: Probe
    correct: bool
    written: str
    probability: float
    share_among_foils: float


def run_probes(engine: Engine, probes: list[Probe]) -> list[ProbeResult]:
    """Ask them all."""
    with progress("probes", total=2 * len(probes), unit="step") as bar:
        written = _greedy_answers(engine, probes, bar)
        results = []
        for probe, text in zip(probes, written, strict=True):
            probability, share = _probabilities(engine, probe)
            results.append(ProbeResult(probe, _is_right(probe, text), text, probability, share))
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


def _greedy_answers(engine: Engine, probes: list[Probe], bar: Bar) -> list[str]:
    """What greedy decoding writes after each prompt, until the answer is complete or impossible; all in one batch."""
    jobs: dict[Job, Probe] = {}
    for probe in probes:
        jobs[TextJob(engine, TextRequest(probe.prompt, len(_expected(probe).encode()) + 4)).job] = probe
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


def _expected(probe: Probe) -> str:
    return probe.joiner + probe.answer


def _is_decided(probe: Probe, written: bytes) -> bool:
    """Whether the answer has become impossible, or is there with a whole character after it."""
    wanted = _expected(probe).encode()
    is_possible = written.startswith(wanted) or wanted.startswith(written)
    return not is_possible or len(written.decode("utf-8", "ignore")) > len(_expected(probe))


def _is_right(probe: Probe, written: str) -> bool:
    """The whole answer, and no letter or digit follows it."""
    expected = _expected(probe)
    return written.startswith(expected) and not written[len(expected) : len(expected) + 1].isalnum()


def _probabilities(engine: Engine, probe: Probe) -> tuple[float, float]:
    """P(answer | prompt), and that divided by the sum over answer and foils."""
    candidates = [probe.joiner + text for text in (probe.answer, *probe.foils[:MAX_FOILS])]
    logs = continuation_log_probabilities(engine, probe.prompt, candidates)
    answer, *foils = (math.exp(value) for value in logs)
    total = answer + sum(foils)
    return answer, answer / total if total > 0 else 0.0
