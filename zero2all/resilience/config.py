"""What a run does when it receives a signal to stop."""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.common.schema import PositiveFloat


@dataclass(frozen=True)
class ResilienceConfig:
    """Reactions to signals."""

    save_on_signal: bool = True
    """On Ctrl-C, SIGTERM or SIGHUP finish the step, save a checkpoint and exit with code 10; false: do not save."""
    save_timeout_seconds: PositiveFloat = 600.0
    """How long a run waits at its end for a checkpoint that is still being written."""
