"""Linear layers of the blocks: x W^T + bias, and the pair of SwiGLU and the layer after it.

plain   torch's; the weight gradient has the weight's dtype
into32  the weight gradient is added in float32 to the weight's `main_grad` (see `zero2all.train.flat`)
fp8     float8 tensor cores, one scale per tensor; weight gradient as in into32
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation, needs_hopper, needs_triton

Swiglu = Callable[[Tensor], Tensor]
SwigluLinear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear."""
    return F.linear(x, weight, bias)


def into_32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's matmuls with a float32 weight gradient."""
    from zero2all.ops.kernels.linear import linear_into_32

    return linear_into_32(x, weight, bias)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float8 matmuls."""
    from zero2all.ops.kernels.linear import linear_8

    return linear_8(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation("into32", into_32_linear, needs_triton),
    Implementation("plain", plain_linear),
    Implementation("fp8", fp8_linear, needs_hopper),
)


def swiglu_linear(swiglu_name: str, swiglu: Swiglu, linear_name: str, linear: SwigluLinear) -> SwigluLinear:
    """The pair as one function: fused where both sides are our kernels, else one after the other."""
    if swiglu_name == "triton" and linear_name in ("into32", "fp8"):
        from zero2all.ops.kernels.linear import swiglu_linear_8, swiglu_linear_into_32

        return swiglu_linear_into_32 if linear_name == "into32" else swiglu_linear_8
    return lambda gate_up, weight, bias: linear(swiglu(gate_up), weight, bias)
