"""Rotary position embedding in the rotate-half layout that Hugging Face checkpoints use.

Dimension d of the first half of a head is paired with dimension d of the second half; the pair is turned by
position x frequency[d].
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero2all.ops.implementation import Implementation
from zero2all.ops.widen import widened


def eager_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `heads` (B, H, T, D) by the angles whose `cos` and `sin` (T, D/2) are given."""
    first, second = widened(heads).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


IMPLEMENTATIONS = (Implementation("eager", eager_rope),)
