"""Everything that changes while a run trains, in one object that a test can build without a GPU.

There is no random state to keep: dropout is seeded from (seed, step), and the data order is a pure function of the
step. What a checkpoint must hold is therefore the master weights, the optimizer's moments and a few counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.model.z2all import Z2all
from zero2all.train.config import OptimConfig
from zero2all.train.optim import Optimizer, decayed_names
from zero2all.train.weights import FlatWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class TrainState:
    """The run at one moment: `step` steps have been made."""

    model: Z2all
    weights: FlatWeights
    optimizer: Optimizer
    step: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0

    def counters(self) -> dict[str, int]:
        """The small numbers, for state.json."""
        return {"step": self.step, "tokens": self.tokens, "skips_in_a_row": self.skips_in_a_row}

    def model_tensors(self) -> dict[str, Tensor]:
        """The master weights by name."""
        return self.weights.by_name(self.weights.masters)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """What the optimizer remembers, by name."""
        return self.optimizer.state_tensors()

    @torch.no_grad()
    def restore(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Take over what a checkpoint held; raises before touching anything when names or shapes do not match.

        `optimizer` is empty for imported weights: the moments then stay at zero.
        """
        own = self.model_tensors()
        remembered = self.optimizer_tensors() if optimizer else {}
        for held, found in ((own, model), (remembered, optimizer)):
            check_shapes({name: tuple(value.shape) for name, value in held.items()}, found)
        for held, found in ((own, model), (remembered, optimizer)):
            for name, value in held.items():
                value.copy_(found[name])
        self.weights.publish()
        self.step, self.tokens = int(counters["step"]), int(counters["tokens"])
        self.skips_in_a_row = int(counters["skips_in_a_row"])


def new_state(model: Z2all, optim: OptimConfig, dtype: torch.dtype) -> TrainState:
    """The state of a run before its first step, with the model's weights in `dtype` from here on."""
    weights = FlatWeights(model, decayed_names(model, optim), dtype)
    return TrainState(model, weights, Optimizer(model, weights, optim))


def check_shapes(expected: dict[str, tuple[int, ...]], found: dict[str, Tensor]) -> None:
    """Raise when a checkpoint is not of this model, naming the first differences."""
    differences = [
        f"{name}: {tuple(found[name].shape) if name in found else 'absent'} instead of {shape}"
        for name, shape in expected.items()
        if name not in found or tuple(found[name].shape) != shape
    ]
    differences += [f"{name}: unknown here" for name in found if name not in expected]
    if differences:
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise BadInputError(
            f"The checkpoint is of another model: {'; '.join(differences[:4])}{more}. Use the config it was trained "
            f"with (config.yaml in its run folder), or choose another train.name."
        )
