"""The feed-forward part with SwiGLU inside the matmuls, by QuACK: an epilogue still has the results at hand.

By itself SwiGLU reads the output of the matmul before it and writes a third of its own; its backward reads three such
tensors and writes three. In an epilogue those reads are gone, and the arithmetic hides behind the next tile's matmul.
The matmul that makes gate and up gives h too; the one that makes dh gives the gradients of gate and up, and h again.
The other matmuls have nothing to add to and stay torch's.

QuACK's own choice of tiles is taken: on Hopper 128 x 192, two groups of warps taking turns (one multiplies while the
other is in its epilogue), tiles handed out as programs become free in the backward. Of the four tile shapes tried on an
H200 (2026-11-15; 32,768 rows, 2048 x 5632) it was the fastest in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero2all.ops.autocast import for_autocast, without_autocast
from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.kernels.linear import add_weight_gradient


class FeedForwardInEpilogues(torch.autograd.Function):
    """Rows down(swiglu(gate_up(x)))."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        from quack.gemm_interface import gemm_gated

        pairs, h = gemm_gated(x, gate_up.t(), activation="swiglu", tuned=False)
        ctx.save_for_backward(x, pairs)
        ctx.weights = (gate_up, down)
        return h @ down.t()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from quack.gemm_interface import gemm_dgated

        x, pairs = ctx.saved_tensors
        gate_up, down = ctx.weights
        dy = dy.contiguous()
        dpairs, h = gemm_dgated(dy, down, pairs, activation="swiglu", dynamic_scheduler=True, tuned=False)
        ddown = add_weight_gradient(down, dy, h)
        del h
        return dpairs @ gate_up, add_weight_gradient(gate_up, dpairs, x), ddown


def feed_forward_in_epilogues(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The registry's entry."""
    x, gate_up, down = for_autocast(x, gate_up, down)
    y: Tensor = FeedForwardInEpilogues.apply(rows_of(x), gate_up, down).view(x.shape)
    return y
