"""The weights of a model in flat buffers: what the forward pass reads, the float32 masters, the gradient.

A model in bfloat16 or float16 computes with low-precision weights, but an update of a thousandth of a weight would
vanish in their rounding, so the optimizer works on float32 masters and writes the low-precision weights from them.
Gradients are summed in float32 too, over all micro-batches of a step. In a float32 (or float64) model the masters are
the weights themselves.

One buffer for each of the three, all parameters one after the other, makes the norm one reduction, zeroing one
write, and the update one pass. Parameters that decay come first, so that each group is one stretch.

A kernel that can adds its weight gradient to `parameter.main_grad` itself; for any other the gradient that autograd
leaves in `parameter.grad` is added there at once and let go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero2all.model.z2all import Z2all

ALIGNMENT = 128
"""Parameters begin at multiples of this many values, so that every kernel can load them in wide words."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the buffers."""

    name: str
    parameter: nn.Parameter
    at: slice


class FlatWeights:
    """Takes over the parameters of `model`: their storage becomes a view of flat buffers on the model's device."""

    def __init__(self, model: Z2all, decays: frozenset[str], dtype: torch.dtype) -> None:
        named = list(model.named_parameters())
        ordered = [pair for pair in named if pair[0] in decays] + [pair for pair in named if pair[0] not in decays]
        self.places: list[Place] = []
        length = 0
        self.decayed = slice(0, 0)
        for name, parameter in ordered:
            self.places.append(Place(name, parameter, slice(length, length + parameter.numel())))
            length += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            if name in decays:
                self.decayed = slice(0, length)
        self.kept = slice(self.decayed.stop, length)
        device = ordered[0][1].device
        self.dtype, wide = dtype, torch.promote_types(dtype, torch.float32)
        self.masters = torch.zeros(length, dtype=wide, device=device)
        self.weights = self.masters if dtype == wide else torch.zeros(length, dtype=dtype, device=device)
        self.gradients = torch.zeros(length, dtype=wide, device=device)
        self._hooks = [self._take(place) for place in self.places]

    @torch.no_grad()
    def _take(self, place: Place) -> torch.utils.hooks.RemovableHandle | None:
        parameter, shape = place.parameter, place.parameter.shape
        self.masters[place.at].view(shape).copy_(parameter)
        own = self.weights[place.at].view(shape)
        if self.weights is not self.masters:
            own.copy_(parameter)
        parameter.data = own
        gradient = self.gradients[place.at].view(shape)
        if self.weights is self.masters:
            parameter.grad = gradient  # autograd adds to it in place
            return None
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        return parameter.register_post_accumulate_grad_hook(_move_to_main)

    def publish(self) -> None:
        """Make the forward pass see masters that were changed otherwise than by an optimizer."""
        if self.weights is not self.masters:
            self.weights.copy_(self.masters)
        self.touched()

    def touched(self) -> None:
        """Tell whoever caches something made from the weights (float8 copies) that they have changed."""
        torch.autograd.graph.increment_version([place.parameter for place in self.places])

    def zero_gradients(self) -> None:
        """Begin a new sum."""
        self.gradients.zero_()

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A buffer of this length as views in the shapes of the parameters."""
        return {place.name: flat[place.at].view(place.parameter.shape) for place in self.places}


def _move_to_main(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None
