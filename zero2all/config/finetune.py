"""How a run that begins with the weights of another one is fine-tuned. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from zero2all.common.schema import Problem
from zero2all.model.config import LoraConfig


@dataclass(frozen=True)
class FinetuneConfig:
    """What fine-tuning does beside plain training."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Small adapters are trained instead of the weights."""

    def problems(self, place: str) -> list[Problem]:
        """What is wrong within the section."""
        return self.lora.problems(f"{place}.lora")
