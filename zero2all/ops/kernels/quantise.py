"""bfloat16 to float8 with one scale for the whole tensor, and the transpose in the same pass.

Hopper's float8 matmul needs both operands with the summed dimension contiguous. A linear layer's three matmuls sum
over different dimensions, so each operand is needed as it is and transposed; both are written from one read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import processors

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
AMAX_BLOCK = 8192
AMAX_PROGRAMS_PER_PROCESSOR = 4
TILE_ROWS, TILE_COLUMNS = 128, 64


@triton.jit
def _largest(values, parts, count, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    peak = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(program * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(values + at, mask=at < count, other=0.0).to(tl.float32)))
    tl.store(parts + program, tl.max(peak, axis=0))


@triton.jit
def _quantise(
    x, scale, straight, turned, rows, columns, largest, STRAIGHT: tl.constexpr, TURNED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    r = (program // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = (program % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    at = r[:, None] * columns + c[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * (1.0 / tl.load(scale))
    # NaN must stay NaN: the update is skipped because of it.
    value = tl.maximum(value, -largest, propagate_nan=tl.PropagateNan.ALL)
    value = tl.minimum(value, largest, propagate_nan=tl.PropagateNan.ALL)
    if STRAIGHT:
        tl.store(straight + at, value.to(straight.dtype.element_ty), mask=inside)
    if TURNED:
        small = tl.trans(value.to(turned.dtype.element_ty))
        tl.store(turned + c[:, None] * rows + r[None, :], small, mask=(c[:, None] < columns) & (r[None, :] < rows))


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that turns float8 values back into `x`: its largest magnitude over the largest float8."""
    count = x.numel()
    programs = min(triton.cdiv(count, AMAX_BLOCK), processors(x.device) * AMAX_PROGRAMS_PER_PROCESSOR)
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    _largest[(programs,)](x, parts, count, BLOCK=AMAX_BLOCK, num_warps=8)
    return scale_from_peaks(parts, dtype)


def scale_from_peaks(peaks: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from magnitudes that another kernel collected."""
    return peaks.max().clamp(min=1e-12) / LARGEST[dtype]


def quantise(
    x: Tensor, dtype: torch.dtype, scale: Tensor, *, straight: bool = True, turned: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Rows `x` (N, C) in float8, as (N, C) and as (C, N)."""
    rows, columns = x.shape
    as_is = torch.empty(rows, columns, dtype=dtype, device=x.device) if straight else None
    transposed = torch.empty(columns, rows, dtype=dtype, device=x.device) if turned else None
    some = as_is if as_is is not None else transposed
    grid = (triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, TILE_COLUMNS),)
    _quantise[grid](
        x, scale, as_is if straight else some, transposed if turned else some, rows, columns, LARGEST[dtype],
        STRAIGHT=straight, TURNED=turned, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return as_is, transposed
