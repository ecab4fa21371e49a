"""What Muon does with a matrix before and after its products: momentum and rows of equal length, and the step.

Before: gradient and momentum are read, the momentum is written, and so is what is to be orthogonalised, in the
precision of the products and in its place of the stack, without a copy in float32. A row is read twice, the second time
from the cache: first its length is found, then it is divided. After: o and the weight are read, the weight is written.
The rows of `turns` matrices may alternate in a tensor; those of each lie together in the stack.

Blocks have fixed sizes, and kernels are not compiled for a number of rows or matrices: one compilation serves all
matrices whose columns are a multiple of 16 (`_step`: one for tall, wide and square ones each), one more all others. The
factor on the gradient and the word to skip come from the device; a skipped step changes neither momentum nor weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TILE = 1024, 64
"""Columns of a row that are read at once, and rows and columns of the tiles of a step."""


@triton.jit
def _ahead(gradients, momenta, scale, at, inside, mu, rest, NESTEROV: tl.constexpr):
    """The new momentum, and what to orthogonalise: the gradient itself where there is no momentum."""
    g = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        g *= tl.load(scale).to(tl.float32)
    m = g
    u = g
    if momenta is not None:
        m = mu * tl.load(momenta + at, mask=inside, other=0.0) + rest * g
        u = rest * g + mu * m if NESTEROV else m
    return m, u


@triton.jit(do_not_specialize=["scale", "skip", "rows", "turns"])
def _momentum(
    gradients, momenta, stack, scale, skip, rows, turns, columns, mu, rest, shortest, unit,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has one row of the tensor, in which the rows of `turns` matrices of `rows` rows alternate."""
    row = tl.program_id(0).to(tl.int64)
    outer = row // (rows * turns)
    inner = row % (rows * turns)
    first = row * columns
    target = ((outer * turns + inner % turns) * rows + inner // turns) * columns
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        m, u = _ahead(gradients, momenta, scale, first + at, at < columns, mu, rest, NESTEROV)
        squares += u * u
    length = unit * tl.maximum(tl.sqrt(tl.sum(squares, axis=0)), shortest)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        m, u = _ahead(gradients, momenta, scale, first + at, inside, mu, rest, NESTEROV)
        tl.store(stack + target + at, (u / length).to(stack.dtype.element_ty), mask=inside)
        if momenta is not None:
            if skip is not None:
                inside = inside & (tl.load(skip) == 0)
            tl.store(momenta + first + at, m, mask=inside)


@triton.jit(do_not_specialize=["skip", "rows", "turns"])
def _step(
    weights, o, factors, skip, rows, turns, columns, stride_matrix, stride_row, stride_column, lr, decay,
    BY_ROW: tl.constexpr, CAUTIOUS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A program has a tile of one matrix; o may be stored by columns, as that of a tall matrix is."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    of_row = (matrix // turns * rows + row) * turns + matrix % turns
    at = weights + of_row[:, None] * columns + column[None, :]
    from_o = o + matrix * stride_matrix + row[:, None].to(tl.int64) * stride_row
    step = tl.load(from_o + column[None, :].to(tl.int64) * stride_column, mask=inside, other=0.0).to(tl.float32)
    if factors is not None:
        if BY_ROW:
            step *= tl.load(factors + matrix * rows + row, mask=row < rows, other=0.0)[:, None]
        else:
            step *= tl.load(factors + matrix * columns + column, mask=column < columns, other=0.0)[None, :]
    w = tl.load(at, mask=inside, other=0.0)
    lost = decay * w
    if CAUTIOUS:
        lost = tl.where(step * w >= 0, lost, 0.0)
    if skip is not None:
        inside = inside & (tl.load(skip) == 0)
    tl.store(at, w - lr * (step + lost), mask=inside)


def rows_of_equal_length(
    gradients: Sequence[Tensor], momenta: Sequence[Tensor] | None, turns: Sequence[int], dtype: torch.dtype,
    mu: float, nesterov: bool, scale: Tensor | None, skip: Tensor | None, shortest: float, safety: float,
) -> Tensor:  # fmt: skip
    """The stack (n, rows, columns) of all matrices in tensors (..., rows x turns, columns): gradients, after an update
    of the float32 `momenta` where these are given. Each row is divided by its length (or `shortest`) and
    `safety` sqrt(rows)."""
    rows, columns = gradients[0].shape[-2] // turns[0], gradients[0].shape[-1]
    counts = [gradient.numel() // (rows * columns) for gradient in gradients]
    stack = torch.empty(sum(counts), rows, columns, dtype=dtype, device=gradients[0].device)
    for place, (gradient, turn, target) in enumerate(zip(gradients, turns, stack.split(counts), strict=True)):
        momentum = None if momenta is None else momenta[place]
        assert momentum is None or momentum.is_contiguous(), "rows lie one after the other"
        _momentum[(len(target) * rows,)](
            gradient.contiguous(), momentum, target, scale, skip, rows, turn, columns, mu, 1 - mu, shortest,
            safety * rows**0.5, NESTEROV=nesterov, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return stack


def subtract_step(
    weight: Tensor, o: Tensor, factors: Tensor | None, turns: int,
    lr: float, decay: float, cautious: bool, skip: Tensor | None,
) -> None:  # fmt: skip
    """Subtract lr (o + decay weight) from a float32 weight (..., rows x turns, columns) of which `o` has the matrices,
    (n, rows, columns) in any strides. `factors` (n, lines): of the rows of o, or of its columns where these are more.
    Cautious: no decay where it is against the step."""
    n, rows, columns = o.shape
    assert weight.is_contiguous(), "rows lie one after the other"
    _step[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), n)](
        weight, o, factors, skip, rows, turns, columns, *o.stride(), lr, decay,
        BY_ROW=rows >= columns, CAUTIOUS=cautious, TILE=TILE, num_warps=4,
    )  # fmt: skip
