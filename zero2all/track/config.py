"""The `track` section of a config: how often training writes metrics, and how much it may hold back."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.common.schema import NaturalFloat, NaturalInt, PositiveInt


@dataclass(frozen=True)
class TrackConfig:
    """How a run writes its metrics."""

    log_every_steps: PositiveInt = 1
    """Write one metric row every this many steps. A row with ten values takes about 250 bytes of disk."""

    update_ratios_every_steps: NaturalInt = 100
    """How often the length of the update over that of the weights is logged per kind of parameter; 0: never."""

    queue_rows: PositiveInt = 10_000
    """Rows held in memory while the disk does not take them; beyond this the oldest are dropped and counted."""

    close_timeout_seconds: NaturalFloat = 0.5
    """The longest the end of a run waits for the disk to take the last rows."""
