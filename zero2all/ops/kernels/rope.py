"""Rotary positions, in place on the output of the qkv projection.

Forward rotates the query and key heads in place and returns views, so nothing is copied; the projection's own backward
does not need its output, so overwriting it is safe. Backward rotates the gradients by the opposite angle and writes
them into one (B, T, heads, D) buffer, which is the gradient of the projection's output, in one launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.precision import without_autocast


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
    query, key, value, out, cos, sin, length, period, out_stride, query_heads, shared_heads, half,
    query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head, value_time,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, time = row // length, row % length
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < query_heads + 2 * shared_heads) & (pair < half)
    is_turned = head < query_heads + shared_heads
    wide = head.to(tl.int64)
    of_query = query + batch * query_batch + time * query_time + wide * query_head
    of_key = key + batch * key_batch + time * key_time + (wide - query_heads) * key_head
    of_value = value + batch * value_batch + time * value_time + (wide - query_heads - shared_heads) * value_head
    source = tl.where(head < query_heads, of_query, tl.where(is_turned, of_key, of_value)) + pair
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    angle = (row % period) * half + pair
    c = tl.load(cos + angle, mask=pair < half, other=1.0)
    s = tl.load(sin + angle, mask=pair < half, other=0.0)
    target = out + row * out_stride + head * (2 * half) + pair
    tl.store(target, tl.where(is_turned, a * c + b * s, a).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, tl.where(is_turned, b * c - a * s, b).to(out.dtype.element_ty), mask=inside)


class RopeInPlace(torch.autograd.Function):
    """(qkv (B, T, Hq + 2 Hk, D), cos and sin (T, D/2) or (B, T, D/2), Hq, Hk) -> query, key, value: (B, H, T, D)."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert qkv.is_contiguous(), "the kernel addresses the heads of contiguous rows"
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
        heads, kv_heads, _ = ctx.sizes
        total = sum(ctx.sizes)
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        out = torch.empty(B, T, total, D, dtype=query.dtype, device=query.device)
        _gather_turned_back[(B * T,)](
            query, key, value, out, cos, sin, T, cos.numel() // (D // 2), total * D, heads, kv_heads, D // 2,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            HEADS=triton.next_power_of_2(total), HALF=triton.next_power_of_2(D // 2), num_warps=4,
        )  # fmt: skip
        return out, None, None, None, None


def triton_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `zero2all.ops.rope`."""
    query, key, value = RopeInPlace.apply(qkv, cos, sin, heads, kv_heads)
    return query, key, value
