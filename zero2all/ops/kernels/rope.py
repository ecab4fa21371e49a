"""Rotary positions, in place on the output of the qkv projection, after an optional RMSNorm of query and key heads.

Forward rotates the query and key heads in place and returns views, so nothing is copied; the projection's own backward
does not need its output, so overwriting it is safe. Backward rotates the gradients by the opposite angle and writes
them into one (B, T, heads, D) buffer, which is the gradient of the projection's output, in one launch.

With a norm, h = x / sqrt(mean(x^2) + eps) and the head is h * weight before it is rotated. Backward, with the gradient
g of h * weight, which is the given one turned back: dx = (g * weight - h * mean(g * weight * h)) / sqrt(...), and
dweight = g * h, summed by each program over its rows and heads and then over the programs, always in the same order.
It computes h from x again; a head is in registers as a whole, so that costs nothing. So x is kept, and query and key go
to memory of their own. Recovering h from the rotated head instead, which would save that memory, would lose digits
where the two weights of a pair differ much. Without gradients a norm works in place too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import processors
from zero2all.ops.kernels.rms_norm import add_sum_of_parts
from zero2all.ops.precision import without_autocast

PROGRAMS_PER_PROCESSOR = 4
"""Of the backward pass with a norm: each sums the gradients of the weights over its rows."""


@triton.jit
def _halves(query_weight, key_weight, head, pair, query_heads, half):
    """The weights of each head (HEADS, HALF), those of its first half and of its second."""
    inside, is_query = pair < half, head < query_heads
    query_a = tl.load(query_weight + pair, mask=inside, other=0.0).to(tl.float32)
    query_b = tl.load(query_weight + half + pair, mask=inside, other=0.0).to(tl.float32)
    key_a = tl.load(key_weight + pair, mask=inside, other=0.0).to(tl.float32)
    key_b = tl.load(key_weight + half + pair, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, query_a, key_a), tl.where(is_query, query_b, key_b)


@triton.jit
def _turn_in_place(
    qkv, out, cos, sin, query_weight, key_weight, period, row_stride, out_stride, query_heads, turned_heads, half, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
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
    if NORM:
        weight_a, weight_b = _halves(query_weight, key_weight, head, pair, query_heads, half)
        scale = 1.0 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / (2 * half) + eps)[:, None]
        a, b = a * scale * weight_a, b * scale * weight_b
    target = out + row * out_stride + head * (2 * half) + pair
    tl.store(target, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather_turned_back(
    query, key, value, out, cos, sin, kept, query_weight, key_weight, query_parts, key_parts,
    rows, length, period, out_stride, query_heads, shared_heads, half, eps,
    query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head, value_time,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < query_heads + 2 * shared_heads) & (pair < half)
    is_turned = head < query_heads + shared_heads
    wide = head.to(tl.int64)
    if NORM:
        weight_a, weight_b = _halves(query_weight, key_weight, head, pair, query_heads, half)
        dweight_a = tl.zeros((HEADS, HALF), dtype=tl.float32)
        dweight_b = tl.zeros((HEADS, HALF), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        batch, time = row // length, row % length
        of_query = query + batch * query_batch + time * query_time + wide * query_head
        of_key = key + batch * key_batch + time * key_time + (wide - query_heads) * key_head
        of_value = value + batch * value_batch + time * value_time + (wide - query_heads - shared_heads) * value_head
        source = tl.where(head < query_heads, of_query, tl.where(is_turned, of_key, of_value)) + pair
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        angle = (row % period) * half + pair
        c = tl.load(cos + angle, mask=pair < half, other=1.0)
        s = tl.load(sin + angle, mask=pair < half, other=0.0)
        turned_a, turned_b = a * c + b * s, b * c - a * s
        target = row * out_stride + head * (2 * half) + pair
        if NORM:
            has_norm = is_turned & (pair < half)
            h_a = tl.load(kept + target, mask=has_norm, other=0.0).to(tl.float32)
            h_b = tl.load(kept + target + half, mask=has_norm, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(h_a * h_a + h_b * h_b, axis=1) / (2 * half) + eps)[:, None]
            h_a, h_b = h_a * scale, h_b * scale
            dweight_a += turned_a * h_a
            dweight_b += turned_b * h_b
            g_a, g_b = turned_a * weight_a, turned_b * weight_b
            mean = (tl.sum(g_a * h_a + g_b * h_b, axis=1) / (2 * half))[:, None]
            turned_a, turned_b = (g_a - h_a * mean) * scale, (g_b - h_b * mean) * scale
        tl.store(out + target, tl.where(is_turned, turned_a, a).to(out.dtype.element_ty), mask=inside)
        tl.store(out + target + half, tl.where(is_turned, turned_b, b).to(out.dtype.element_ty), mask=inside)
    if NORM:
        of_program = program * 2 * half + tl.arange(0, HALF)
        is_pair = tl.arange(0, HALF) < half
        is_query = head < query_heads  # the heads of values have summed h = 0
        tl.store(query_parts + of_program, tl.sum(tl.where(is_query, dweight_a, 0.0), axis=0), mask=is_pair)
        tl.store(query_parts + of_program + half, tl.sum(tl.where(is_query, dweight_b, 0.0), axis=0), mask=is_pair)
        tl.store(key_parts + of_program, tl.sum(tl.where(is_query, 0.0, dweight_a), axis=0), mask=is_pair)
        tl.store(key_parts + of_program + half, tl.sum(tl.where(is_query, 0.0, dweight_b), axis=0), mask=is_pair)


class RopeInPlace(torch.autograd.Function):
    """(qkv (B, T, Hq + 2 Hk, D), cos and sin (T, D/2) or (B, T, D/2), Hq, Hk, the norms' weights (D,) or None, eps,
    whether a gradient needs qkv) -> query, key, value: (B, H, T, D)."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        eps: float,
        keeps: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert qkv.is_contiguous(), "the kernel addresses the heads of contiguous rows"
        B, T, H, D = qkv.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        has_norm, turned = query_weight is not None, heads + kv_heads
        out = torch.empty(B, T, turned, D, dtype=qkv.dtype, device=qkv.device) if keeps else qkv
        _turn_in_place[(B * T,)](
            qkv, out, cos, sin, query_weight if has_norm else qkv, key_weight if has_norm else qkv,
            cos.numel() // (D // 2), H * D, out.shape[2] * D, heads, turned, D // 2, eps,
            NORM=has_norm, HEADS=triton.next_power_of_2(turned), HALF=triton.next_power_of_2(D // 2), num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(cos, sin, *((qkv,) if keeps else ()))
        # The weights not as saved tensors, which may come back without their sinks.
        ctx.sizes, ctx.weights, ctx.eps = (heads, kv_heads, kv_heads), (query_weight, key_weight), eps
        rotated = out.detach().transpose(1, 2)
        return rotated[:, :heads], rotated[:, heads:turned], qkv.detach().transpose(1, 2)[:, turned:]

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *kept = ctx.saved_tensors
        B, _, T, D = grads[0].shape
        heads, kv_heads, _ = ctx.sizes
        total, weights = sum(ctx.sizes), ctx.weights
        query, key, value = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        out = torch.empty(B, T, total, D, dtype=query.dtype, device=query.device)
        block = {"HEADS": triton.next_power_of_2(total), "HALF": triton.next_power_of_2(D // 2)}
        programs, warps, given = B * T, 4, (out,) * 5  # what no kernel reads without a norm
        if kept:
            programs = min(programs, PROGRAMS_PER_PROCESSOR * processors(out.device))
            warps = max(4, min(16, block["HEADS"] * block["HALF"] // 512))
            parts = [torch.empty(programs, D, dtype=torch.float32, device=out.device) for _ in weights]
            given = (kept[0], *weights, *parts)
        _gather_turned_back[(programs,)](
            query, key, value, out, cos, sin, *given, B * T, T, cos.numel() // (D // 2), total * D,
            heads, kv_heads, D // 2, ctx.eps, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            NORM=bool(kept), **block, num_warps=warps,
        )  # fmt: skip
        dweights = [add_sum_of_parts(*pair) for pair in zip(weights, parts, strict=True)] if kept else [None, None]
        return out, None, None, None, None, *dweights, None, None


def triton_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norm: tuple[Tensor, Tensor, float] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `zero2all.ops.rope`."""
    keeps = norm is not None and torch.is_grad_enabled()
    query, key, value = RopeInPlace.apply(qkv, cos, sin, heads, kv_heads, *(norm or (None, None, 0.0)), keeps)
    return query, key, value
