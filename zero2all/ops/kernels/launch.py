"""Helpers of kernel launches."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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


@cache
def overlapped(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that takes part in programmatic dependent launch, which Hopper and newer have: its
    programs start while the last ones of the kernel before it still run, and wait in `wait_for_earlier_kernels`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@triton.jit
def wait_for_earlier_kernels(OVERLAP: tl.constexpr):
    """Until what they wrote can be read, and what they read overwritten. Every program calls it, once: then a kernel
    that is over has itself waited for all before it."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
