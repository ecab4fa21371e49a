"""AdamW over flat buffers, in the implementation the registry chose: the fast path of ZeRO-0, 1 and 2.

The same contract as every optimizer here (see `base`), but gradients are read from the buffers, and the low-precision
weights of the forward pass are written in the same pass as their masters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.ops.optimizer import AdamW as Constants
from zero2all.ops.optimizer import Flat, OptimizerOp
from zero2all.parallel.parts import Part
from zero2all.train.optimizers.base import STEP_NAME, decay_of
from zero2all.train.weights import FlatWeights

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """AdamW on the own ranges of `FlatWeights`; nothing here waits for the device."""

    writes_weights = True

    def __init__(self, weights: FlatWeights, update: OptimizerOp, config: OptimConfig) -> None:
        self._weights, self._update = weights, update
        self._constants = Constants(config.beta1, config.beta2, config.eps)
        device, dtype = weights.gradients.device, weights.gradients.dtype
        self.firsts, self.seconds = (torch.zeros(weights.own_length, dtype=dtype, device=device) for _ in MOMENTS)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        kinds = [bucket.kind for bucket in weights.plan.buckets]
        self._multipliers = [config.lr_multipliers.get(kind, 1.0) for kind in kinds]
        self._groups = [self._group(number, decay_of(kind, config)) for number, kind in enumerate(kinds)]

    def _group(self, number: int, weight_decay: float) -> Flat:
        """The own range of a bucket."""
        own = self._weights
        buffers = (own.weights, own.masters, own.gradients, self.firsts, self.seconds)
        weights, masters, gradients, firsts, seconds = (dict(own.flat_ranges(flat))[number] for flat in buffers)
        return Flat(
            weights=masters if own.weights is own.masters else weights,
            masters=masters,
            gradients=gradients,
            firsts=firsts,
            seconds=seconds,
            slices=own.parameter_slices(number),
            weight_decay=weight_decay,
        )

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next steps; groups with a multiplier take their share of it."""
        for group, multiplier in zip(self._groups, self._multipliers, strict=True):
            group.lr = rate * multiplier

    @torch.no_grad()
    def step(self, grads_scale: Tensor, found_nonfinite: Tensor) -> None:
        """One update with gradients times `grads_scale`, or none at all where `found_nonfinite` is set."""
        self._update(self._groups, self.updates, grads_scale, found_nonfinite, self._constants)
        self._weights.touched()

    def state_tensors(self) -> dict[str, Part]:
        """The moments by parameter, and the number of updates; live."""
        tensors = {STEP_NAME: Part.whole(self.updates)}
        for moment, flat in zip(MOMENTS, (self.firsts, self.seconds), strict=True):
            tensors |= {f"{moment}/{name}": part for name, part in self._weights.parts(flat).items()}
        return tensors
