"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, computed in at least float32 whatever comes in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation
from zero2all.ops.widen import widened


def eager_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in the order Llama does it: normalise in float32, cast back, then scale."""
    wide = widened(x)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """torch's rms_norm, which fuses the passes on the GPU."""
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps)


IMPLEMENTATIONS = (Implementation("eager", eager_rms_norm), Implementation("torch", torch_rms_norm))
