"""The head and the loss with the softmax inside the matmuls, by QuACK, on Hopper.

Logits are never written. The epilogue of the matmul that computes them writes, for each row and each tile of TILE
columns, E = 2^(logit log2(e) - k), where the whole number k (per row and tile) keeps E near 1 at the tile's largest
logit; beside it k, the tile's sum of E, and the logit of the row's target. From those few numbers per tile come the
loss and

    dlogits = factor * u * E      u = 2^(k - k_row), exact; factor = weight * slope * 2^k_row / exp(logsumexp), per row

with E corrected at the target (softmax - 1). So the gradient is not written either: the two matmuls that need it read E
and multiply it by u on the way into the tensor cores; the factor goes into the other operand or the epilogue. This
saves what a separate softmax would read and write: twice the logits.

The columns after the last whole tile (TILE does not divide the vocabulary, and padding must not count) are computed by
a small matmul of their own, and a kernel that does for them what the epilogue does for the rest.

This module imports QuACK: import it where the check has passed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import identity_epi
from quack.epilogue.ops import ColVecLoad
from quack.epilogue.scaled_exp import scaled_exp_target_epi
from quack.operand_transform import a_transform
from quack.operand_transform.host import transform_a_operand
from torch import Tensor

TILE = 192
"""Columns with one k. QuACK's fastest tile for this matmul on an H200: 128 x 192, ping-pong scheduling."""
GROUP = 64
"""Rows or columns of the operand that share a value of u."""
ROWS = 128
"""Rows of a tile; the epilogues need multiples of it."""
ALIGNMENT = 32
"""Bytes: the alignment that QuACK needs of the targets."""
FURTHEST = 80.0
"""Nats from the tile of the target to the sum of all columns beyond which the target's gradient becomes too small: E is
bfloat16, whose largest value is e^88. A model that learns has no logits that far apart."""

_LN2 = tl.constexpr(math.log(2.0))
_LOG2E = tl.constexpr(math.log2(math.e))
_FURTHEST = tl.constexpr(FURTHEST)


@a_transform(vec_size=8, args={"u": "colvec_ktile"})
def _rescaled(x, u):
    return x * u


@a_transform(vec_size=8, args={"u": "kvec_m64"})
def _rescaled_turned(x, u):
    return x * u


@gemm_epilogue(ops={"factor": ColVecLoad("factor")})
def _times_factor(acc, factor):
    return {"D": acc * factor}


