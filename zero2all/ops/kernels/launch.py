"""Helpers of kernel launches."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

INTERPRETED_PROCESSORS = 3
"""How many programs a persistent grid gets under the interpreter: few, and not a divisor of common row counts."""


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rows_of(x: Tensor) -> Tensor:
    """`x` as contiguous rows (N, C)."""
    return x.reshape(-1, x.shape[-1]).contiguous()
