"""How a run that begins with the weights of another one is fine-tuned. Loads without torch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from zero2all.common.schema import NaturalFloat, NaturalInt, PositiveFloat, PositiveInt, Range
from zero2all.model.config import LoraConfig

OBJECTIVES = ("dpo", "grpo", "distill")
"""Methods whose loss is not the mean loss of the tokens that count."""
PAIRS, PROMPTS = "pairs", "prompts"
"""What packed pairs of answers, and prompts for reinforcement learning, are called: as a source and as a channel."""


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
class DistillConfig:
    """Distillation: a teacher's probabilities are learned beside the tokens themselves."""

    teacher: str | None = None
    """Run or Hugging Face folder with the same vocabulary. None: there is none."""
    top_k: Annotated[int, Range(minimum=1)] = 8
    """How many of the teacher's likeliest ids are kept for each learned token; all others are one bucket."""
    alpha: Annotated[float, Range(minimum=0, maximum=1)] = 0.5
    """Share of the usual loss on the tokens; the rest is the divergence from the teacher."""


@dataclass(frozen=True)
class GrpoConfig:
    """Reinforcement learning: answers are drawn and rewarded; those better than the others to their prompt become
    likelier."""

    loss: Literal["dapo", "grpo", "dr_grpo", "cispo"] = "dapo"
    """dapo: every token counts alike; grpo: every answer; dr_grpo: as dapo, divided by a constant, and advantages are
    not divided by their spread; cispo: as dapo, but a token whose ratio is clipped keeps its gradient."""
    prompts: PositiveInt = 16
    """Prompts of a step."""
    answers: Annotated[int, Range(minimum=2)] = 8
    """Answers to each prompt."""
    max_new_tokens: PositiveInt = 256
    """Tokens of an answer, with what tools have answered."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Weight of each reward: exact, number, format, code, calls, or FILE.py:FUNCTION. Empty: exact. An answer is right
    where the first one is at least 1."""
    format: str | None = None
    """The regular expression that reward `format` compares the whole answer with."""
    reward_seconds: PositiveFloat = 10.0
    """How long a function of FILE.py may take for one answer."""
    tools: list[str] = field(default_factory=list)
    """Functions that are run where an answer calls them: calculator."""
    max_turns: PositiveInt = 4
    """Turns of an answer: each but the last calls functions."""
    clip_low: NaturalFloat = 0.2
    """The ratio of a token's probability to that when it was drawn counts down to 1 - clip_low."""
    clip_high: NaturalFloat = 0.28
    """And up to 1 + clip_high; cispo: up to clip_high itself, where 5 is usual."""
    kl_weight: NaturalFloat = 0.0
    """Times the KL divergence from the base, added to the loss."""
    valid_prompts: NaturalInt = 64
    """Held-out prompts that are answered at every validation."""
    valid_answers: PositiveInt = 4
    """Answers to each of them that are drawn, beside the likeliest one."""

    @property
    def rewards_by_name(self) -> dict[str, float]:
        """The rewards, with their default."""
        return self.rewards or {"exact": 1.0}


@dataclass(frozen=True)
class FinetuneConfig:
    """What fine-tuning does beside plain training."""

    method: Literal["none", "sft", "dpo", "grpo", "distill"] = "none"
    """none: pretraining; sft: on conversations; dpo: on pairs of answers; grpo: on rewards; distill: on a teacher."""
    dpo: DpoConfig = field(default_factory=DpoConfig)
    """The loss of method dpo."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The loss of method distill."""
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    """How answers are drawn, rewarded and learned from with method grpo."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Small adapters are trained instead of the weights."""

    @property
    def has_objective(self) -> bool:
        """Whether the loss is not the mean loss of the tokens that count."""
        return self.method in OBJECTIVES
