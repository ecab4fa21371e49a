"""Products with a matrix in 4 bits (`infer.weights.Int4Weight`), which the tensor cores take for one row of input, too.

The matrix is stored as they take it: 8 rows by 128 columns are 512 bytes, of which each of 32 threads reads its own 16
at once. The dimensions of the tiles below are ordered so that a thread multiplies what it has loaded, without shared
memory: `permute` and `reshape` only rename its registers, and the columns of both sides have the same other order.

Two weights cost three instructions: shift; set the exponent of 1 over them, which gives 1 + q / 16; multiply by the
scale and subtract 1.5 times the scale, which is exact because scales have 6 significant bits. The result, scale x
(q - 8) / 16, is rounded to bfloat16 once, and is the same in every product.

    few_rows    the warps of a program have different columns, and read the first weights before the kernel ahead is
                over; norm, SwiGLU and residual are around the product as in `decode_linear`
    many_rows   tiles of 64 rows; where there are fewer of them than processors, several programs share the columns of
                one, and the last to end adds their sums, in order
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.decode_linear import _swiglu
from zero2all.ops.kernels.launch import overlapped, processors, wait_for_earlier_kernels

MOST_FEW = 16
"""Rows of input of `few_rows`."""
_SET = "lop3.b32 word, word, 0x00780078, 0x3F803F80, 0xEA; fma.rn.bf16x2"
UNPACK = tl.constexpr(f"""{{ .reg .b32 word, low, none; mov.b32 none, 0x80008000; mov.b32 low, 0xBFC0BFC0;
fma.rn.bf16x2 low, $5, low, none;
shl.b32 word, $4, 3; {_SET} $0, word, $5, low;
shr.u32 word, $4, 1; {_SET} $1, word, $5, low;
shr.u32 word, $4, 5; {_SET} $2, word, $5, low;
shr.u32 word, $4, 9; {_SET} $3, word, $5, low; }}""")
"""Two words of four numbers each, and two scales -> four pairs of weights."""


@triton.jit
def _weight(packed, scale, PLACE: tl.constexpr):
    return ((((packed >> (4 * PLACE)) & 15) - 8).to(tl.float32) * (scale.to(tl.float32) / 16)).to(tl.bfloat16)


@triton.jit
def _weights(packed, scale, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words (A, B, C, D, 8) and the scales of their groups (A, B, C, D, GROUPS) -> weights (A, B, C, D, 8, 2, 2)."""
    A: tl.constexpr = packed.shape[0]
    B: tl.constexpr = packed.shape[1]
    C: tl.constexpr = packed.shape[2]
    D: tl.constexpr = packed.shape[3]
    scale = tl.broadcast_to(tl.reshape(scale, (A, B, C, D, GROUPS, 1)), (A, B, C, D, GROUPS, 8 // GROUPS))
    scale = tl.reshape(scale, (A, B, C, D, 8))
    if INTERPRETED:
        a, b = _weight(packed, scale, 0), _weight(packed, scale, 1)
        c, d = _weight(packed, scale, 2), _weight(packed, scale, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            UNPACK, "=&r,=&r,=&r,=&r,r,r", [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def _few_rows(
    x, packed, scales, y, inputs, rows, eps,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
    NORM: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
    EIGHTS: tl.constexpr, LEAST: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 8 * BLOCKS
    INPUTS: tl.constexpr = 8 * EIGHTS
    # Of a tile: 4 threads of a row, 8 rows of a block, chunks of columns, which warps share, then registers.
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    chunk = tl.arange(0, STEP)[None, None, :, None, None]
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)[None, None, None, :, None]
    place = (block * CHUNKS + chunk) * 8 + g
    words_at = packed + (place * 4 + t) * 8 + tl.arange(0, 8)[None, None, None, None, :]
    scales_at = scales + (place + 0 * t) * GROUPS + tl.arange(0, GROUPS)[None, None, None, None, :]
    inside = (chunk < CHUNKS) & (block * 8 < rows)
    words_ahead = tl.load(words_at, mask=inside, other=0, eviction_policy="evict_first")
    scales_ahead = tl.load(scales_at, mask=inside, other=0, eviction_policy="evict_first")
    number = (tl.arange(0, EIGHTS) * 8)[None, None, None, :, None, None]
    number += tl.arange(0, 8)[None, :, None, None, None, None]
    column = (tl.arange(0, STEP) * 128)[None, None, :, None, None, None]
    column += (tl.arange(0, 4) * 32)[None, None, None, None, :, None]
    column += (tl.arange(0, 4) * 8)[:, None, None, None, None, None]
    column += tl.arange(0, 8)[None, None, None, None, None, :]
    wait_for_earlier_kernels(OVERLAP)
    sums = tl.zeros((STEP, ROWS, INPUTS), dtype=tl.float32)
    for first in tl.static_range(0, CHUNKS, STEP):
        words, scale = words_ahead, scales_ahead
        if first + STEP < CHUNKS:
            inside = (chunk < CHUNKS - first - STEP) & (block * 8 < rows)
            skip = first + STEP
            words_ahead = tl.load(words_at + skip * 256, mask=inside, other=0, eviction_policy="evict_first")
            scales_ahead = tl.load(scales_at + skip * (8 * GROUPS), mask=inside, other=0, eviction_policy="evict_first")
        is_input = (number < inputs) & (column < COLUMNS - first * 128)
        value = tl.load(x + number * COLUMNS + column + first * 128, mask=is_input, other=0.0).to(tl.bfloat16)
        weight = tl.reshape(_weights(words, scale, GROUPS, INTERPRETED), (4, 8, STEP, BLOCKS, 4, 2, 2, 2))
        weight = tl.reshape(tl.permute(weight, (2, 3, 1, 4, 7, 0, 6, 5)), (STEP, ROWS, 128))
        value = tl.reshape(value, (4, 8, STEP, EIGHTS, 4, 2, 2, 2))
        value = tl.reshape(tl.permute(value, (2, 4, 5, 0, 6, 7, 3, 1)), (STEP, 128, INPUTS))
        sums = tl.dot(weight, value, sums)
    product = tl.sum(sums, axis=0)
    if NORM:
        squares = tl.zeros((LEAST, 1024), dtype=tl.float32)
        one = tl.arange(0, LEAST)[:, None]
        at = tl.arange(0, 1024)[None, :]
        for first in tl.static_range(0, COLUMNS, 1024):
            inside = (at < COLUMNS - first) & (one < inputs)
            wide = tl.load(x + one * COLUMNS + first + at, mask=inside, other=0.0).to(tl.float32)
            squares += wide * wide
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / COLUMNS + eps)
        product *= tl.reshape(tl.broadcast_to(factor[None, :], (INPUTS // LEAST, LEAST)), (1, INPUTS))
    width = rows
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if SWIGLU:
        product = _swiglu(tl.permute(tl.reshape(product, (ROWS // 2, 2, INPUTS)), (0, 2, 1)))
        width = rows // 2
        row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    each = tl.arange(0, INPUTS)
    there = y + each[None, :] * width + row[:, None]
    inside = (row < width)[:, None] & (each < inputs)[None, :]
    if ADD:
        product += tl.load(there, mask=inside, other=0.0).to(tl.float32)
    tl.store(there, product.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _many_rows(
    x, packed, scales, y, parts, arrived, inputs, rows,
    COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
    SPLITS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, 4)[:, None, None, None, None]
    g = tl.arange(0, 8)[None, :, None, None, None]
    block = tl.arange(0, ROWS // 16)[None, None, :, None, None] * 2 + tl.arange(0, 2)[None, None, None, :, None]
    block = tl.program_id(0).to(tl.int64) * (ROWS // 8) + block
    place = block * (CHUNKS * 8) + g
    words_at = packed + (place * 4 + t) * 8 + tl.arange(0, 8)[None, None, None, None, :]
    scales_at = scales + (place + 0 * t) * GROUPS + tl.arange(0, GROUPS)[None, None, None, None, :]
    number = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    column = tl.arange(0, 128)
    inputs_at = x + number[:, None] * COLUMNS + column[None, :]
    sums = tl.zeros((ROWS, INPUTS), dtype=tl.float32)
    EACH: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    split = tl.program_id(2)
    for chunk in range(split * EACH, tl.minimum((split + 1) * EACH, CHUNKS)):
        words = tl.load(words_at + chunk * 256, mask=block * 8 < rows, other=0)
        scale = tl.load(scales_at + chunk * (8 * GROUPS), mask=block * 8 < rows, other=0)
        is_input = (number < inputs)[:, None] & (column < COLUMNS - chunk * 128)[None, :]
        value = tl.load(inputs_at + chunk * 128, mask=is_input, other=0.0)
        weight = tl.reshape(_weights(words, scale, GROUPS, INTERPRETED), (4, 8, ROWS // 16, 2, 4, 2, 2, 2))
        weight = tl.reshape(tl.permute(weight, (2, 3, 1, 4, 7, 6, 0, 5)), (ROWS, 128))
        value = tl.permute(tl.reshape(value, (INPUTS, 4, 4, 4, 2)), (1, 3, 2, 4, 0))
        sums = tl.dot(weight, tl.reshape(value, (128, INPUTS)), sums)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if SPLITS > 1:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        parts += tile.to(tl.int64) * (SPLITS * ROWS * INPUTS)
        parts += tl.arange(0, ROWS)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :]
        tl.store(parts + split * (ROWS * INPUTS), sums)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)
        sums = tl.zeros((ROWS, INPUTS), dtype=tl.float32)
        for part in range(SPLITS):
            sums += tl.load(parts + part * (ROWS * INPUTS))
    at = y + number[None, :] * rows + row[:, None]
    tl.store(at, sums.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (number < inputs)[None, :])


@cache
def _counters(device: torch.device) -> Tensor:
    return torch.zeros(4096, dtype=torch.int32, device=device)


def few_rows(
    x: Tensor, values: Tensor, scales: Tensor, y: Tensor,
    norm: bool = False, eps: float = 0.0, swiglu: bool = False, add: bool = False,
    blocks: int = 2, step: int = 0, warps: int = 4,
) -> None:  # fmt: skip
    """y (N, rows) = W f(x) for x (N, columns): f is RMSNorm without a gain where `norm` is true; `swiglu` and `add` as
    in `decode_linear`. A program takes `blocks` x 8 rows, and `step` chunks of columns at a time (0: it depends)."""
    inputs, rows, chunks = len(x), y.shape[1] * (2 if swiglu else 1), values.shape[1]
    eights = triton.next_power_of_2(triton.cdiv(inputs, 8))
    step = step or max(warps, min(triton.next_power_of_2(chunks), 32 // (blocks * eights)))
    _few_rows[(triton.cdiv(rows, 8 * blocks),)](
        x, values, scales, y, inputs, rows, eps, COLUMNS=x.shape[1], CHUNKS=chunks, GROUPS=scales.shape[3],
        INTERPRETED=x.device.type == "cpu", NORM=norm, SWIGLU=swiglu, ADD=add, EIGHTS=eights,
        LEAST=min(8 * eights, triton.next_power_of_2(inputs)), BLOCKS=blocks, STEP=step, num_warps=warps,
        **overlapped(x.device),
    )  # fmt: skip


def many_rows(
    x: Tensor, values: Tensor, scales: Tensor, y: Tensor, at_once: int = 64, splits: int = 0, stages: int = 3
) -> None:
    """y (N, rows) = W x for x (N, columns) in bfloat16; `splits` programs share the columns (0: it depends)."""
    (inputs, rows), chunks = y.shape, values.shape[1]
    together = min(64, max(16, triton.next_power_of_2(inputs)))
    tiles = triton.cdiv(rows, at_once), triton.cdiv(inputs, together)
    splits = splits or max(1, min(8, chunks // 4, processors(x.device) // (tiles[0] * tiles[1])))
    size = splits * tiles[0] * at_once * tiles[1] * together
    parts = torch.empty(size if splits > 1 else 0, dtype=torch.float32, device=x.device)
    _many_rows[(*tiles, splits)](
        x, values, scales, y, parts, _counters(x.device), inputs, rows, COLUMNS=x.shape[1], CHUNKS=chunks,
        GROUPS=scales.shape[3], INTERPRETED=x.device.type == "cpu", SPLITS=splits, INPUTS=together, ROWS=at_once,
        num_warps=4, num_stages=stages,
    )  # fmt: skip
