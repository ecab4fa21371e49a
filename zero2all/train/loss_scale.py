"""Dynamic loss scaling for float16, whose smallest number is 6e-8: most gradients would be zero without it.

The loss is multiplied by the scale before the backward pass, the gradient divided by it before the update. Where
something overflowed the update is skipped and the scale halved; after GROWTH_STEPS good steps it is doubled. Both
numbers live on the device, so the host need not wait, and in the checkpoint, so that a resumed run is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
SMALLEST_SCALE = 2.0**-4
GROWTH_STEPS = 1000


class LossScale:
    """The scale, and how many good steps it has seen."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """For the checkpoint; live."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    @torch.no_grad()
    def after(self, overflowed: Tensor, refused: Tensor) -> None:
        """Update the scale after a step; both are bools on the device.

        A step that was refused without an overflow does not count, because a resumed run skips it.
        """
        good = torch.where(overflowed, 0, self.good_steps + (~refused).long())
        grows = good >= GROWTH_STEPS
        factor = torch.where(overflowed, 0.5, torch.where(grows, 2.0, 1.0))
        self.scale.mul_(factor).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self.good_steps.copy_(torch.where(grows, 0, good))