@triton.jit
def _last_columns(
    logits, targets, exponentials, peaks, sums, at_target, first, columns, counted_columns, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(logits + row * columns + column, mask=column < counted_columns, other=float("-inf"))
    k = tl.floor(tl.maximum(tl.max(x, axis=0), -1e30) * _LOG2E + 0.5)  # finite even where all columns are padding
    e = tl.exp2(x * _LOG2E - k)
    tl.store(exponentials + row * row_stride + column, e.to(exponentials.dtype.element_ty), mask=column < columns)
    tl.store(peaks + row, k)
    tl.store(sums + row, tl.sum(e, axis=0))
    target = tl.load(targets + row) - first
    is_here = (target >= 0) & (target < counted_columns)
    tl.store(at_target + row, tl.load(logits + row * columns + target, mask=is_here, other=0.0), mask=is_here)


@triton.jit
def _close_rows(
    hidden, targets, weights, peaks, sums, last_peaks, last_sums, at_target, exponentials,
    losses, penalties, row_peaks, factors, scaled_hidden, tiles, width, row_stride, z,
    HAS_LAST: tl.constexpr, HAS_Z: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    k = tl.load(peaks + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    total = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
    top = tl.max(k, axis=0)
    if HAS_LAST:
        last = tl.load(last_peaks + row)
        top = tl.maximum(top, last)
    total = tl.sum(total * tl.exp2(k - top), axis=0)
    if HAS_LAST:
        total += tl.load(last_sums + row) * tl.exp2(last - top)
    logsum = top * _LN2 + tl.log(total)

    target = tl.load(targets + row)
    counted = target >= 0
    logit = tl.load(at_target + row, mask=counted, other=0.0)
    tl.store(losses + row, tl.where(counted, logsum - logit, 0.0))
    slope = 1.0
    if HAS_Z:
        tl.store(penalties + row, tl.where(counted, z * logsum * logsum, 0.0))
        slope = 1.0 + 2.0 * z * logsum

    of_target = target // TILE
    in_tiles = counted & (of_target < tiles)
    here = tl.load(peaks + row * tiles + tl.where(in_tiles, of_target, 0))
    if HAS_LAST:
        here = tl.where(in_tiles, here, last)
    fixed = (tl.exp(logit - logsum) - 1.0 / slope) * tl.exp(tl.minimum(logsum - here * _LN2, _FURTHEST))
    inside = counted & (target < row_stride)
    tl.store(exponentials + row * row_stride + target, fixed.to(exponentials.dtype.element_ty), mask=inside)

    weight = tl.where(counted, tl.load(weights + row).to(tl.float32), 0.0)
    factor = weight * slope * tl.exp(top * _LN2 - logsum)
    tl.store(factors + row, factor)
    tl.store(row_peaks + row, top)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(hidden + row * width + column, mask=column < width, other=0.0).to(tl.float32)
        at = scaled_hidden + row * width + column
        tl.store(at, (x * factor).to(scaled_hidden.dtype.element_ty), mask=column < width)


@triton.jit
def _scales(
    peaks, last_peaks, row_peaks, scales, rows, tiles, groups, counted_groups,
    HAS_LAST: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[:, None]
    row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
    tile = group // PER_TILE
    inside = row < rows
    k = tl.load(peaks + row * tiles + tile, mask=inside & (tile < tiles), other=0.0)
    if HAS_LAST:
        k = tl.where(tile < tiles, k, tl.load(last_peaks + row, mask=inside, other=0.0))
    u = tl.exp2(k - tl.load(row_peaks + row, mask=inside, other=0.0))
    u = tl.where(group < counted_groups, u, 0.0)
    at = scales + group.to(tl.int64) * rows + row
    tl.store(at, u.to(scales.dtype.element_ty), mask=inside & (group < groups))


def gradient_rows(head_rows: int) -> int:
    """Rows that the buffer of the head's gradient must have: whole tiles."""
    return -(-head_rows // ROWS) * ROWS


def losses_and_gradients(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float, chunk_rows: int,
    losses: Tensor, penalties: Tensor | None, dhidden: Tensor, dhead: Tensor,
) -> None:  # fmt: skip
    """Fill losses and penalties (N,), dhidden (N, C) and dhead (`gradient_rows(V)`, C; float32) for hidden (N, C), head
    (V, C), targets and weights (N,). N is a multiple of ROWS, V of GROUP; rows of dhead from V on are 0."""
    count, width = hidden.shape
    V, padded = head.shape[0], gradient_rows(head.shape[0])
    tiles = vocab_size // TILE
    whole = tiles * TILE
    chunk = min(chunk_rows, count)
    device, narrow = hidden.device, hidden.dtype
    if targets.data_ptr() % ALIGNMENT:  # a slice of a row of ids need not be aligned
        targets = targets.clone()
    exponentials = torch.empty(chunk, padded, dtype=narrow, device=device)
    exponentials[:, V:] = 0.0  # the matmul reads it, and 0 times uninitialised memory may be NaN
    numbers = torch.empty(2, chunk, tiles, dtype=torch.float32, device=device)
    per_row = torch.empty(5, chunk, dtype=torch.float32, device=device)
    groups = padded // GROUP
    for first in range(0, count, chunk):
        rows = slice(first, min(first + chunk, count))
        n = rows.stop - first
        x, wanted = hidden[rows], targets[rows]
        E, peaks, sums = exponentials[:n], numbers[0, :n], numbers[1, :n]
        last_peaks, last_sums, at_target, row_peaks, factors = per_row[:, :n].unbind()
        scaled_exp_target_epi.gemm(
            x, head[:whole], E[:, :whole],
            epi_args={
                "max_log2": TILE, "sum_exp": sums, "max_log2_out": peaks, "target": wanted, "target_logit": at_target,
            },
            tile_M=ROWS, tile_N=TILE, cluster_M=2, cluster_N=1, pingpong=True,
        )  # fmt: skip
        if whole < V:
            logits = _wide_matmul(x, head[whole:])
            _last_columns[(n,)](
                logits, wanted, E[:, whole:], last_peaks, last_sums, at_target, whole, V - whole, vocab_size - whole,
                padded, BLOCK=triton.next_power_of_2(V - whole), num_warps=1,
            )  # fmt: skip
        scaled = torch.empty_like(x)
        _close_rows[(n,)](
            x, wanted, weights[rows], peaks, sums, last_peaks, last_sums, at_target, E,
            losses[rows], losses if penalties is None else penalties[rows], row_peaks, factors, scaled,
            tiles, width, padded, z, HAS_LAST=whole < V, HAS_Z=penalties is not None,
            TILE=TILE, TILES=triton.next_power_of_2(tiles), BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
        scales = torch.empty(groups, n, dtype=narrow, device=device)
        _scales[(triton.cdiv(groups, 64), triton.cdiv(n, 64))](
            peaks, last_peaks, row_peaks, scales, n, tiles, groups, V // GROUP,
            HAS_LAST=whole < V, PER_TILE=TILE // GROUP, BLOCK_GROUPS=64, BLOCK_ROWS=64, num_warps=4,
        )  # fmt: skip
        _times_factor.gemm(
            transform_a_operand(_rescaled, E[:, :V], {"u": scales[: V // GROUP]}, ROWS, GROUP), head.mT, dhidden[rows],
            epi_args={"factor": factors.unsqueeze(0)}, transform_a=_rescaled,
            tile_M=ROWS, tile_N=256, tile_K=GROUP, cluster_M=2, cluster_N=1,
        )  # fmt: skip
        identity_epi.gemm(
            transform_a_operand(_rescaled_turned, E.t(), {"u": scales}, ROWS, GROUP), scaled.mT, dhead,
            epi_args={}, transform_a=_rescaled_turned, add_to_output=first > 0,
            tile_M=ROWS, tile_N=256, tile_K=GROUP, cluster_M=1, cluster_N=2,
        )  # fmt: skip


def _wide_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the float32 of the accumulator."""
    if not x.is_cuda:
        return x.float() @ weight.float().t()
    return torch.mm(x, weight.t(), out_dtype=torch.float32)
