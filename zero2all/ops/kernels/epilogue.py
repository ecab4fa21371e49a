"""The feed-forward part with SwiGLU inside the matmuls, by QuACK: an epilogue still has the results at hand.

By itself SwiGLU reads the output of the matmul before it and writes a third of its own; its backward reads three such
tensors and writes three. In an epilogue those reads are gone, and the arithmetic hides behind the next tile's matmul.
The matmul that makes gate and up gives h too; the one that makes dh gives the gradients of gate and up, and h again.

These kernels hold gate and up alternating in memory. Our weight holds all gates first ("concat"), which the kernels
read and write by strides, so nothing outside this file knows.
"""

from __future__ import annotations

from typing import Any

import torch
from quack.gemm_interface import gemm, gemm_add_inplace, gemm_dgated, gemm_gated
from torch import Tensor

from zero2all.ops.autocast import for_autocast, without_autocast
from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.kernels.linear import add_weight_gradient

TUNED = False
"""Whether QuACK tries its tile shapes out on first use (minutes) instead of taking the one it thinks best."""


class FeedForwardInEpilogues(torch.autograd.Function):
    """Rows down(swiglu(gate_up(x)))."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        paired, h = gemm_gated(x, gate_up.t(), activation="swiglu", concat_layout=("B",), tuned=TUNED)
        ctx.save_for_backward(x, paired)
        ctx.weights = (gate_up, down)
        return h @ down.t()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, paired = ctx.saved_tensors
        gate_up, down = ctx.weights
        dy = dy.contiguous()
        dpaired, h = gemm_dgated(dy, down, paired, activation="swiglu", tuned=TUNED)
        ddown = add_weight_gradient(down, dy, h)
        dx = gemm(dpaired, gate_up, concat_layout=("B",), tuned=TUNED)
        main = getattr(gate_up, "main_grad", None)
        if main is None:
            return dx, gemm(dpaired.t(), x, concat_layout=("out",), tuned=TUNED), ddown
        gemm_add_inplace(dpaired.t(), x, main, concat_layout=("C", "out"), tuned=TUNED)
        return dx, None, ddown


def feed_forward_in_epilogues(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The registry's entry."""
    x, gate_up, down = for_autocast(x, gate_up, down)
    y: Tensor = FeedForwardInEpilogues.apply(rows_of(x), gate_up, down).view(x.shape)
    return y
