"""The settings of the loop: how much, how fast, with which optimizer, what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zero2all.common.schema import (
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Problem,
    Range,
    Share,
    ShareBelowOne,
)
from zero2all.packed.config import mixture_problems


@dataclass(frozen=True)
class TrainConfig:
    """Length and shape of the run."""

    name: str = "run"
    """Folder of the run below <workspace>/runs/."""
    steps: PositiveInt = 10000
    """Optimizer steps in the whole run."""
    tokens_per_step: PositiveInt = 524288
    """Tokens in one optimizer step, over all micro-batches."""
    micro_batch_samples: PositiveInt = 8
    """Samples in one forward and backward pass; tokens_per_step / seq_len / this passes are accumulated."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """dtype of the weights the forward pass reads; the optimizer always works on float32 masters."""
    z_loss: NaturalFloat = 0.0
    """Times logsumexp(logits)^2, added to each token's loss: 1e-4 keeps logits from drifting; 0 leaves it out."""
    seed: Annotated[int, Range(minimum=0, maximum=2e9)] = 1234
    """Key of the initial weights and of dropout."""

    def problems(self, place: str) -> list[Problem]:
        """A run's name becomes a folder."""
        if self.name and not any(mark in self.name for mark in "/\\") and not self.name.startswith("."):
            return []
        return [Problem(f"{place}.name", self.name, "a plain folder name without slashes or a leading dot")]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and gradient clipping."""

    lr_max: PositiveFloat = 3e-4
    """Learning rate at the top of the schedule."""
    beta1: ShareBelowOne = 0.9
    """Decay of the running mean of gradients."""
    beta2: ShareBelowOne = 0.95
    """Decay of the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NaturalFloat = 0.1
    """Decoupled decay of matrices; norms, biases and (unless decay_embeddings) embeddings are left alone."""
    decay_embeddings: bool = True
    """Whether weight decay also acts on the embedding and the output head."""
    clip_grad_norm: NaturalFloat = 1.0
    """Largest L2 norm of the whole gradient; 0 leaves it alone."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps: a linear warmup, then a cosine."""

    kind: Literal["cosine", "constant"] = "cosine"
    """What follows the warmup."""
    warmup_steps: NaturalInt = 100
    """Steps of linear rise from 0 to lr_max."""
    lr_min_share: Share = 0.1
    """Last learning rate as a share of lr_max (cosine only)."""


@dataclass(frozen=True)
class StageConfig:
    """A stretch of the run with a mixture or a sequence length of its own."""

    name: str
    """What this stage is called in logs."""
    from_step: NaturalInt
    """First step of this stage."""
    mixture: dict[str, NaturalFloat] | None = None
    """Weights as in data.mixture; each source continues where it stood. None takes data.mixture."""
    seq_len: PositiveInt | None = None
    """Tokens per sample. None takes data.seq_len. Another length than before cuts and shuffles the text anew; a step
    keeps its tokens, a pass (micro_batch_samples) about as many."""

    def problems(self, place: str) -> list[Problem]:
        """The mixture must leave something to read."""
        return mixture_problems(self.mixture, f"{place}.mixture")


@dataclass(frozen=True)
class GuardsConfig:
    """What the loop does when a step goes wrong."""

    nonfinite: Literal["skip", "stop"] = "skip"
    """A loss or gradient that is not finite: skip the update, or stop the run (exit code 12)."""
    max_skips_in_a_row: PositiveInt = 10
    """Stop (exit code 12) after this many skipped updates in a row."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved, and what is kept."""

    every_steps: NaturalInt = 500
    """Save after this many steps, and always at the end; 0 saves at the end only."""
    keep_last: Annotated[int, Range(minimum=2)] = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: NaturalInt = 0
    """Checkpoints at multiples of this are never deleted; 0 keeps none beyond keep_last."""


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation inside the loop and its size."""

    every_steps: NaturalInt = 500
    """Evaluate after this many steps, and at the end; 0 evaluates at the end only."""
    valid_tokens_per_source: PositiveInt = 65536
    """Held-out tokens scored per source each time; the same ones every time."""
    batch_samples: PositiveInt = 16
    """Sequences scored at once."""
