"""Which implementation each operator should use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OpsConfig:
    """One name per operator; `auto` takes the best that can run here. `z2a perf ops` lists them all."""

    attention: Literal["auto", "math", "sdpa", "sdpa_flash", "sdpa_cudnn", "flex", "varlen", "fa3", "fa4"] = "auto"
    """math: plain matmuls and softmax, the reference; sdpa…: torch's fused attention, on any or one of its backends;
    fa3, fa4: FlashAttention's own packages; flex, varlen: torch's for documents."""
    rope: Literal["auto", "eager", "triton", "liger"] = "auto"
    """Rotary position embedding."""
    rms_norm: Literal["auto", "eager", "torch", "triton", "triton_lean", "liger"] = "auto"
    """Residual add and norm. triton_lean keeps 2 bytes less per value for the backward pass."""
    swiglu: Literal["auto", "eager", "torch", "triton", "quack", "liger"] = "auto"
    """eager: g * sigmoid(g) * u; torch: silu; quack: inside the matmuls before and after it."""
    linear: Literal["auto", "plain", "fp32_wgrad", "fp8"] = "auto"
    """Of the blocks. fp32_wgrad: weight gradients summed in float32; fp8: float8 tensor cores, never taken by auto."""
    embedding: Literal["auto", "torch", "triton"] = "auto"
    """triton: the backward pass writes only the rows of ids that occur; torch: a whole table."""
    linear_cross_entropy: Literal["auto", "off", "chunked", "triton", "quack", "torch", "liger"] = "auto"
    """Head and loss. off: all logits at once; the others never hold them all; quack: the softmax inside the matmuls."""
    cross_entropy: Literal["auto", "eager", "torch", "triton", "liger"] = "auto"
    """The loss on whole logits, where linear_cross_entropy is off."""
    optimizer: Literal["auto", "eager", "foreach", "fused", "triton"] = "auto"
    """AdamW. triton: clip, skip, update and bfloat16 weights in one pass; the others are torch's loops."""
    compile: Literal["none", "block", "trunk"] = "none"
    """torch.compile around nothing, each block, or everything up to the head."""
    strict: bool = True
    """A named implementation that cannot run here is an error; false: falls back to auto and says so."""
