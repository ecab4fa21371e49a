"""Lion: every value moves by exactly the learning rate, in the direction of an interpolated momentum.

    c = b1 m + (1 - b1) g          m = b2 m + (1 - b2) g
    w = w (1 - lr wd) - lr sign(c)

One moment instead of two: 4 bytes a parameter. The step of a value does not shrink with its gradient, so the learning
rate is usually chosen 3 to 10 times smaller than AdamW's and the weight decay as many times larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from zero2all.train.optimizers.base import ElementwiseOptimizer, ParameterGroup, scalar


class Lion(ElementwiseOptimizer):
    """Sign of an interpolated momentum."""

    moments = ("exp_avg",)

    def __init__(self, groups: Sequence[ParameterGroup], beta1: float, beta2: float, compiled: bool = False) -> None:
        super().__init__(groups, partial(lion_formula, beta1=beta1, beta2=beta2), compiled)

    def numbers(self, group: ParameterGroup, count: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Rate, and what the decay leaves."""
        return scalar(group.lr), scalar(1 - group.lr * group.weight_decay)


def lion_formula(
    gradient: Tensor, weight: Tensor, mean: Tensor, lr: Tensor, kept: Tensor, *, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """New weight and mean."""
    direction = beta1 * mean + (1 - beta1) * gradient
    return weight * kept - lr * direction.sign(), beta2 * mean + (1 - beta2) * gradient
