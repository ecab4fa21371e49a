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

PAIRS, WARPS, PROGRAMS_PER_PROCESSOR = 1024, 4, 8
"""Of the backward pass: a program takes a head of so many pairs at once, for some positions; then the next head, then
further positions. With a norm it sums the gradients of the weights. On an H200, 131,072 positions with 4 + 4 heads of
128: 338 us with a norm, 225 without; one position at a time, all heads together, took 509 and 256 (2026-11-18)."""


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
def _turned_back(
    source, head_stride, heads, out, kept, weight, c, s, half, eps, at, pair, inside, dweight_a, dweight_b,
    NORM: tl.constexpr,
):  # fmt: skip
    """The heads of queries or of keys: `source` and `at` point to the first of them, in the gradient and in the rows of
    `out` and `kept`. Returns the sums for the weights."""
    if NORM:
        weight_a = tl.load(weight + pair, mask=pair < half, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)
    for head in range(heads):
        given, target = source + head * head_stride, at + head * 2 * half
        a = tl.load(given, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(given + half, mask=inside, other=0.0).to(tl.float32)
        turned_a, turned_b = a * c + b * s, b * c - a * s
        if NORM:
            h_a = tl.load(kept + target, mask=inside, other=0.0).to(tl.float32)
            h_b = tl.load(kept + target + half, mask=inside, other=0.0).to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(h_a * h_a + h_b * h_b, axis=1) / (2 * half) + eps)[:, None]
            h_a, h_b = h_a * scale, h_b * scale
            dweight_a += turned_a * h_a
            dweight_b += turned_b * h_b
            g_a, g_b = turned_a * weight_a, turned_b * weight_b
            mean = (tl.sum(g_a * h_a + g_b * h_b, axis=1) / (2 * half))[:, None]
            turned_a, turned_b = (g_a - h_a * mean) * scale, (g_b - h_b * mean) * scale
        tl.store(out + target, turned_a.to(out.dtype.element_ty), mask=inside)
        tl.store(out + target + half, turned_b.to(out.dtype.element_ty), mask=inside)
    return dweight_a, dweight_b


@triton.jit
def _gather_turned_back(
    query, key, value, out, cos, sin, kept, query_weight, key_weight, query_parts, key_parts,
    rows, length, period, out_stride, query_heads, shared_heads, half, eps,
    query_batch, query_head, query_time, key_batch, key_head, key_time, value_batch, value_head, value_time,
    NORM: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    pair = tl.arange(0, HALF)[None, :]
    query_a, query_b = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    key_a, key_b = tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        batch, time = row // length, row % length
        inside = (row < rows) & (pair < half)
        angle = (row % period) * half + pair
        c = tl.load(cos + angle, mask=inside, other=1.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        at = row * out_stride + pair
        of_query = query + batch * query_batch + time * query_time + pair
        query_a, query_b = _turned_back(
            of_query, query_head, query_heads, out, kept, query_weight, c, s, half, eps, at, pair, inside, query_a,
            query_b, NORM,
        )  # fmt: skip
        at += query_heads * 2 * half
        of_key = key + batch * key_batch + time * key_time + pair
        key_a, key_b = _turned_back(
            of_key, key_head, shared_heads, out, kept, key_weight, c, s, half, eps, at, pair, inside, key_a, key_b, NORM
        )
        at += shared_heads * 2 * half
        of_value = value + batch * value_batch + time * value_time + pair
        for head in range(shared_heads):
            given, target = of_value + head * value_head, at + head * 2 * half
            tl.store(out + target, tl.load(given, mask=inside, other=0.0), mask=inside)
            tl.store(out + target + half, tl.load(given + half, mask=inside, other=0.0), mask=inside)
    if NORM:
        part = program.to(tl.int64) * 2 * half + tl.arange(0, HALF)
        is_pair = tl.arange(0, HALF) < half
        tl.store(query_parts + part, tl.sum(query_a, axis=0), mask=is_pair)
        tl.store(query_parts + part + half, tl.sum(query_b, axis=0), mask=is_pair)
        tl.store(key_parts + part, tl.sum(key_a, axis=0), mask=is_pair)
        tl.store(key_parts + part + half, tl.sum(key_b, axis=0), mask=is_pair)


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
        pairs = triton.next_power_of_2(D // 2)
        rows = max(1, PAIRS // pairs)
        programs = min(triton.cdiv(B * T, rows), PROGRAMS_PER_PROCESSOR * processors(out.device))
        given = (out,) * 5  # what the kernel does not read without a norm
        if kept:
            parts = [torch.empty(programs, D, dtype=torch.float32, device=out.device) for _ in weights]
            given = (kept[0], *weights, *parts)
        _gather_turned_back[(programs,)](
            query, key, value, out, cos, sin, *given, B * T, T, cos.numel() // (D // 2), total * D,
            heads, kv_heads, D // 2, ctx.eps, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            NORM=bool(kept), ROWS=rows, HALF=pairs, num_warps=WARPS,
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
