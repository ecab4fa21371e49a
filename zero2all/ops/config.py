"""Which implementation each operator should use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OpsConfig:
    """One name per operator; `auto` takes the best that can run here. See `zero2all.ops.registry`."""

    attention: Literal["auto", "math", "sdpa"] = "auto"
    """math: plain matmuls and softmax, the reference; sdpa: torch's scaled_dot_product_attention."""
    rope: Literal["auto", "eager"] = "auto"
    """Rotary position embedding."""
    rms_norm: Literal["auto", "eager", "torch"] = "auto"
    """eager: the formula; torch: torch's own rms_norm."""
    swiglu: Literal["auto", "eager", "torch"] = "auto"
    """eager: g * sigmoid(g) * u spelt out; torch: silu."""
    cross_entropy: Literal["auto", "eager", "torch"] = "auto"
    """eager: logsumexp minus the target's logit; torch: torch's own cross_entropy."""
    optimizer: Literal["auto", "eager", "foreach", "fused"] = "auto"
    """Which of torch's AdamW loops to use."""
    strict: bool = False
    """Make an implementation that cannot run here an error instead of a fallback that is reported."""
