"""Linear layers of the blocks: x W^T + bias, and the feed-forward part (linear, SwiGLU, linear) as a whole.

plain       torch's; the weight gradient has the weight's dtype
fp32_wgrad  the weight gradient is added in float32 to the weight's `main_grad` (see `zero2all.train.weights`)
fp8         float8 tensor cores, one scale per tensor; weight gradient as in fp32_wgrad
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation, needs_float8, needs_triton

Parameters = tuple[Tensor, "Tensor | None"]
"""Weight and bias."""
Swiglu = Callable[[Tensor], Tensor]
Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
FeedForward = Callable[[Tensor, Parameters, Parameters], Tensor]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear."""
    return F.linear(x, weight, bias)


def fp32_wgrad_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's matmuls with a float32 weight gradient."""
    from zero2all.ops.kernels.linear import linear_fp32_wgrad

    return linear_fp32_wgrad(x, weight, bias)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float8 matmuls."""
    from zero2all.ops.kernels.linear import linear_8

    return linear_8(x, weight, bias)


IMPLEMENTATIONS = (
    Implementation("fp32_wgrad", fp32_wgrad_linear, needs_triton, compile_safe=False),
    Implementation("plain", plain_linear),
    Implementation("fp8", fp8_linear, needs_float8, compile_safe=False, tolerance=8e-2),
)


def is_fused(swiglu_name: str, linear_name: str) -> bool:
    """Whether these two are fused into one feed-forward: our kernels, which torch.compile cannot look into."""
    return swiglu_name in ("triton", "quack") and linear_name in ("fp32_wgrad", "fp8")


def feed_forward(swiglu_name: str, swiglu: Swiglu, linear_name: str, linear: Linear) -> FeedForward:
    """(x, gate_up weight and bias, down weight and bias) as one function: fused where all of it is our kernels and
    there are no biases, else one after the other. Rows of gate_up are in pairs, as SwiGLU wants them."""

    def one_after_the_other(x: Tensor, gate_up: Parameters, down: Parameters) -> Tensor:
        return linear(swiglu(linear(x, *gate_up)), *down)

    if not is_fused(swiglu_name, linear_name):
        return one_after_the_other

    fused = _fused(swiglu_name, linear_name)

    def fused_without_biases(x: Tensor, gate_up: Parameters, down: Parameters) -> Tensor:
        if gate_up[1] is None and down[1] is None:
            return fused(x, gate_up[0], down[0])
        return one_after_the_other(x, gate_up, down)

    return fused_without_biases


def _fused(swiglu_name: str, linear_name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if linear_name == "fp32_wgrad" and swiglu_name == "quack":
        from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues

        return feed_forward_in_epilogues
    from zero2all.ops.kernels.linear import feed_forward_8, feed_forward_fp32_wgrad

    return feed_forward_fp32_wgrad if linear_name == "fp32_wgrad" else feed_forward_8
