"""Scaling by a number in GPU memory, at the speed of a copy.

torch multiplies a large tensor by a one-element tensor of another dtype value by value: 268 MB take 0.29 ms on an H200,
where a copy takes 0.06.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _scaled(x, out, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _add_scaled(total, x, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(total + at, tl.load(total + at, mask=at < count, other=0.0) + value, mask=at < count)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor in the dtype of x, which is contiguous; factor has one element."""
    assert x.is_contiguous()
    out = torch.empty_like(x)
    _scaled[(triton.cdiv(x.numel(), BLOCK),)](x, out, factor, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


def add_scaled_(total: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """total += x * factor, in place; both contiguous, factor has one element."""
    assert total.is_contiguous()
    assert x.is_contiguous()
    _add_scaled[(triton.cdiv(x.numel(), BLOCK),)](total, x, factor, x.numel(), BLOCK=BLOCK, num_warps=8)
    return total
