"""AdamW over flat buffers, in the implementation the registry chose: the fast path of ZeRO-0, 1 and 2.

The same contract as every optimizer here (see `base`), but gradients are read from the buffers, and the low-precision
weights of the forward pass are written in the same pass as their masters.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.ops.optimizer import AdamWConstants as Constants
from zero2all.ops.optimizer import Flat, OptimizerOp
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.base import STEP_NAME, decay_of
from zero2all.train.weights import FlatWeights

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """AdamW on the own ranges of `FlatWeights`; nothing here waits for the device."""

    writes_weights = True
    clears_gradients = False

    def __init__(self, weights: FlatWeights, update: OptimizerOp, config: OptimConfig) -> None:
        self._weights, self._update = weights, update
        self._constants = Constants(config.beta1, config.beta2, config.eps)
        device, dtype = weights.gradients.device, weights.gradients.dtype
        self.firsts, self.seconds = (torch.zeros(weights.own_length, dtype=dtype, device=device) for _ in MOMENTS)
        self.updates = torch.zeros((), dtype=torch.float32, device=device)
        kinds = [bucket.kind for bucket in weights.plan.buckets]
        self._multipliers = [config.lr_multipliers.get(kind, 1.0) for kind in kinds]
        self._decays = [decay_of(kind, config) for kind in kinds]
        self._groups = [self._group(number, decay) for number, decay in enumerate(self._decays)]

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

    def set_learning_rate(self, rate: float, weight_decay_share: float = 1.0, momentum: float | None = None) -> None:  # noqa: ARG002
        """The rate of the next steps; groups with a multiplier take their share of it. The share of the decay."""
        for group, multiplier, decay in zip(self._groups, self._multipliers, self._decays, strict=True):
            group.lr, group.weight_decay = rate * multiplier, decay * weight_decay_share

    @torch.no_grad()
    def step(self, grads_scale: Tensor, found_nonfinite: Tensor) -> None:
        """One update with gradients times `grads_scale`, or none at all where `found_nonfinite` is set."""
        self._update(self._groups, self.updates, grads_scale, found_nonfinite, self._constants)
        self._weights.start_all_gather()

    def state_tensors(self) -> dict[str, TensorPart]:
        """The moments by parameter, and the number of updates; live."""
        return _state_tensors(self._weights, self.updates, self.firsts, self.seconds)


class HostAdamW:
    """AdamW in host memory, on the own ranges of offloaded `FlatWeights` (`parallel.offload`): the same contract,
    updated by `zero2all.train.offload`; a step only starts it.

    Masters and moments of the own ranges lie on the host, and torch's fused kernel updates a piece of them in one pass
    on all cores. Masters are whole float32 numbers, not split (`zero2all.ops.split_master`): joining and splitting them
    takes longer here than the update itself. State: 12 bytes a parameter, 24 in float64.
    """

    writes_weights = True
    clears_gradients = True

    def __init__(self, weights: FlatWeights, config: OptimConfig) -> None:
        assert weights.pipeline is not None, "the weights are not offloaded"
        self._weights, self._config, self._pipeline = weights, config, weights.pipeline
        dtype = weights.gradients.dtype
        self.firsts, self.seconds = (torch.zeros(weights.own_length, dtype=dtype) for _ in MOMENTS)
        self.updates = torch.zeros((), dtype=torch.float32)
        self._kinds = [bucket.kind for bucket in weights.plan.buckets]
        self._rates = (0.0, 1.0)

    def set_learning_rate(self, rate: float, weight_decay_share: float = 1.0, momentum: float | None = None) -> None:  # noqa: ARG002
        """The rate of the next steps; groups with a multiplier take their share of it. The share of the decay."""
        self._rates = rate, weight_decay_share

    @torch.no_grad()
    def step(self, grads_scale: Tensor, found_nonfinite: Tensor) -> None:
        """Start one update with gradients times `grads_scale`, or none at all where `found_nonfinite` is set. It also
        sets the gradients to zero."""
        self._weights.wait()
        self._pipeline.start(_Step(self, *self._rates), grads_scale, found_nonfinite)
        self._weights.start_host_to_device()

    def state_tensors(self) -> dict[str, TensorPart]:
        """The moments by parameter, and the number of updates; live, after the update that is running."""
        self._pipeline.finish()
        return _state_tensors(self._weights, self.updates, self.firsts, self.seconds)

    def update(
        self, bucket: int, at: slice, gradient: Tensor, weights: Tensor, rate: float, weight_decay_share: float
    ) -> None:
        """One piece, by the worker of the pipeline: masters and moments `at`, new low-precision `weights`."""
        masters, config, kind = self._weights.masters[at], self._config, self._kinds[bucket]
        torch._fused_adamw_(
            [masters], [gradient], [self.firsts[at]], [self.seconds[at]], [], [self.updates],
            lr=rate * config.lr_multipliers.get(kind, 1.0), beta1=config.beta1, beta2=config.beta2,
            weight_decay=weight_decay_share * decay_of(kind, config), eps=config.eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        weights.copy_(masters)


@dataclass(frozen=True)
class _Step:
    """One update, with the rate of its step."""

    optimizer: HostAdamW
    rate: float
    weight_decay_share: float

    def begin(self) -> None:
        """Count it."""
        self.optimizer.updates.add_(1.0)

    def apply(self, bucket: int, at: slice, gradient: Tensor, weights: Tensor) -> None:
        """Update a piece."""
        self.optimizer.update(bucket, at, gradient, weights, self.rate, self.weight_decay_share)


def _state_tensors(weights: FlatWeights, updates: Tensor, *moments: Tensor) -> dict[str, TensorPart]:
    tensors = {STEP_NAME: TensorPart.whole(updates)}
    for moment, flat in zip(MOMENTS, moments, strict=True):
        tensors |= {f"{moment}/{name}": part for name, part in weights.parts(flat).items()}
    return tensors
