"""Stochastic gradient descent with momentum.

    b = mu b + g          u = g + mu b with Nesterov, b without
    w = w (1 - lr wd) - lr u

Weight decay is decoupled, as for the others, so that its meaning does not change with the optimizer. State: 4 bytes a
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from zero2all.train.optimizers.base import ElementwiseOptimizer, ParameterGroup, scalar


class SGD(ElementwiseOptimizer):
    """Gradient descent with momentum."""

    moments = ("momentum",)

    def __init__(
        self, groups: Sequence[ParameterGroup], momentum: float, nesterov: bool, compiled: bool = False
    ) -> None:
        super().__init__(groups, partial(sgd_formula, decay=momentum, nesterov=nesterov), compiled)

    def numbers(self, group: ParameterGroup, count: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Rate, and what the decay leaves."""
        return scalar(group.lr), scalar(1 - group.lr * group.weight_decay)


def sgd_formula(
    gradient: Tensor, weight: Tensor, momentum: Tensor, lr: Tensor, kept: Tensor, *, decay: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """New weight and momentum."""
    momentum = decay * momentum + gradient
    direction = gradient + decay * momentum if nesterov else momentum
    return weight * kept - lr * direction, momentum
