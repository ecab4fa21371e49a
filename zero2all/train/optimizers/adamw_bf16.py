"""AdamW with everything in bfloat16: weights, gradients and both moments, 8 bytes a parameter in all.

There is no float32 master and no copy for the forward pass: the weights themselves are bfloat16. The arithmetic of a
step is float32; what is stored is rounded stochastically (`rounding`). bfloat16 has 8 significant bits, so an update
smaller than about 1/500 of its weight would be lost to rounding every single time, and a mean square would stop
following once its change per step is that small. With random rounding both are right on average.

`kahan` keeps for each weight what its last rounding cut off, in 2 more bytes, and adds it back at the next step: the
weight then has about 16 significant bits, and no noise. The moments are rounded stochastically either way.

bytes a parameter   weight 2 + gradient 2 + mean 2 + mean square 2 = 8        with kahan + 2 = 10
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero2all.train.optimizers.adamw import adamw_formula, adamw_numbers
from zero2all.train.optimizers.base import (
    Optimizer,
    ParameterGroup,
    ParamState,
    StepInputs,
    replace,
    row_chunks,
    scaled,
)
from zero2all.train.optimizers.rounding import random_bits, rounding_key, to_bfloat16
from zero2all.train.optimizers.shards import flat_index, spread_like


class AdamWBf16(Optimizer):
    """AdamW on bfloat16 parameters; a float32 parameter among them keeps its precision, with bfloat16 moments."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        beta1: float,
        beta2: float,
        eps: float,
        seed: int,
        kahan: bool = False,
        compiled: bool = False,
    ) -> None:
        self.beta1, self.beta2, self.eps, self.seed, self.kahan = beta1, beta2, eps, seed, kahan
        super().__init__(groups)
        self.apply = torch.compile(bf16_step, dynamic=True) if compiled else bf16_step

    def initial_state(self, param: ParamState) -> dict[str, Tensor]:
        """Two moments and, for kahan, the rest of the weight."""
        names = ["exp_avg", "exp_avg_sq"]
        names += ["rest"] if self.kahan and param.weight.dtype == torch.bfloat16 else []
        return {
            name: spread_like(param.parameter, torch.zeros_like(param.weight, dtype=torch.bfloat16)) for name in names
        }

    def update(self, inputs: StepInputs) -> None:
        """One parameter after the other."""
        for group in self.param_groups:
            numbers = adamw_numbers(group, inputs.count, self.beta1, self.beta2)
            for param in group.params:
                self._update_one(param, numbers, inputs)

    def _update_one(self, param: ParamState, numbers: tuple[Tensor, ...], inputs: StepInputs) -> None:
        gradient = param.gradient
        if gradient is None:
            return
        key = rounding_key(self.seed, param.index, inputs.count)
        for rows in row_chunks(param.weight):
            self.apply(
                gradient[rows].reshape(-1),
                param.weight[rows].view(-1),
                param.moment("exp_avg")[rows].view(-1),
                param.moment("exp_avg_sq")[rows].view(-1),
                param.moment("rest")[rows].view(-1) if "rest" in param.state else None,
                numbers,
                flat_index(param.parameter, rows).view(-1),
                key,
                inputs.scale,
                inputs.skip,
                (self.beta1, self.beta2, self.eps),
            )


def bf16_step(
    gradient: Tensor,
    weight: Tensor,
    mean: Tensor,
    square: Tensor,
    rest: Tensor | None,
    numbers: tuple[Tensor, ...],
    index: Tensor,
    key: Tensor,
    scale: Tensor | None,
    skip: Tensor | None,
    constants: tuple[float, float, float],
) -> None:
    """Widen, update by AdamW's formula, round and store."""
    beta1, beta2, eps = constants
    exact = weight.float() if rest is None else weight.float() + rest.float()
    exact, new_mean, new_square = adamw_formula(
        scaled(gradient, scale), exact, mean.float(), square.float(), *numbers, beta1=beta1, beta2=beta2, eps=eps
    )
    bits = random_bits(index, key, 0)
    replace(mean, to_bfloat16(new_mean, bits), skip)
    replace(square, to_bfloat16(new_square, bits >> 16), skip)
    if weight.dtype != torch.bfloat16:
        replace(weight, exact, skip)
    elif rest is None:
        replace(weight, to_bfloat16(exact, random_bits(index, key, 1)), skip)
    else:
        nearest = exact.to(torch.bfloat16)
        replace(weight, nearest, skip)
        replace(rest, (exact - nearest.float()).to(torch.bfloat16), skip)
