"""SwiGLU: silu(gate) * up, on the output of one fused gate-and-up projection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation, needs_liger, needs_quack, needs_triton


def torch_swiglu(gate_up: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F) with torch's silu."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def eager_swiglu(gate_up: Tensor) -> Tensor:
    """The formula spelt out."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def liger_swiglu(gate_up: Tensor) -> Tensor:
    """liger-kernel's."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    h: Tensor = LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))
    return h


def triton_swiglu(gate_up: Tensor) -> Tensor:
    """Our kernel: one pass each way."""
    from zero2all.ops.kernels.swiglu import triton_swiglu as kernel

    return kernel(gate_up)


IMPLEMENTATIONS = (
    Implementation("triton", triton_swiglu, needs_triton, compile_safe=False),
    Implementation("torch", torch_swiglu),
    Implementation("eager", eager_swiglu),
    # Inside the matmuls around it, where the linear layers are `into32` without biases; else as `triton`.
    Implementation("quack", triton_swiglu, needs_quack, compile_safe=False),
    Implementation("liger", liger_swiglu, needs_liger, compile_safe=False),
)
