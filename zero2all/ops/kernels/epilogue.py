"""The feed-forward part with SwiGLU inside the epilogues of the matmuls, by QuACK.

A SwiGLU kernel reads gate and up and writes h; its backward reads three such tensors and writes three. An epilogue has
the values in registers, so those reads are saved, and the arithmetic overlaps with the matmul of the next tile. The
matmul that computes gate and up also writes h; the one that computes dh writes the gradients of gate and up, and h
again. The other matmuls are torch's.

The tiles are QuACK's default: on Hopper 128 x 192 with ping-pong scheduling (one group of warps multiplies while the
other is in its epilogue), and dynamic scheduling of tiles in the backward. Of four tile shapes on an H200 (2026-11-15;
32,768 rows, 2048 x 5632) it was the fastest in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.kernels.linear import add_weight_gradient
from zero2all.ops.precision import for_autocast, without_autocast


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
    """See `zero2all.ops.linear`."""
    x, gate_up, down = for_autocast(x, gate_up, down)
    y: Tensor = FeedForwardInEpilogues.apply(rows_of(x), gate_up, down).view(x.shape)
    return y
