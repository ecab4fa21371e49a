"""Cross-entropy on logits that are overwritten with their own gradient.

One program per row writes weight * (softmax - onehot) over the logits. A row of at most WHOLE_ROW columns stays in
registers: it is read once, and each exponential is computed once. A program runs over a longer one in blocks twice,
for the largest logit and the sum, then for the gradient. The target's own column is written last, by itself, so that
the others need not be compared with it. Columns from `vocab_size` on are padding: they take no
part in the sum and get gradient 0, so they are never predicted and never learn. A target below 0 is ignored.
The z-loss adds z * logsumexp^2 to what is minimised, which keeps the logits from drifting; it is returned separately.

Registers and instructions decide the speed: with one row of 16,384 in 32 warps, no second row fits beside it on a
processor, and nothing is loaded while it computes. Exponentials are powers of 2, because those of e are made of them
with three more instructions, for results too small to matter.

Where the columns are cut over processes (`zero2all.ops.cut_vocabulary`), the two runs are two kernels, and the
processes exchange the sums between them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.precision import without_autocast

BLOCK, WARPS = 16384, 32
"""Best of 16 pairs on an H200 (64,320 columns): 65 % of what a copy moves; one load of the whole row: 45 %."""
WHOLE_ROW, WHOLE_WARPS = 16384, 4
"""165 registers a thread: three such rows share a processor of Hopper, two with 8 or 16 warps."""
_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _losses_and_gradient(
    logits, targets, weights, losses, penalties, row_stride, vocab_size, columns_in_all, z,
    HAS_Z: tl.constexpr, GRADIENT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        x = tl.load(start + columns, mask=columns < vocab_size, other=float("-inf")).to(tl.float32)
    target = tl.load(targets + row)
    counted = target >= 0
    # Before the sums, for which all warps wait: after them a fast warp may have overwritten it.
    at_target = tl.load(start + tl.where(counted, target, 0)).to(tl.float32)
    weight = tl.where(counted, tl.load(weights + row).to(tl.float32), 0.0)

    if WHOLE:
        largest = tl.max(x, axis=0)
        e = tl.exp2((x - largest) * _LOG2E)
        total = tl.sum(e, axis=0)
    else:
        largest = float("-inf")
        total = 0.0
        for first in range(0, vocab_size, BLOCK):
            x = tl.load(start + first + columns, mask=first + columns < vocab_size, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(largest, tl.max(x, axis=0))
            total = total * tl.exp(largest - peak) + tl.sum(tl.exp2((x - peak) * _LOG2E), axis=0)
            largest = peak
    logsum = largest + tl.log(total)
    tl.store(losses + row, tl.where(counted, logsum - at_target, 0.0))
    slope = weight
    if HAS_Z:
        tl.store(penalties + row, tl.where(counted, z * logsum * logsum, 0.0))
        slope = weight * (1.0 + 2.0 * z * logsum)
    if GRADIENT:
        factor = slope / total
        if WHOLE:
            tl.store(start + columns, (e * factor).to(logits.dtype.element_ty), mask=columns < columns_in_all)
        else:
            for first in range(0, columns_in_all, BLOCK):
                at = first + columns
                x = tl.load(start + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
                gradient = tl.exp2((x - largest) * _LOG2E) * factor
                tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < columns_in_all)
        tl.debug_barrier()  # another warp may have written the target's column
        gradient = tl.exp2((at_target - largest) * _LOG2E) * factor - weight
        tl.store(start + target, gradient.to(logits.dtype.element_ty), mask=counted)


def cross_entropy_in_place(
    logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0, gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The losses (N,) and, with z, the penalties (N,), in float32. With `gradient`, overwrites `logits` (N, V) with
    d(sum of weights * (losses + penalties))/dlogits."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    penalties = torch.empty_like(losses) if z else None
    columns = triton.next_power_of_2(logits.shape[1])
    whole = columns <= WHOLE_ROW
    _losses_and_gradient[(logits.shape[0],)](
        logits, targets, weights, losses, losses if penalties is None else penalties, logits.stride(0), vocab_size,
        logits.shape[1], z, HAS_Z=bool(z), GRADIENT=gradient, WHOLE=whole,
        BLOCK=columns if whole else min(BLOCK, columns), num_warps=WHOLE_WARPS if whole else WARPS,
    )  # fmt: skip
    return losses, penalties


@triton.jit
def _row_sums(
    logits, targets, largest_of, total_of, at_target_of, row_stride, first_id, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    columns = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(start + first + columns, mask=first + columns < vocab_size, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - peak) + tl.sum(tl.exp(x - peak), axis=0)
        largest = peak
    target = tl.load(targets + row) - first_id
    is_here = (target >= 0) & (target < vocab_size)
    tl.store(at_target_of + row, tl.load(start + target, mask=is_here, other=0.0).to(tl.float32))
    tl.store(largest_of + row, largest)
    tl.store(total_of + row, total)


@triton.jit
def _slopes(
    logits, targets, weights, logsums, row_stride, first_id, vocab_size, columns_in_all, z, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    target = tl.load(targets + row) - first_id
    weight = tl.load(weights + row)
    logsum = tl.load(logsums + row)
    slope = weight * (1.0 + 2.0 * z * logsum)
    columns = tl.arange(0, BLOCK)
    for first in range(0, columns_in_all, BLOCK):
        at = first + columns
        x = tl.load(start + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - logsum) * slope - tl.where(at == target, weight, 0.0)
        tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < columns_in_all)


def row_sums(logits: Tensor, targets: Tensor, first_id: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of logits (N, V), whose first column is the id `first_id`: the largest of the first `columns`, the
    sum of exp(logit - largest), and the logit of the target, 0 where it is not among them. float32."""
    largest, total, at_target = torch.empty(3, logits.shape[0], dtype=torch.float32, device=logits.device).unbind()
    _row_sums[(logits.shape[0],)](
        logits, targets, largest, total, at_target, logits.stride(0), first_id, columns,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=WARPS,
    )  # fmt: skip
    return largest, total, at_target


def slopes_in_place(
    logits: Tensor, targets: Tensor, weights: Tensor, logsums: Tensor, first_id: int, columns: int, z: float
) -> None:
    """Overwrite logits (N, V) with weights * d(losses + penalties)/dlogits, where `logsums` (N,) is over all ids."""
    _slopes[(logits.shape[0],)](
        logits, targets, weights, logsums, logits.stride(0), first_id, columns, logits.shape[1], z,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=WARPS,
    )  # fmt: skip


class CrossEntropyInPlace(torch.autograd.Function):
    """(logits (N, V), targets (N,)) -> losses (N,). The logits are overwritten with their gradient."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ones = torch.ones(targets.shape, dtype=torch.float32, device=logits.device)
        needed = bool(ctx.needs_input_grad[0])
        losses, _ = cross_entropy_in_place(logits, targets, ones, logits.shape[1], gradient=needed)
        ctx.save_for_backward(logits)
        return losses

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes.mul_(dlosses.unsqueeze(1)), None


def triton_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """See `zero2all.ops.cross_entropy`."""
    losses: Tensor = CrossEntropyInPlace.apply(logits.contiguous(), targets)
    return losses
