"""SwiGLU: silu(gate) * up, on the output of one fused gate-and-up projection: gate 0, up 0, gate 1, up 1, and so on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation, needs_liger, needs_quack, needs_triton


def gate_and_up(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2 F) -> the gates and the ups, (..., F) each, apart: arithmetic on every other value takes twice as long."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return gate.contiguous(), up.contiguous()


def torch_swiglu(pairs: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F) with torch's silu."""
    gate, up = gate_and_up(pairs)
    return F.silu(gate) * up


def eager_swiglu(pairs: Tensor) -> Tensor:
    """The formula spelt out."""
    gate, up = gate_and_up(pairs)
    return gate * torch.sigmoid(gate) * up


def liger_swiglu(pairs: Tensor) -> Tensor:
    """liger-kernel's."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    h: Tensor = LigerSiLUMulFunction.apply(*gate_and_up(pairs))
    return h


def triton_swiglu(pairs: Tensor) -> Tensor:
    """Our kernel: one pass each way."""
    from zero2all.ops.kernels.swiglu import triton_swiglu as kernel

    return kernel(pairs)


IMPLEMENTATIONS = (
    Implementation("triton", triton_swiglu, needs_triton, compile_safe=False),
    Implementation("torch", torch_swiglu),
    Implementation("eager", eager_swiglu),
    # Inside the matmuls around it, where the linear layers are `into32` without biases; else as `triton`.
    Implementation("quack", triton_swiglu, needs_quack, compile_safe=False),
    Implementation("liger", liger_swiglu, needs_liger, compile_safe=False),
)
