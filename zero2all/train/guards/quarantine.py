"""Shards whose samples have loss weight 0.

With `data.quarantine: auto`, the rows of a reported shard get the loss weight 0 from the step `from_step` on. They are
still read and still pass through the model, so the position, the shapes and the order do not change. `log` reports
shards and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from zero2all.train.guards.findings import Finding
from zero2all.train.guards.rows import StepRows


@dataclass(frozen=True)
class Quarantined:
    """One shard."""

    source: str
    shard: int
    kind: str
    from_step: int
    reason: str


class Quarantine:
    """The reported shards of one run. Like the record of skipped data, a rollback does not undo it."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._shards: dict[tuple[str, int], Quarantined] = {}

    @property
    def shards(self) -> tuple[Quarantined, ...]:
        """Everything reported, in order of the step."""
        return tuple(sorted(self._shards.values(), key=lambda one: (one.from_step, one.source, one.shard)))

    def add(self, finding: Finding, from_step: int) -> Quarantined | None:
        """Add the shard of a finding; None when it is known already, or when the mode is `off`.

        `from_step` must be a step that no rank has begun, so that all ranks, and a resumed run, agree.
        """
        source, shard = str(finding.details["source"]), int(finding.details["shard"])
        if self.mode == "off" or (source, shard) in self._shards:
            return None
        named = self._shards[source, shard] = Quarantined(source, shard, finding.kind, from_step, finding.text)
        return named

    def weight_of(self, source: str, shard: int, step: int | None = None) -> float:
        """The loss weight of a shard: 0 or 1. Without `step`: from now on."""
        named = self._shards.get((source, shard))
        if self.mode != "auto" or named is None or (step is not None and step < named.from_step):
            return 1.0
        return 0.0

    def row_weights(self, rows: StepRows, step: int) -> np.ndarray | None:
        """(B,) float32: the weight of each row of a step; None when all are 1."""
        if self.mode != "auto" or not self._shards:
            return None
        pairs = zip(rows.source_names(), rows.shards.tolist(), strict=True)
        weights = np.array([self.weight_of(source, shard, step) for source, shard in pairs], dtype=np.float32)
        return None if weights.all() else weights

    def state(self) -> list[dict[str, Any]]:
        """As plain values."""
        return [asdict(named) for named in self.shards]

    def merge(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Add the shards of a `state`; of two steps the earlier is kept."""
        for one in [Quarantined(**values) for values in state]:
            known = self._shards.get((one.source, one.shard))
            if known is None or one.from_step < known.from_step:
                self._shards[one.source, one.shard] = one
