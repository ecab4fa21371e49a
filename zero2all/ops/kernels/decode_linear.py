"""Matrix products with few rows of input, as decoding has them: reading the weights is all the time they take.

y = W x, and around it what would otherwise be a kernel of its own: RMSNorm of x in front, SwiGLU or the sum with the
residual behind. RMSNorm divides a row by one number, so the product is taken of x * gain and divided at the end, and x
is read once. Weights are bfloat16 or float32, or int8 with a scale per row, which is multiplied in at the end as well.
Sums are float32.

One row of input: each program takes some rows of W and multiplies them in registers. It asks for the first weights
before the kernel ahead of it is over (`wait_for_earlier_kernels`). More rows: tiles for the tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import overlapped, wait_for_earlier_kernels

LEAST_DOT = 16
"""The smallest side of a tile that the tensor cores take."""
MOST_INPUTS = 64
"""Rows of input that one program takes. More are several programs, which read the same weights."""


@dataclass(frozen=True)
class Tiles:
    """The part of W that a program holds at a time, and how many threads do."""

    rows: int
    columns: int
    warps: int
    stages: int = 1
    """Tiles on their way from memory; only of products with more than one row of input."""


@triton.jit
def _swiglu(pairs):
    """(N, 2) gates and ups -> (N,)."""
    gate, up = tl.split(pairs)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _one_row(
    x, gain, weight, scales, y, rows, eps,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    column = tl.arange(0, BLOCK)
    at = weight + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    ahead = tl.load(
        at, mask=is_row[:, None] & (column < COLUMNS)[None, :], other=0, eviction_policy="evict_first"
    )  # read once a step: other things should stay in the cache
    if SCALED:
        scale = tl.load(scales + row, mask=is_row, other=0.0)
    wait_for_earlier_kernels(OVERLAP)
    if ADD:
        residual = tl.load(y + row, mask=is_row, other=0.0).to(tl.float32)
    products = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in tl.static_range(0, COLUMNS, BLOCK):
        tile = ahead
        if first + BLOCK < COLUMNS:
            is_next = column < COLUMNS - first - BLOCK
            ahead = tl.load(
                at + first + BLOCK, mask=is_row[:, None] & is_next[None, :], other=0, eviction_policy="evict_first"
            )
        inside = column < COLUMNS - first
        value = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(gain + first + column, mask=inside, other=0.0).to(tl.float32)
        products += tile.to(tl.float32) * value[None, :]
    product = tl.sum(products, axis=1)
    if NORM:
        product *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / COLUMNS + eps)
    if SCALED:
        product *= scale
    if ADD:
        product += residual
    if SWIGLU:
        product = _swiglu(tl.reshape(product, (ROWS // 2, 2)))
        row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        is_row = row < rows // 2
    tl.store(y + row, product.to(y.dtype.element_ty), mask=is_row)


@triton.jit
def _few_rows(
    x, gain, weight, scales, y, inputs, rows, eps,
    COLUMNS: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, SWIGLU: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_earlier_kernels(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    number = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    is_input = number < inputs
    column = tl.arange(0, BLOCK)
    weights_at = weight + row.to(tl.int64)[None, :] * COLUMNS + column[:, None]
    inputs_at = x + number[:, None] * COLUMNS + column[None, :]
    products = tl.zeros((INPUTS, ROWS), dtype=tl.float32)
    squares = tl.zeros((INPUTS,), dtype=tl.float32)
    for first in range(0, COLUMNS, BLOCK):
        inside = column < COLUMNS - first
        tile = tl.load(weights_at + first, mask=inside[:, None] & is_row[None, :], other=0)
        value = tl.load(inputs_at + first, mask=is_input[:, None] & inside[None, :], other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            scaled = wide * tl.load(gain + first + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            value = scaled.to(gain.dtype.element_ty)
        products = tl.dot(value, tile.to(value.dtype), products, input_precision="ieee")
    if NORM:
        products *= (1.0 / tl.sqrt(squares / COLUMNS + eps))[:, None]
    if SCALED:
        products *= tl.load(scales + row, mask=is_row, other=0.0)[None, :]
    width = rows
    if SWIGLU:
        products = _swiglu(tl.reshape(products, (INPUTS, ROWS // 2, 2)))
        width = rows // 2
        row = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        is_row = row < width
    at = number.to(tl.int64)[:, None] * width + row[None, :]
    inside = is_input[:, None] & is_row[None, :]
    if ADD:
        products += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, products.to(y.dtype.element_ty), mask=inside)


def tiles_for(inputs: int, rows: int, columns: int, weight_bytes: int, input_bytes: int) -> Tiles:
    """Starting values for an H200 (132 processors): about 30 KB of weights on their way to each of them, and several
    programs for each, so that all end at about the same time."""
    if inputs == 1:
        few = rows < 4096
        return Tiles(rows=4 if few else 8, columns=min(1024, triton.next_power_of_2(columns)), warps=4)
    block = 128 if inputs <= LEAST_DOT or weight_bytes == 1 else 64
    if inputs <= LEAST_DOT and weight_bytes == 1 and input_bytes == 2:
        block = 256  # as many bytes on their way as with wider weights; float32 would need too many registers
    block = min(block, max(LEAST_DOT, triton.next_power_of_2(columns)))
    return Tiles(rows=16 if rows < 8192 else 32, columns=block, warps=4, stages=4 if inputs <= 32 else 3)


def decode_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    y: Tensor,
    gain: Tensor | None = None,
    eps: float = 0.0,
    swiglu: bool = False,
    add: bool = False,
    tiles: Tiles | None = None,
) -> None:
    """y (N, rows) = W f(x) for x (N, columns): f is RMSNorm with `gain` where it is given. `scales` (rows,) belong to
    int8 weights. `swiglu`: rows 2 i and 2 i + 1 of W are a gate and its up, and y has half as many columns. `add`: the
    product is added to y (not together with `swiglu`). All tensors are contiguous."""
    inputs, (rows, columns) = len(x), weight.shape
    tiles = tiles or tiles_for(inputs, rows, columns, weight.itemsize, x.itemsize)
    flags = {"COLUMNS": columns, "NORM": gain is not None, "SCALED": scales is not None, "SWIGLU": swiglu, "ADD": add}
    size = {"ROWS": tiles.rows, "BLOCK": tiles.columns, "num_warps": tiles.warps, **overlapped(x.device)}
    gain = x if gain is None else gain
    scales = x if scales is None else scales
    programs = triton.cdiv(rows, tiles.rows)
    if inputs == 1:
        _one_row[(programs,)](x, gain, weight, scales, y, rows, eps, **flags, **size)
        return
    together = min(MOST_INPUTS, max(LEAST_DOT, triton.next_power_of_2(inputs)))
    _few_rows[(programs, triton.cdiv(inputs, together))](
        x, gain, weight, scales, y, inputs, rows, eps, **flags, **size, INPUTS=together, num_stages=tiles.stages
    )
