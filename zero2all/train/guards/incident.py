"""An incident: everything its page shows, as plain values that are saved beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.files import read_json
from zero2all.train.guards.advice import Advice, Facts, advice
from zero2all.train.guards.detector import Detector
from zero2all.train.guards.findings import Finding
from zero2all.train.guards.policy import ACTION_NAMES, Action, Rollback, SkipWindow

CURVE_STEPS = 128


@dataclass(frozen=True)
class Incident:
    """What happened at a step, what was done, and what to do."""

    run: str
    step: int
    kind: str
    findings: list[dict[str, Any]]
    action: str
    """continue, skip, rollback or stop."""
    done: str
    """A sentence for people."""
    curve: list[list[Any]]
    """[step, loss, gradient norm, whether it stood out], oldest first; null where not finite."""
    channels: list[list[Any]]
    """[channel, usual loss, loss in this step]."""
    advice: list[dict[str, str]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the step (or of the shard) with their documents."""
    samples_note: str = ""
    """Which rows these are, and why not all."""
    row_losses: list[float | None] = field(default_factory=list)
    """Mean loss of each row of the step, where it was recorded."""
    tokens: list[int] = field(default_factory=list)
    """First and end token of the step."""
    skipped: dict[str, Any] | None = None
    """The decision to skip data, as in skipped.json; None where there was none."""

    def name(self) -> str:
        """Of its files, without their ending."""
        return f"{self.step}-{self.kind}"

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def make_incident(
    run: str,
    findings: Sequence[Finding],
    action: Action,
    detector: Detector,
    facts: Facts,
    row_losses: Sequence[float | None] = (),
) -> Incident:
    """Collect what is known about findings. Cheap: it reads no data; the writer adds the documents."""
    first = findings[0]
    before = usual_channels(detector, first.step)
    now = first.details.get("channel_losses") or {}
    channels = [[name, before.get(name), now.get(name)] for name in sorted({*before, *now})]
    given: list[Advice] = advice(facts)
    return Incident(
        run=run,
        step=first.step,
        kind=first.kind,
        findings=[finding.as_json() for finding in findings],
        action=ACTION_NAMES[type(action)],
        done=action.reason,
        curve=[[seen.step, seen.loss, seen.grad_norm, seen.flagged] for seen in detector.history[-CURVE_STEPS:]],
        channels=channels,
        advice=[asdict(line) for line in given],
        row_losses=list(row_losses),
        tokens=list(first.tokens),
        skipped=asdict(action.skip) if isinstance(action, SkipWindow | Rollback) and action.skip else None,
    )


def usual_channels(detector: Detector, before_step: int) -> dict[str, float]:
    """The median loss of each channel over the accepted steps that the detector remembers."""
    values: dict[str, list[float]] = {}
    for seen in detector.history:
        if seen.flagged or seen.step >= before_step:
            continue
        for name, loss in seen.channels.items():
            values.setdefault(name, []).append(loss)
    return {name: sorted(losses)[len(losses) // 2] for name, losses in values.items()}


def recorded_row_losses(folder: Path, step: int) -> dict[int, float]:
    """Mean loss by row of a step, from the incidents of a run; empty where nothing was recorded."""
    for path in sorted(folder.glob(f"{step}-*.json")):
        losses = read_json(path).get("row_losses") or []
        if losses:
            return {row: loss for row, loss in enumerate(losses) if loss is not None}
    return {}
