"""How a run that begins with the weights of another one is fine-tuned. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from zero2all.common.schema import NaturalFloat, PositiveFloat, Range
from zero2all.model.config import LoraConfig

OBJECTIVES = ("dpo", "grpo", "distill")
"""Methods whose loss is not the mean loss of the tokens that count."""
PAIRS = "pairs"
"""What packed pairs of answers are called, as a source and as a channel."""


@dataclass(frozen=True)
class DpoConfig:
    """Preference tuning: the chosen answer of a pair is made more likely than the rejected one."""

    beta: PositiveFloat | None = None
    """How strongly the answers are held to those of the base. None: 0.1, with normalise 5."""
    normalise: bool = False
    """Divide the log-probability of each answer by its tokens, so that long answers count no more than short ones."""
    label_smoothing: Annotated[float, Range(minimum=0, maximum=0.499)] = 0.0
    """Share of the pairs whose order is taken to be wrong."""
    sft_weight: NaturalFloat = 0.0
    """Times the mean loss of the chosen answers' tokens, added to the loss: keeps them from becoming less likely."""

    @property
    def strength(self) -> float:
        """beta, with its default."""
        return self.beta or (5.0 if self.normalise else 0.1)


@dataclass(frozen=True)
class FinetuneConfig:
    """What fine-tuning does beside plain training."""

    method: Literal["none", "sft", "dpo", "grpo", "distill"] = "none"
    """none: pretraining; sft: on conversations; dpo: on pairs of answers; grpo: on rewards; distill: on a teacher."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """The loss of method dpo."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Small adapters are trained instead of the weights."""

    @property
    def has_objective(self) -> bool:
        """Whether the loss is not the mean loss of the tokens that count."""
        return self.method in OBJECTIVES
