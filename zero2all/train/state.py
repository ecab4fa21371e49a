"""Everything that changes while a run trains, in one object that a test can build without a GPU.

There is no random state to keep: dropout is seeded from (seed, step), and the data order is a pure function of the
step. What a checkpoint must hold is therefore weights, optimizer moments and three counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError
from zero2all.model.z2all import Z2all

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class TrainState:
    """The run at one moment: `step` updates have been made."""

    model: Z2all
    optimizer: torch.optim.AdamW
    step: int = 0
    tokens: int = 0
    skips_in_a_row: int = 0

    def counters(self) -> dict[str, int]:
        """The small numbers, for state.json."""
        return {"step": self.step, "tokens": self.tokens, "skips_in_a_row": self.skips_in_a_row}

    def model_tensors(self) -> dict[str, Tensor]:
        """Weights by name."""
        return dict(self.model.state_dict())

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Moments as '<moment>/<parameter name>'; empty before the first update."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            for moment, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{moment}/{name}"] = value
        return tensors

    def restore(self, model: dict[str, Tensor], optimizer: dict[str, Tensor], counters: dict[str, Any]) -> None:
        """Take over what a checkpoint held; raises before touching anything when names or shapes do not match."""
        own = self.model.state_dict()
        parameters = dict(self.model.named_parameters())
        check_shapes({name: tuple(value.shape) for name, value in own.items()}, model)
        if optimizer:  # empty for imported weights, and while every update so far was skipped
            check_shapes(
                {
                    f"{moment}/{name}": () if moment == "step" else tuple(parameter.shape)
                    for name, parameter in parameters.items()
                    for moment in MOMENTS
                },
                optimizer,
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(model[name])
        self.optimizer.state.clear()
        if optimizer:
            for name, parameter in parameters.items():
                # Copies, because loaded tensors are backed by the file; the fused kernel wants the step on the device.
                self.optimizer.state[parameter] = {
                    moment: optimizer[f"{moment}/{name}"].to(parameter.device, copy=True) for moment in MOMENTS
                }
        self.step, self.tokens = int(counters["step"]), int(counters["tokens"])
        self.skips_in_a_row = int(counters["skips_in_a_row"])


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
