"""Rotary positions, in place on the output of the qkv projection.

Forward turns the query and key heads where they lie and hands out views, so nothing is copied; the projection's own
backward does not need its output, so overwriting it is safe. Backward turns the gradients by the opposite angle and
writes them straight into one (B, T, heads, D) buffer, which is the gradient the projection wants.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.autocast import without_autocast


@triton.jit
def _turn_in_place(qkv, cos, sin, period, row_stride, turned_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < turned_heads) & (pair < half)
    angle = (row % period) * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=1.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    first = qkv + row * row_stride + head * (2 * half) + pair
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(first, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(first + half, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _gather_turned_back(
    grad, out, cos, sin, length, period, out_stride, first_head, heads, half,
    batch_stride, head_stride, time_stride, TURN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, time = row // length, row % length
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    source = grad + batch * batch_stride + time * time_stride + head.to(tl.int64) * head_stride + pair
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = out + row * out_stride + (first_head + head) * (2 * half) + pair
    if TURN:
        angle = (row % period) * half + pair
        c = tl.load(cos + angle, mask=pair < half, other=1.0)
        s = tl.load(sin + angle, mask=pair < half, other=0.0)
        a, b = a * c + b * s, b * c - a * s
    tl.store(target, a.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, b.to(out.dtype.element_ty), mask=inside)


class RopeInPlace(torch.autograd.Function):
    """(qkv (B, T, Hq + 2 Hk, D), cos and sin (T, D/2) or (B, T, D/2), Hq, Hk) -> query, key, value: (B, H, T, D)."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert qkv.is_contiguous(), "the heads are found by counting"
        B, T, H, D = qkv.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        _turn_in_place[(B * T,)](
            qkv, cos, sin, cos.numel() // (D // 2), H * D, heads + kv_heads, D // 2,
            HEADS=triton.next_power_of_2(heads + kv_heads), HALF=triton.next_power_of_2(D // 2), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(cos, sin)
        ctx.sizes = (heads, kv_heads, kv_heads)
        query, key, value = qkv.detach().transpose(1, 2).split(ctx.sizes, dim=1)
        return query, key, value

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        B, _, T, D = grads[0].shape
        total = sum(ctx.sizes)
        out = torch.empty(B, T, total, D, dtype=grads[0].dtype, device=grads[0].device)
        first = 0
        for place, (grad, heads) in enumerate(zip(grads, ctx.sizes, strict=True)):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            _gather_turned_back[(B * T,)](
                grad, out, cos, sin, T, cos.numel() // (D // 2), total * D, first, heads, D // 2,
                grad.stride(0), grad.stride(1), grad.stride(2), TURN=place < 2,
                HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(D // 2), num_warps=4,
            )  # fmt: skip
            first += heads
        return out, None, None, None, None


def triton_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The registry's entry."""
    query, key, value = RopeInPlace.apply(qkv, cos, sin, heads, kv_heads)
    return query, key, value
