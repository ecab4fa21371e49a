"""Adafactor: the mean squared gradient of a matrix as an outer product of its row and column means.

    b = 1 - t^(-0.8)               s = g^2 + 1e-30
    r = b r + (1 - b) mean over columns of s          c = b c + (1 - b) mean over rows of s
    u = g / sqrt(r c^T / mean(r))                     u = u / max(1, rms(u) / clip)
    w = w (1 - lr wd) - lr u

A matrix of R rows and C columns needs R + C numbers instead of R C: next to no state. Vectors keep their whole mean
square. With `beta1` the update is averaged, which costs 4 bytes a parameter again. The learning rate is the schedule's
(the relative step sizes of the original are not used). A stack of matrices is factored matrix by matrix.

A matrix that is spread over processes needs three small sums over all of them each step: rows, columns, and rms(u).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.shards import box, sum_over_parts
from zero2all.train.optimizers.base import (
    Optimizer,
    ParameterGroup,
    ParamState,
    StepInputs,
    master_dtype,
    replace,
    scaled,
    zeros_like_master,
)

TINY = 1e-30
"""Added to squared gradients, so that a value without any gradient does not divide by zero."""


class Adafactor(Optimizer):
    """Factored second moments, momentum only with `beta1`."""

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimConfig) -> None:
        self.config, self.beta1 = config, config.adafactor_beta1
        super().__init__(groups)

    def initial_state(self, param: ParamState) -> dict[str, Tensor]:
        """Row and column means, whole in every process, or the mean square of a vector; momentum by option."""
        shape, device, dtype = param.parameter.shape, param.weight.device, master_dtype(param.weight)
        momentum = {"momentum": zeros_like_master(param)} if self.beta1 else {}
        if len(shape) < 2:
            return {"exp_avg_sq": zeros_like_master(param), **momentum}
        return {
            "row_means": torch.zeros(shape[:-1], device=device, dtype=dtype),
            "column_means": torch.zeros((*shape[:-2], shape[-1]), device=device, dtype=dtype),
            **momentum,
        }

    def update(self, inputs: StepInputs) -> None:
        """One parameter after the other."""
        decay = 1 - inputs.count.double() ** -self.config.adafactor_decay_power
        for group in self.param_groups:
            for param in group.params:
                gradient = param.gradient
                if gradient is not None:
                    self._update_one(param, group, scaled(gradient, inputs.scale), decay, inputs.skip)

    def _update_one(
        self, param: ParamState, group: ParameterGroup, gradient: Tensor, decay: Tensor, skip: Tensor | None
    ) -> None:
        square = gradient * gradient + TINY
        if "exp_avg_sq" in param.state:
            mean_square = decay * param.moment("exp_avg_sq") + (1 - decay) * square
            replace(param.moment("exp_avg_sq"), mean_square, skip)
        else:
            mean_square = self._factored(param, square, decay, skip)
        direction = gradient * mean_square.rsqrt()
        total = sum_over_parts((direction * direction).sum(), param.parameter)
        rms = (total / param.parameter.numel()).sqrt()
        direction = direction / (rms / self.config.adafactor_clip_rms).clamp(min=1.0)
        if self.beta1:
            direction = self.beta1 * param.moment("momentum") + (1 - self.beta1) * direction
            replace(param.moment("momentum"), direction, skip)
        replace(param.weight, param.weight * (1 - group.lr * group.weight_decay) - group.lr * direction, skip)

    def _factored(self, param: ParamState, square: Tensor, decay: Tensor, skip: Tensor | None) -> Tensor:
        """The estimate of the mean square for the part of the matrix in this process."""
        rows, columns = param.state["row_means"], param.state["column_means"]
        place = box(param.parameter)
        in_rows, in_columns = place[:-1], (*place[:-2], place[-1])
        row_sums, column_sums = torch.zeros_like(rows), torch.zeros_like(columns)
        row_sums[in_rows] = square.sum(dim=-1)
        column_sums[in_columns] = square.sum(dim=-2)
        sum_over_parts(row_sums, param.parameter)
        sum_over_parts(column_sums, param.parameter)
        new_rows = decay * rows + (1 - decay) * row_sums / columns.shape[-1]
        new_columns = decay * columns + (1 - decay) * column_sums / rows.shape[-1]
        replace(rows, new_rows, skip)
        replace(columns, new_columns, skip)
        share = new_rows / new_rows.mean(dim=-1, keepdim=True)
        return share[in_rows].unsqueeze(-1) * new_columns[in_columns].unsqueeze(-2)
