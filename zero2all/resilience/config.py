"""What keeps a run alive: reactions to signals, checkpoints in memory, checks of its own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.common.schema import NaturalInt, PositiveFloat


@dataclass(frozen=True)
class ResilienceConfig:
    """Reactions to signals and faults."""

    save_on_signal: bool = True
    """On Ctrl-C, SIGTERM or SIGHUP finish the step, save a checkpoint and exit with code 10; false: do not save."""
    save_timeout_seconds: PositiveFloat = 600.0
    """How long a run waits at its end for a checkpoint that is still being written."""
    memory_every_steps: NaturalInt | Literal["auto"] = "auto"
    """Save the state to memory after this many steps, for a restart that loses few of them; 0: never. auto: a 25th of
    checkpoint.every_steps, at least 10, on a CPU; never on a GPU, where the copy has not been measured yet, and never
    with parallel.slow_link."""
    memory_folder: str | None = None
    """The RAM file system for these; none: /dev/shm. Where it is missing or too small, only the disk is used."""
    replica_check_every_steps: NaturalInt = 0
    """Compare the replicas of the weights bit by bit after this many steps; 0: only before a save."""
    rerun_every_steps: NaturalInt = 0
    """Once in this many steps compute a step twice and compare loss and gradient norm bit by bit; 0: never. Only for
    operators that are bit-exact."""

    def memory_steps(self, checkpoint_every_steps: int, on_cpu: bool) -> int:
        """How many steps lie between two saves to memory; 0: there are none."""
        if self.memory_every_steps == "auto":
            if not on_cpu:
                return 0
            return max(10, checkpoint_every_steps // 25) if checkpoint_every_steps else 20
        return self.memory_every_steps
