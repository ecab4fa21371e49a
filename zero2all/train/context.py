"""What a run is and where it trains: made once, before the first step, and never changed.

What changes while the run trains is in `zero2all.train.state.TrainState`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import LostRunError
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.packed.shard_format import PackedSplit
from zero2all.parallel.world import World
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.objective import Objective


@dataclass(frozen=True)
class RunContext:
    """A run as one of its processes sees it."""

    config: RunConfig
    workspace: Workspace
    world: World
    store: CheckpointStore
    """Its `fence` raises where another process has taken over the run."""
    valid: list[PackedSplit]
    """The held-out text."""
    environment: dict[str, Any]
    """Machine, versions and layout, as checkpoints record them."""
    checkpoint: Checkpoint | None
    """What the run was resumed from."""
    notes: list[str]
    """What the user should know before the run starts: choices, fallbacks, differences to an earlier attempt."""
    objective: Objective | None = None
    """What the run learns; None: the mean loss of the tokens that count."""

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.workspace.run(self.config.train.name)

    @property
    def on_cpu(self) -> bool:
        """Whether a step is finished when `train_step` returns."""
        return self.world.device.type == "cpu"

    def holds_lock(self) -> bool:
        """Whether no other process has taken over the run."""
        try:
            self.store.fence()
        except LostRunError:
            return False
        return True
