"""The optimizers with one moment, 4 bytes a parameter: SGD with momentum, and Lion.

SGD     b = mu b + g                     u = g + mu b with Nesterov, b without
        w = w (1 - lr wd) - lr u
Lion    c = b1 m + (1 - b1) g            m = b2 m + (1 - b2) g
        w = w (1 - lr wd) - lr sign(c)

Weight decay is decoupled, as for the others. With Lion every value moves by exactly the learning rate, which is
therefore usually 3 to 10 times smaller than AdamW's, and the weight decay as many times larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.train.optimizers.base import ElementwiseOptimizer, ParameterGroup


class SGD(ElementwiseOptimizer):
    """Gradient descent with momentum."""

    moments = ("momentum",)

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimConfig, compiled: bool = False) -> None:
        super().__init__(groups, partial(sgd_formula, decay=config.momentum, nesterov=config.nesterov), compiled)


class Lion(ElementwiseOptimizer):
    """Sign of an interpolated momentum."""

    moments = ("exp_avg",)

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimConfig, compiled: bool = False) -> None:
        super().__init__(groups, partial(lion_formula, beta1=config.beta1, beta2=config.beta2), compiled)


def sgd_formula(
    gradient: Tensor, weight: Tensor, momentum: Tensor, lr: Tensor, kept: Tensor, *, decay: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """New weight and momentum."""
    momentum = decay * momentum + gradient
    direction = gradient + decay * momentum if nesterov else momentum
    return weight * kept - lr * direction, momentum


def lion_formula(
    gradient: Tensor, weight: Tensor, mean: Tensor, lr: Tensor, kept: Tensor, *, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """New weight and mean."""
    direction = beta1 * mean + (1 - beta1) * gradient
    return weight * kept - lr * direction.sign(), beta2 * mean + (1 - beta2) * gradient
