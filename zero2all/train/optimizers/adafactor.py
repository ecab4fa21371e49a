"""Adafactor: the mean squared gradient of a matrix as an outer product of its row and column means.

    b = 1 - t^(-0.8)               s = g^2 + 1e-30
    r = b r + (1 - b) mean over columns of s          c = b c + (1 - b) mean over rows of s
    u = g / sqrt(r c^T / mean(r))                     u = u / max(1, rms(u) / clip)
    w = w (1 - lr wd) - lr u

A matrix of R rows and C columns needs R + C numbers instead of R C: next to no state. Vectors keep their whole mean
square. With `beta1` the update is averaged, which costs 4 bytes a parameter again. The learning rate is the schedule's
(the relative step sizes of the original are not used). A stack of matrices is factored matrix by matrix.

A matrix with one owner needs no other process. Of one that is cut by rows (ZeRO-3) two small sums are taken over the
processes each step: the sums of columns with that of r, and that of u^2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.parts import Part
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

    def initial_state(self, param: ParamState) -> dict[str, Part]:
        """Row and column means of a matrix, or the mean square of a vector; momentum by option. Of a matrix that is cut
        by rows, each process has the row means of its rows and all column means."""
        part, shape = param.part, param.parameter.shape
        momentum = {"momentum": zeros_like_master(param)} if self.beta1 else {}
        if len(shape) < 2:
            return {"exp_avg_sq": zeros_like_master(param), **momentum}
        assert part.has_whole_rows, f"{param.parameter.name}: Adafactor takes means of rows, and the layout cuts rows"
        local = part.values.shape
        rows = part.values.new_zeros(local[:-1], dtype=master_dtype(part.values))
        columns = part.values.new_zeros((*local[:-2], shape[-1]), dtype=rows.dtype)
        return {
            "row_means": part.by_row(rows, shape[1:-1]),
            "column_means": part.by_row(columns, (*shape[1:-2], shape[-1])) if len(shape) > 2 else Part.whole(columns),
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
        rms = self._rms(param, direction)
        direction = direction / (rms / self.config.adafactor_clip_rms).clamp(min=1.0)
        if self.beta1:
            direction = self.beta1 * param.moment("momentum") + (1 - self.beta1) * direction
            replace(param.moment("momentum"), direction, skip)
        replace(param.weight, param.weight * (1 - group.lr * group.decay) - group.lr * direction, skip)

    def _rms(self, param: ParamState, direction: Tensor) -> Tensor:
        """The root mean square of an update: of each matrix of a stack, which no process has only a part of; else of
        the whole parameter."""
        square, shape = direction * direction, param.parameter.shape
        if len(shape) > 2:
            return square.mean(dim=(-2, -1), keepdim=True).sqrt()
        return (param.part.sum(square.sum()) / param.parameter.numel).sqrt()

    def _factored(self, param: ParamState, square: Tensor, decay: Tensor, skip: Tensor | None) -> Tensor:
        """The estimate of the mean square for the rows of the matrix in this process."""
        rows, columns = param.moment("row_means"), param.moment("column_means")
        row_count, column_count = param.parameter.shape[-2:]
        new_rows = decay * rows + (1 - decay) * square.sum(dim=-1) / column_count
        column_sums, total = square.sum(dim=-2), new_rows.sum(dim=-1, keepdim=True)
        if square.dim() == 2:  # the rows of a stack of matrices are whole matrices
            column_sums, total = param.part.sum(torch.cat([column_sums, total])).split([column_count, 1])
        new_columns = decay * columns + (1 - decay) * column_sums / row_count
        replace(rows, new_rows, skip)
        replace(columns, new_columns, skip)
        share = new_rows / (total / row_count)
        return share.unsqueeze(-1) * new_columns.unsqueeze(-2)
