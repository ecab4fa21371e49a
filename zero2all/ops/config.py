"""Which implementation each operator should use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OpsConfig:
    """One name per operator; `auto` takes the best that can run here. See `zero2all.ops.registry`."""

    attention: Literal["auto", "math", "sdpa"] = "auto"
    """math: plain matmuls and softmax, the reference; sdpa: torch's scaled_dot_product_attention."""
    rope: Literal["auto", "eager", "triton"] = "auto"
    """Rotary position embedding."""
    rms_norm: Literal["auto", "eager", "torch", "triton"] = "auto"
    """eager: the formula; torch: torch's own rms_norm."""
    swiglu: Literal["auto", "eager", "torch", "triton"] = "auto"
    """eager: g * sigmoid(g) * u spelt out; torch: silu."""
    cross_entropy: Literal["auto", "eager", "torch"] = "auto"
    """eager: logsumexp minus the target's logit; torch: torch's own cross_entropy."""
    linear: Literal["auto", "plain", "into32", "fp8"] = "auto"
    """plain: torch's; into32: float32 weight gradients; fp8: float8 tensor cores."""
    linear_cross_entropy: Literal["auto", "off", "triton"] = "auto"
    """off: all logits at once; triton: chunk by chunk, gradient made in the forward pass."""
    optimizer: Literal["auto", "eager", "foreach", "fused"] = "auto"
    """Which of torch's AdamW loops to use."""
    strict: bool = False
    """Make an implementation that cannot run here an error instead of a fallback that is reported."""
