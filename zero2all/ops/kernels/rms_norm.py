"""Residual add and RMSNorm in one pass each way.

Forward: s = x + branch, normed = s / sqrt(mean(s^2) + eps) * weight; s is written back as the new residual and
1/sqrt(...) is saved, one float per row. Backward, with g = dnormed * weight and h = s * rstd:
ds = rstd * (g - h * mean(g * h)) + (the gradient of the residual); it is the gradient of both x and branch.
dweight is summed by each program over its rows and then, by a small kernel, over the programs, always in the same
order; that kernel adds it to the weight's sink (`zero2all.ops.gradient_sink`) where it has one.

The lean variant does not save s. Its backward computes h = normed / weight from the output, which the linear layer
after the norm saves anyway, so a norm needs no memory of its own; h then has the rounding of the output, and a weight
of exactly 0 is replaced by LEAST_WEIGHT.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.gradient_sink import sink_of
from zero2all.ops.kernels.launch import processors, rows_of
from zero2all.ops.precision import autocast_to, without_autocast

WARPS_PER_PROCESSOR = 24
"""Of the backward pass, which takes 80 registers a thread: no more fit. Best on an H200 at width 2048, in programs of 4
warps: 95 % of what a copy moves; 6 programs of the 1 warp of width 512: 53 %."""
LEAST_WEIGHT = 1e-6
SUM_ROWS, SUM_COLUMNS = 512, 16
"""Tile of the sum over programs: few columns, so that many programs share the work, and 64 bytes of each row."""


@triton.jit
def _forward(x, branch, weight, normed, total, rstd, width, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    s = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        s += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        rounded = s.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        s = rounded.to(tl.float32)  # normalise what the backward will read
    scale = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / width + eps)
    tl.store(rstd + row, scale)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (s * scale * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dnormed, dtotal, kept, weight, rstd, ds, dweight_parts, rows, width, least,
    HAS_DTOTAL: tl.constexpr, LEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if LEAN:
        divisor = tl.where(tl.abs(w) < least, tl.where(w < 0.0, -least, least), w)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = row * width + columns
        scale = tl.load(rstd + row)
        dy = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(kept + at, mask=inside, other=0.0).to(tl.float32)
        if LEAN:
            h = h / divisor
        else:
            h = h * scale
        dweight += dy * h
        g = dy * w
        grad = (g - h * (tl.sum(g * h, axis=0) / width)) * scale
        if HAS_DTOTAL:
            grad += tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(ds + at, grad.to(ds.dtype.element_ty), mask=inside)
    tl.store(dweight_parts + program * width + columns, dweight, mask=inside)


@triton.jit
def _sum_parts(parts, target, count, width, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts + row * width + columns[None, :], mask=(row < count) & inside[None, :], other=0.0)
    dweight = tl.sum(total, axis=0)
    if ADD:
        dweight += tl.load(target + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + columns, dweight.to(target.dtype.element_ty), mask=inside)


def add_sum_of_parts(weight: Tensor, parts: Tensor) -> Tensor | None:
    """The sum of float32 rows: added to the weight's sink where it has one, else returned in the weight's dtype."""
    count, width = parts.shape
    sink = sink_of(weight)
    target = torch.empty_like(weight) if sink is None else sink.buffer
    _sum_parts[(triton.cdiv(width, SUM_COLUMNS),)](
        parts, target, count, width, ADD=sink is not None, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8
    )
    if sink is None:
        return target
    sink.mark_ready()
    return None


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


class AddRmsNorm(torch.autograd.Function):
    """(x, branch or None, weight, eps, lean) -> (normed, x + branch)."""

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, lean: bool
    ) -> tuple[Tensor, Tensor]:
        rows = rows_of(x)
        count, width = rows.shape
        added = rows_of(branch) if branch is not None else rows
        normed = torch.empty(rows.shape, dtype=weight.dtype, device=x.device)
        total = torch.empty_like(rows) if branch is not None else rows
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        _forward[(count,)](
            rows, added, weight, normed, total, rstd, width, eps,
            HAS_BRANCH=branch is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        out = normed.view(x.shape)
        ctx.save_for_backward(out if lean else total, rstd)
        ctx.weight = weight  # not as a saved tensor, which may come back without its sink
        ctx.lean, ctx.sum_dtype = lean, total.dtype
        ctx.set_materialize_grads(False)  # the sum of the last norm is not used
        ctx.branch_dtype = None if branch is None else branch.dtype
        return out, total.view(x.shape)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dnormed: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, rstd = ctx.saved_tensors
        weight = ctx.weight
        if dnormed is None:
            dnormed = torch.zeros(kept.shape, dtype=weight.dtype, device=kept.device)
        width = weight.shape[0]
        kept = kept.view(-1, width)
        count = kept.shape[0]
        dy = rows_of(dnormed)
        from_residual = dy if dtotal is None else rows_of(dtotal)
        ds = torch.empty(kept.shape, dtype=ctx.sum_dtype, device=kept.device)
        block = triton.next_power_of_2(width)
        programs = min(count, processors(kept.device) * max(1, WARPS_PER_PROCESSOR // _warps(block)))
        parts = torch.empty(programs, width, dtype=torch.float32, device=kept.device)
        _backward[(programs,)](
            dy, from_residual, kept, weight, rstd, ds, parts, count, width, LEAST_WEIGHT,
            HAS_DTOTAL=dtotal is not None, LEAN=ctx.lean, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        dx = ds.view(dnormed.shape)
        dbranch = None if ctx.branch_dtype is None else dx.to(ctx.branch_dtype)
        return dx, dbranch, add_sum_of_parts(weight, parts), None, None


def triton_add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, lean: bool = False
) -> tuple[Tensor, Tensor]:
    """See `zero2all.ops.rms_norm`."""
    dtype = autocast_to(x.device.type)
    normed, total = AddRmsNorm.apply(x, branch, weight if dtype is None else weight.to(dtype), eps, lean)
    return normed, total
