"""Bytes of weights, gradients and optimizer states per parameter, and what a rank holds of them with ZeRO.

AdamW in bfloat16: 2 for the weight, 2 for the gradient, 12 for the float32 master and two moments. ZeRO (Rajbhandari et
al. 2020) cuts over n ranks: stage 1 the 12, stage 2 also the gradients, stage 3 also the weights. Activations are not
in it. What our own trainer holds (float32 gradients) is in `zero2all.limits.memory`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float  # with masters

    @property
    def total(self) -> float:
        """Of all three."""
        return self.weights + self.gradients + self.optimizer


RECIPES = {
    "adamw": StateBytes(2, 2, 12),
    "adamw-fp32-gradients": StateBytes(2, 4, 12),
    "adamw-fp32": StateBytes(4, 4, 8),
    "adamw-bf16": StateBytes(2, 2, 4),
    "adamw-8bit": StateBytes(2, 2, 6),
    "lion": StateBytes(2, 2, 8),
    "sgd-momentum": StateBytes(2, 2, 8),
    "sgd": StateBytes(2, 2, 4),
}
"""With float32 masters (4 in `optimizer`), except for `adamw-fp32`, whose weights are them, and `adamw-bf16`."""


CHECKPOINT_BYTES = RECIPES["adamw"].optimizer
"""Of a parameter in a checkpoint of a run with AdamW: float32 master and two moments. The bfloat16 weights are the
masters rounded, so they are not saved. Of other optimizers: `zero2all.limits.state_memory.checkpoint_bytes`."""


def zero_bytes(parameters: float, ranks: int, recipe: StateBytes = RECIPES["adamw"]) -> dict[int, float]:
    """Bytes that each of `ranks` holds, by stage."""
    w, g, o = recipe.weights, recipe.gradients, recipe.optimizer
    per_parameter = (w + g + o, w + g + o / ranks, w + (g + o) / ranks, (w + g + o) / ranks)
    return {stage: parameters * each for stage, each in enumerate(per_parameter)}
