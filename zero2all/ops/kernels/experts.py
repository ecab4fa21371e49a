"""The experts of a block for `zero2all.ops.experts`: SwiGLU with a gate per row, and sums of rows.

`GroupedExperts` is one autograd function, so that the product of SwiGLU need not be saved: its backward kernel computes
it again, with the gate in it, for the weight gradient. The matmuls are torch's `grouped_mm`. Each kernel has one
program per row and reads every value once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.gradient_sink import sink_of
from zero2all.ops.kernels.swiglu import load_pairs
from zero2all.ops.precision import without_autocast

MOST_UNITS = 1024
"""Values of a row that a program takes at once."""


@triton.jit
def _gated_forward(pairs, gates, h, width, BLOCK: tl.constexpr):
    """h = gate of the row * silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(gates + row).to(tl.float32)
    unit = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        first = row * width + start
        gate, up = load_pairs(pairs, first, width - start, BLOCK)
        product = gate * tl.sigmoid(gate) * up * factor
        tl.store(h + first + unit, product.to(h.dtype.element_ty), mask=unit < width - start)


@triton.jit
def _gated_backward(dh, pairs, gates, dpairs, h, dgates, width, BLOCK: tl.constexpr):
    """The gradients of pairs and of the gate of the row, and h again."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(gates + row).to(tl.float32)
    unit, value = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        first, left = row * width + start, width - start
        gate, up = load_pairs(pairs, first, left, BLOCK)
        d = tl.load(dh + first + unit, mask=unit < left, other=0.0).to(tl.float32)
        q = tl.sigmoid(gate)
        silu = gate * q
        sums += d * silu * up
        tl.store(h + first + unit, (silu * up * factor).to(h.dtype.element_ty), mask=unit < left)
        d = d * factor
        dgate, dup = d * up * (q + silu * (1.0 - q)), d * silu
        both = tl.interleave(dgate.to(dpairs.dtype.element_ty), dup.to(dpairs.dtype.element_ty))
        tl.store(dpairs + 2 * first + value, both, mask=value < 2 * left)
    tl.store(dgates + row, tl.sum(sums, axis=0))


@triton.jit
def _sum_rows(rows, places, sums, width, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the PER_TOKEN rows of a token, in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    unit = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        is_there = unit < width - start
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for number in tl.static_range(PER_TOKEN):
            row = tl.load(places + token * PER_TOKEN + number)
            total += tl.load(rows + row * width + start + unit, mask=is_there, other=0.0).to(tl.float32)
        tl.store(sums + token * width + start + unit, total.to(sums.dtype.element_ty), mask=is_there)


def _block(width: int) -> int:
    return min(MOST_UNITS, triton.next_power_of_2(width))


def gated_swiglu_forward(pairs: Tensor, gates: Tensor) -> Tensor:
    """Rows (M, 2 F) and the gate of each (M,) -> (M, F)."""
    count, width = pairs.shape[0], pairs.shape[1] // 2
    h = torch.empty(count, width, dtype=pairs.dtype, device=pairs.device)
    if count:
        _gated_forward[(count,)](pairs, gates, h, width, BLOCK=_block(width), num_warps=4)
    return h


def gated_swiglu_backward(dh: Tensor, pairs: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of pairs and gates, and h again."""
    dpairs, h, dgates = torch.empty_like(pairs), torch.empty_like(dh), torch.empty_like(gates)
    count, width = dh.shape
    if count:
        _gated_backward[(count,)](dh, pairs, gates, dpairs, h, dgates, width, BLOCK=_block(width), num_warps=4)
    return dpairs, h, dgates


def sum_rows(rows: Tensor, places: Tensor, per_token: int) -> Tensor:
    """For each token the sum of its `per_token` rows (M, C), which lie at `places` (M,)."""
    rows = rows.contiguous()
    count, width = len(rows) // per_token, rows.shape[1]
    sums = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    if count:
        _sum_rows[(count,)](rows, places, sums, width, PER_TOKEN=per_token, BLOCK=_block(width), num_warps=4)
    return sums


class GroupedExperts(torch.autograd.Function):
    """Tokens (M, C), sorted by expert -> gate * down(swiglu(gate_up(token))) with the weights of each one's expert."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        pairs = F.grouped_mm(x, gate_up.mT, offs=ends)
        ctx.save_for_backward(x, gates, pairs, ends)
        ctx.weights = (gate_up, down)
        return F.grouped_mm(gated_swiglu_forward(pairs, gates), down.mT, offs=ends)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, pairs, ends = ctx.saved_tensors
        gate_up, down = ctx.weights
        dy = dy.contiguous()
        dpairs, h, dgates = gated_swiglu_backward(F.grouped_mm(dy, down, offs=ends), pairs, gates)
        ddown = _weight_gradient(down, dy, h, ends)
        del h
        dx = F.grouped_mm(dpairs, gate_up, offs=ends)
        return dx, dgates, _weight_gradient(gate_up, dpairs, x, ends), ddown, None


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor | None:
    """dy^T x of the tokens of each expert: added to the weight's sink where it has one, else returned; None where the
    weight is frozen."""
    if not weight.requires_grad:
        return None
    gradient = F.grouped_mm(dy.t(), x, offs=ends)
    sink = sink_of(weight)
    if sink is None:
        return gradient
    sink.add(gradient)
    return None
