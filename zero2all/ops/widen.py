"""float32 for the arithmetic that bfloat16 is too narrow for."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where it is wider: float64 models stay float64 throughout."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
