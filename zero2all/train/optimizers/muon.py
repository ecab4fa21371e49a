"""Muon: the momentum of a matrix, made nearly orthogonal before it becomes a step; AdamW for everything else.

    m = mu m + (1 - mu) g          u = (1 - mu) g + mu m with Nesterov, m without
    o = orthogonalise(u): with u = U S V^T it is close to U V^T, every direction of the matrix gets an equal step
    w = w (1 - lr wd) - lr rms sqrt(max(rows, columns)) o

The factor gives the step a root mean square of `rms` (0.2), about that of AdamW, whose learning rate and weight decay
carry over. Newton-Schulz finds o with products only: x = u / |u|, then repeats x = a x + b (x x^T) x + c (x x^T)^2 x.

A tensor that holds several matrices (q, k, v; gate, up) is cut into them first: orthogonalising them together would tie
their scales. Equal shapes are stacked, so that small models need few products.

A matrix that is spread over processes is gathered whole (in the precision of the iterations), orthogonalised by every
process, and each takes its part back, so the result does not depend on the number of processes; the products take as
long on many processes as on one. State: 4 bytes a parameter of a matrix, 8 of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.shards import box, spread_like, whole
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import (
    Optimizer,
    ParameterGroup,
    ParamState,
    StepInputs,
    replace,
    scaled,
    zeros_like_master,
)
from zero2all.train.optimizers.roles import Role

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STACK_VALUES = 1 << 26
"""Values orthogonalised at once: enough to keep a GPU busy, little beside the model."""


class Muon(Optimizer):
    """Orthogonalised momentum for matrices, AdamW for embeddings, head, norms and biases."""

    def __init__(self, groups: Sequence[ParameterGroup], rest: AdamW, config: OptimConfig) -> None:
        super().__init__(groups)
        self.matrices, self.rest, self.config = list(groups), rest, config
        self.param_groups = [*groups, *rest.param_groups]

    def initial_state(self, param: ParamState) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": zeros_like_master(param)}

    def update(self, inputs: StepInputs) -> None:
        """Matrices of equal shape together, as many as STACK_VALUES allows; then the rest."""
        for group in self.matrices:
            for params in _stacks(group.params):
                places = [box(param.parameter) for param in params]
                directions = torch.stack([self._direction(param, inputs) for param in params])  # (n, …, rows, columns)
                steps = self._orthogonal_parts(directions, params[0].role)
                for param, place, step in zip(params, places, steps, strict=True):
                    kept = param.weight * (1 - group.lr * group.weight_decay)
                    replace(param.weight, kept - group.lr * step[place].to(kept.dtype), inputs.skip)
        self.rest.update(inputs)

    def _direction(self, param: ParamState, inputs: StepInputs) -> Tensor:
        """Update the momentum; returns the whole matrix to orthogonalise."""
        gradient, momentum = param.gradient, param.moment("momentum")
        assert gradient is not None, "_stacks takes only params with a gradient"
        gradient = scaled(gradient, inputs.scale)
        mu = self.config.momentum
        new = mu * momentum + (1 - mu) * gradient
        replace(momentum, new, inputs.skip)
        ahead = (1 - mu) * gradient + mu * new if self.config.nesterov else new
        return whole(spread_like(param.parameter, ahead.to(self._dtype(ahead))))

    def _orthogonal_parts(self, matrices: Tensor, role: Role) -> Tensor:
        """`_orthogonal` of each matrix that is stored in one of (..., rows, columns)."""
        if role.alternating > 1:
            apart = matrices.unflatten(-2, (-1, role.alternating)).transpose(-3, -2)  # (..., several, rows, columns)
            return self._orthogonal(apart).transpose(-3, -2).flatten(-3, -2)
        splits = role.splits or (matrices.shape[-2],)
        return torch.cat([self._orthogonal(part) for part in matrices.split(splits, dim=-2)], dim=-2)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """(..., rows, columns) -> the same, nearly orthogonal and of the wanted root mean square."""
        scale = self.config.muon_update_rms * max(matrices.shape[-2:]) ** 0.5
        return scale * orthogonalise(matrices, self.config.muon_iterations)

    def _dtype(self, matrix: Tensor) -> torch.dtype:
        if matrix.dtype == torch.float64:
            return torch.float64
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(self.config.muon_precision)
        return chosen or (torch.bfloat16 if matrix.is_cuda else torch.float32)


def orthogonalise(matrices: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz on each of (..., rows, columns), in their precision."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # x x^T is then the smaller product
    length = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / length.clamp(min=1e-30)).to(matrices.dtype)
    for _ in range(iterations):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if tall else x


def _stacks(params: list[ParamState]) -> Iterator[list[ParamState]]:
    """Parameters with a gradient, those of equal shape and role together, each stack of at most STACK_VALUES."""
    alike: dict[tuple[object, ...], list[ParamState]] = {}
    for param in params:
        if param.gradient is not None:
            alike.setdefault((param.parameter.shape, param.role), []).append(param)
    for same in alike.values():
        at_once = max(1, STACK_VALUES // max(1, same[0].parameter.numel()))
        for first in range(0, len(same), at_once):
            yield same[first : first + at_once]
