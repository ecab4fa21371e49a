"""AdamW over flat buffers: clip, skip, update and write the low-precision weights in one pass.

Per value: gradient, master weight and both moments are read (16 bytes) and all but the gradient written back, the
weight also in the model's dtype (14 bytes; 12 where the bfloat16 weight is one half of its master, see
`zero2all.ops.split_master`). The factor on the gradient (clipping, loss scaling) and the word to skip
come from the device; a skipped step writes nothing at all, so every bit of the state stays as it was, and the host
never waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import processors
from zero2all.ops.split_master import QUIET_NAN

BLOCK = 2048
NORM_BLOCK = 8192
NORM_PROGRAMS_PER_PROCESSOR = 4


@triton.jit
def _sum_of_squares(values, parts, count, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(program * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)
        total += x * x
    tl.store(parts + program, tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def _update(
    weights, masters, gradients, firsts, seconds, scale, skip, corrections, count, lr, beta1, beta2, eps, decay,
    SPLIT: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    correction1 = tl.load(corrections)
    correction2 = tl.load(corrections + 1)
    if tl.load(skip) == 0:
        clip = tl.load(scale)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        g = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * clip
        if SPLIT:
            upper = tl.load(weights + at, mask=inside, other=0).to(tl.int32)
            w = ((upper << 16) + tl.load(masters + at, mask=inside, other=0)).to(tl.float32, bitcast=True)
        else:
            w = tl.load(masters + at, mask=inside, other=0.0)
        m = tl.load(firsts + at, mask=inside, other=0.0)
        v = tl.load(seconds + at, mask=inside, other=0.0)
        m = beta1 * m + (1.0 - beta1) * g
        v = beta2 * v + (1.0 - beta2) * g * g
        w = w * (1.0 - lr * decay) - lr * (m / correction1) / (tl.sqrt(v / correction2) + eps)
        tl.store(firsts + at, m, mask=inside)
        tl.store(seconds + at, v, mask=inside)
        if SPLIT:
            bits = w.to(tl.int32, bitcast=True)
            upper = tl.where(w == w, (bits + 0x8000) >> 16, NAN)
            remainder = tl.where(w == w, bits - (upper << 16), 0)
            tl.store(weights + at, upper.to(tl.int16), mask=inside)
            tl.store(masters + at, remainder.to(tl.int16), mask=inside)
        else:
            tl.store(masters + at, w, mask=inside)
            tl.store(weights + at, w.to(weights.dtype.element_ty), mask=inside)


def sum_of_squares(values: Tensor) -> Tensor:
    """The sum of squares of a flat buffer, as a float64 scalar on its device."""
    count = values.numel()
    programs = min(triton.cdiv(count, NORM_BLOCK), processors(values.device) * NORM_PROGRAMS_PER_PROCESSOR)
    parts = torch.empty(programs, dtype=torch.float64, device=values.device)
    _sum_of_squares[(programs,)](values, parts, count, BLOCK=NORM_BLOCK, num_warps=8)
    return parts.sum()


def bias_corrections(updates: Tensor, beta1: float, beta2: float) -> Tensor:
    """1 - beta^n of both moments for update number n = `updates` + 1 (a scalar on the device), in float32."""
    number = updates.double() + 1.0
    return torch.stack((1.0 - beta1**number, 1.0 - beta2**number)).float()


def adamw_update(
    weights: Tensor, masters: Tensor, gradients: Tensor, firsts: Tensor, seconds: Tensor, scale: Tensor, skip: Tensor,
    corrections: Tensor, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """One step on flat buffers of equal length; `scale` is a float32 scalar on their device, `skip` an int32 one.

    `masters` are float32, or the int16 remainders of masters whose nearest bfloat16 are the weights.
    """
    count, is_split = weights.numel(), masters.dtype == torch.int16
    if is_split:
        weights = weights.view(torch.int16)
    _update[(triton.cdiv(count, BLOCK),)](
        weights, masters, gradients, firsts, seconds, scale, skip, corrections, count, lr, beta1, beta2, eps,
        weight_decay, SPLIT=is_split, NAN=QUIET_NAN, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
