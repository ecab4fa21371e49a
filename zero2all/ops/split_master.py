"""A float32 master weight split in two: its bfloat16 rounding, and the 16 bits that are missing to be exact.

The upper 16 bits of a float32 are a bfloat16. The forward pass reads the nearest bfloat16 of a master weight anyway, so
beside it only the difference has to be kept: 2 bytes instead of a whole float32. As integers,

    bits of the master = bits of the bfloat16 * 65536 + remainder,    -32768 <= remainder < 32768

which gives back every bit. Halfway cases round away from zero, not to the even neighbour: to the even one, the
remainder would sometimes have to be 32768, one more than int16 holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUIET_NAN = 0x7FC0
"""Upper half of a NaN. Rounding the bits of one could carry into the sign and make a zero of it."""


def split(masters: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (nearest bfloat16, int16 remainder)."""
    bits = masters.view(torch.int32)
    is_nan = masters.isnan()
    upper = ((bits + 0x8000) >> 16).masked_fill_(is_nan, QUIET_NAN)
    remainder = (bits - (upper << 16)).masked_fill_(is_nan, 0)
    return upper.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int16)


def join(nearest: Tensor, remainder: Tensor) -> Tensor:
    """(bfloat16, int16 remainder) -> float32, every bit as it was."""
    bits = (nearest.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)
