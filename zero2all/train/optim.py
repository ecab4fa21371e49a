"""AdamW over the flat weights of a run, in the implementation the registry chose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero2all.model.z2all import Z2all
from zero2all.ops.optimizer import AdamW, Flat
from zero2all.train.config import OptimConfig
from zero2all.train.weights import FlatWeights

TABLES = ("embedding.weight", "head.weight")
MOMENTS = ("exp_avg", "exp_avg_sq")
UPDATES = "updates"


def decayed_names(model: Z2all, config: OptimConfig) -> frozenset[str]:
    """The parameters that weight decay acts on: matrices, by option the vocabulary tables; never norms and biases."""
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and (config.decay_embeddings or name not in TABLES)
    )


class Optimizer:
    """Two groups: what decays and what does not. Nothing here waits for the device."""

    def __init__(self, model: Z2all, weights: FlatWeights, config: OptimConfig) -> None:
        self.weights, self._update = weights, model.ops.optimizer
        self._constants = AdamW(config.beta1, config.beta2, config.eps, config.clip_grad_norm)
        self.firsts, self.seconds = torch.zeros_like(weights.masters), torch.zeros_like(weights.masters)
        self.updates = torch.zeros((), dtype=torch.float64, device=weights.masters.device)
        """Updates made; a skipped one does not count."""
        self._norm = _norm_for({choice.operator: choice.got for choice in model.ops.choices}["optimizer"])
        stretches = ((weights.decayed, config.weight_decay), (weights.kept, 0.0))
        self.groups = [self._group(at, decay) for at, decay in stretches if at.stop > at.start]

    def _group(self, at: slice, weight_decay: float) -> Flat:
        own = self.weights
        inside = [place.at for place in own.places if at.start <= place.at.start < at.stop]
        masters = own.masters[at]
        return Flat(
            weights=masters if own.weights is own.masters else own.weights[at],
            masters=masters,
            gradients=own.gradients[at],
            firsts=self.firsts[at],
            seconds=self.seconds[at],
            slices=tuple(slice(place.start - at.start, place.stop - at.start) for place in inside),
            weight_decay=weight_decay,
        )

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient before clipping, as a scalar on the device."""
        return self._norm(self.weights.gradients)

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor) -> None:
        """Clip by `norm`, update, and begin a new gradient; where `norm` is not finite, only the last."""
        self._update(self.groups, self.updates, lr, norm, self._constants)
        self.weights.touched()
        self.weights.zero_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments as '<moment>/<parameter name>', and the number of updates."""
        tensors = {UPDATES: self.updates}
        for moment, flat in zip(MOMENTS, (self.firsts, self.seconds), strict=True):
            tensors |= {f"{moment}/{name}": view for name, view in self.weights.by_name(flat).items()}
        return tensors


def _norm_for(implementation: str) -> Callable[[Tensor], Tensor]:
    if implementation == "triton":
        from zero2all.ops.kernels.adamw import gradient_norm

        return gradient_norm
    return torch.linalg.vector_norm
