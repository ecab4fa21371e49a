"""The config of a run, by section. Those of `train` stand in `training`, because the trainer reads the whole config,
those of the other rooms in their own `config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zero2all.config.training import (
    CheckpointConfig,
    EvalConfig,
    GuardsConfig,
    OptimConfig,
    ScheduleConfig,
    StageConfig,
    TrainConfig,
)
from zero2all.model.config import ModelConfig
from zero2all.ops.config import OpsConfig
from zero2all.packed.config import DataConfig
from zero2all.parallel.config import ParallelConfig
from zero2all.resilience.config import ResilienceConfig
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.track.config import TrackConfig


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a training run."""

    data: DataConfig = field(default_factory=DataConfig)
    """Which packed data is read, and in which proportion."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How the vocabulary is made, where the run makes one."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the model."""
    ops: OpsConfig = field(default_factory=OpsConfig)
    """Which implementation each operator uses."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Where the run computes."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    stages: list[StageConfig] = field(default_factory=list)
    """Stretches of the run with another mixture or sequence length, in the order of their from_step."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length and shape of the run."""
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """What happens when a step goes wrong."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the state is saved."""
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """What keeps the run alive, and what it does when it is asked to stop."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """What is logged."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out evaluation inside the loop."""

    @property
    def samples_per_step(self) -> int:
        """Samples in one optimizer step of a stage without a sequence length of its own."""
        return self.train.tokens_per_step // self.data.seq_len
