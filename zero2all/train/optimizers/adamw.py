"""AdamW: each value's step is its mean gradient over the root of its mean squared gradient.

    m = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

`fused` is torch's own kernel for the same, which also takes the clip factor and the cancel flag; the formula here is
the reference it is tested against. State: 8 bytes a parameter.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.train.optimizers.base import ElementwiseOptimizer, ParameterGroup, StepInputs, bias_correction


class AdamW(ElementwiseOptimizer):
    """Adam with decoupled weight decay."""

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, groups: Sequence[ParameterGroup], config: OptimConfig, fused: bool = False, compiled: bool = False
    ) -> None:
        self.config, self.fused = config, fused
        formula = partial(adamw_formula, beta1=config.beta1, beta2=config.beta2, eps=config.eps)
        super().__init__(groups, formula, compiled)

    def numbers(self, group: ParameterGroup, count: Tensor) -> tuple[Tensor, ...]:
        """Rate, what the decay leaves, and both bias corrections."""
        return (
            *super().numbers(group, count),
            bias_correction(self.config.beta1, count),
            bias_correction(self.config.beta2, count),
        )

    def update(self, inputs: StepInputs) -> None:
        """By torch's kernel or by the formula."""
        if not self.fused:
            super().update(inputs)
            return
        found = None if inputs.skip is None else inputs.skip.float()
        inverse = None if inputs.scale is None else inputs.scale.float().reciprocal()
        for group in self.param_groups:
            rows = [
                (param.weight, gradient.to(param.weight.dtype), param.moment("exp_avg"), param.moment("exp_avg_sq"))
                for param in group.params
                if (gradient := param.gradient) is not None and gradient.numel()
            ]
            if not rows:
                continue
            weights, gradients, means, squares = (list(column) for column in zip(*rows, strict=True))
            torch._fused_adamw_(
                weights,
                gradients,
                means,
                squares,
                [],
                [inputs.count] * len(rows),
                lr=group.lr,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                weight_decay=group.decay,
                eps=self.config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=inverse,  # the kernel divides by it
                found_inf=found,
            )


def adamw_formula(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    lr: Tensor,
    kept: Tensor,
    correction1: Tensor,
    correction2: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New weight, mean and mean square."""
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    denominator = (square / correction2).sqrt() + eps
    return weight * kept - (lr / correction1) * mean / denominator, mean, square
