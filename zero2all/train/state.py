"""Everything that changes while a run trains, in one object that a test can build without a GPU.

There is no random state to keep: dropout is seeded from (seed, step, rank), and the data order is a pure function of
the position. What a checkpoint must hold is therefore the master weights, the optimizer's moments, the loss scale of
float16, a few counters, and what the guards remember.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.optimizer import TAKES_HALVES
from zero2all.train.loss_scale import LossScale
from zero2all.train.optimizers.factory import build_optimizer
from zero2all.train.optimizers.flat_adamw import FlatAdamW
from zero2all.train.optimizers.roles import model_roles
from zero2all.train.recorded import RecordedPasses
from zero2all.train.weights import FlatWeights, ShardedWeights, Weights

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class StepOptimizer(Protocol):
    """What a training step asks of an optimizer; see `zero2all.train.optimizers.base`."""

    writes_weights: bool
    """Whether a step also writes the low-precision weights of the forward pass."""

    def set_learning_rate(self, rate: float) -> None:
        """The rate of the next steps."""

    def step(self, grads_scale: Tensor, found_nonfinite: Tensor) -> None:
        """One update, or none."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything to keep; live."""


@dataclass
class TrainState:
    """The run at one moment: `step` steps have been made."""

    model: Z2all
    weights: Weights
    optimizer: StepOptimizer
    micro_batch_samples: int
    """Rows of one pass at data.seq_len."""
    loss_scale: LossScale | None = None
    recorded: RecordedPasses | None = None
    """Runs the passes, where they are recorded."""
    step: int = 0
    tokens: int = 0

    @contextmanager
    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """Between two steps, all tensors of a checkpoint as 'group/name'. One can be loaded right into them; `loaded`
        has to follow, after the context."""
        with self.model_tensors() as masters:
            yield {**masters, **self.optimizer_tensors()}

    @contextmanager
    def model_tensors(self) -> Iterator[dict[str, Tensor]]:
        """The master weights, likewise."""
        with self.weights.masters_between_steps() as masters:
            yield {f"model/{name}": value for name, value in masters.items()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Moments, the number of updates, and the loss scale."""
        tensors = {f"optimizer/{name}": value for name, value in self.optimizer.state_tensors().items()}
        if self.loss_scale is not None:
            tensors |= {f"optimizer/loss_scale/{name}": value for name, value in self.loss_scale.tensors().items()}
        return tensors

    def counters(self) -> dict[str, int]:
        """The small numbers."""
        return {"step": self.step, "tokens": self.tokens}

    def loaded(self, counters: Mapping[str, Any]) -> None:
        """The tensors hold what a checkpoint held: go on from its counters."""
        self.weights.updated()
        self.weights.zero_gradients()
        self.step, self.tokens = int(counters["step"]), int(counters["tokens"])


def new_state(
    model: Z2all,
    optim: OptimConfig,
    dtype: torch.dtype,
    micro_batch_samples: int = 1,
    sharded: bool = False,
    seed: int = 0,
) -> TrainState:
    """The state of a run before its first step. A model that is not `sharded` has its weights in `dtype` from here on.

    AdamW on whole weights takes the registry's fast path; every other optimizer works on the masters one by one.
    """
    # torch's kernels round the factor on the gradient to float32, which a run in float64 is there to rule out.
    is_fast = optim.kind == "adamw" and dtype != torch.float64 and not sharded
    names = [name for name, _ in model.named_parameters()]
    roles = model_roles(model.config, names)
    weights: Weights
    optimizer: Any
    if sharded:
        weights = ShardedWeights(model, dtype)
    else:
        kinds = {name: roles[name].kind for name in names}
        in_halves = is_fast and dtype == torch.bfloat16 and model.ops.taken["optimizer"] in TAKES_HALVES
        weights = FlatWeights(model, kinds, dtype, with_masters=optim.kind != "adamw_bf16", in_halves=in_halves)
    if isinstance(weights, FlatWeights) and is_fast:
        optimizer = FlatAdamW(weights, model.ops.optimizer, optim)
    else:
        optimizer = build_optimizer(weights.masters_by_name().items(), optim, roles, seed=seed)
    device = next(model.parameters()).device
    scale = LossScale(device) if dtype == torch.float16 else None
    return TrainState(model, weights, optimizer, micro_batch_samples, scale)
