"""Which implementation each operator should use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OpsConfig:
    """One name per operator; `auto` takes the best that can run here. `z2a perf ops` lists them all."""

    attention: Literal["auto", "math", "sdpa", "sdpa_flash", "sdpa_cudnn", "flex", "varlen", "fa3", "fa4"] = "auto"
    """math: plain matmuls and softmax (the reference); sdpa, sdpa_…: torch's fused attention, with any or one of its
    backends; fa3, fa4: the FlashAttention packages; flex, varlen: torch's attention for documents."""
    rope: Literal["auto", "eager", "triton"] = "auto"
    """Rotary position embedding."""
    rms_norm: Literal["auto", "eager", "torch", "triton", "triton_lean"] = "auto"
    """Residual add and norm. triton_lean keeps 2 bytes less per value until the backward pass."""
    swiglu: Literal["auto", "eager", "torch", "triton", "quack"] = "auto"
    """eager: g * sigmoid(g) * u; torch: silu; quack: fused into the matmuls before and after it."""
    linear: Literal["auto", "plain", "fp32_wgrad", "fp8"] = "auto"
    """Linear layers of the blocks. fp32_wgrad: sum weight gradients in float32; fp8: float8 tensor cores, never chosen
    by auto."""
    embedding: Literal["auto", "torch", "triton"] = "auto"
    """triton: the backward pass writes only the rows of ids that occur; torch: it writes the whole table."""
    linear_cross_entropy: Literal["auto", "off", "chunked", "triton", "quack", "torch"] = "auto"
    """Head and loss. off: all logits at once; the others hold only a part of them; quack: softmax fused into the
    matmuls."""
    cross_entropy: Literal["auto", "eager", "torch", "triton"] = "auto"
    """The loss from whole logits, used if linear_cross_entropy is off."""
    optimizer: Literal["auto", "eager", "foreach", "fused", "triton"] = "auto"
    """AdamW. triton: clip, skip, update and bfloat16 weights in one pass; the others are torch's loops."""
    compile: Literal["none", "block", "trunk"] = "none"
    """torch.compile for nothing, each block, or everything up to the head."""
    strict: bool = True
    """Fail if a named implementation cannot run here; false: fall back to auto and print why."""
