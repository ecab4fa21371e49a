"""What a guard reports: one anomaly, with its figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal[
    "loss_spike", "grad_spike", "loss_drop", "nonfinite", "level_shift", "hard_shard", "easy_shard", "repeated_shard"
]

STEP_KINDS: frozenset[str] = frozenset({"loss_spike", "grad_spike", "loss_drop", "nonfinite"})
"""Findings about one step; the others are about the run or about data scattered over it."""


@dataclass(frozen=True)
class Finding:
    """One finding."""

    kind: Kind
    step: int  # the step as the metrics count it: the first step of a run is 1
    tokens: tuple[int, int]  # first and end token of that step's global batch in the run's order
    text: str  # A sentence for people
    value: float | None = None  # what was measured; None where it was not finite
    usual: float | None = None  # the expected value
    limit: float | None = None  # the limit it exceeded
    onset_step: int | None = None  # the first step of an unbroken series of findings
    onset_token: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Plain values: the shard, its samples, the losses of the channels."""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "tokens": list(self.tokens)}
