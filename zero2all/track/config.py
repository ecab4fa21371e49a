"""The `track` section of a config: how often training writes metrics, and how much it may hold back."""

from dataclasses import dataclass

from zero2all.common.schema import NaturalFloat, NaturalInt, PositiveInt


@dataclass(frozen=True)
class TrackConfig:
    """How a run writes its metrics."""

    log_every_steps: PositiveInt = 1
    """Write a row of metrics every this many steps. A row with ten values takes about 250 bytes."""

    update_ratios_every_steps: NaturalInt = 100
    """Log update norm / weight norm per kind of parameter every this many steps; 0: never."""

    queue_rows: PositiveInt = 10_000
    """Rows kept in memory while the disk cannot take them; if there are more, the oldest are dropped and counted."""

    close_timeout_seconds: NaturalFloat = 2.0
    """How long a run waits at its end for the last rows to be written. Only a disk that hangs takes so long."""
