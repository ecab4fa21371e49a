"""Embedding whose backward touches only the rows of the ids that occur.

The gradient of a row is the sum over all positions of its id. Positions are sorted by id, in a stable way, so that
those of one id form a run, in the order of the text: whoever sums a run is the only one who writes its row, without
atomics, and every sum has one order. Text has ids that are every twentieth token, so the sorted positions are cut into
pieces, and no program sums more than what lies of a run in one piece. A run within a piece is written at once. Of one
that crosses a border each piece leaves a part, in float32, and a second pass adds the parts, from left to right.

Which programs have something to do is seen in the ids themselves, so the host never waits for the device.

A table with a `main_grad` (see `zero2all.train.weights`) has its gradient added there, row by row, in float32; one
without gets an ordinary gradient, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.autocast import without_autocast
from zero2all.ops.kernels.launch import rows_of

PIECE = 64
"""Sorted positions in a piece; a power of two."""
ROWS = 4
"""Rows that a program has on their way from memory at once."""
LARGEST_BLOCK = 2048
"""Columns of one program."""


@triton.jit
def _write_row(target, token, columns, inside, total, width, ADD: tl.constexpr):
    row = target + token.to(tl.int64) * width + columns
    if ADD:
        total += tl.load(row, mask=inside, other=0.0).to(tl.float32)
    tl.store(row, total.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _sum_within_pieces(
    gradient, ids, order, target, parts, count, width, table_rows,
    ADD: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per sorted position; it works where a run, or what lies of it in a piece, begins."""
    place = tl.program_id(0)
    token = tl.load(ids + place)
    comes_from_the_left = (place > 0) & (tl.load(ids + place - 1, mask=place > 0, other=-1) == token)
    if comes_from_the_left & (place % PIECE != 0):
        return
    if (token < 0) | (token >= table_rows):
        return
    piece = place // PIECE
    border = (piece + 1) * PIECE
    ahead = place + tl.arange(0, PIECE)
    is_here = ahead < tl.minimum(border, count)
    length = tl.sum((tl.load(ids + ahead, mask=is_here, other=-1) == token).to(tl.int32), axis=0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(place, place + length, ROWS):
        at = first + tl.arange(0, ROWS)
        mine = at < place + length
        row = tl.load(order + at, mask=mine, other=0).to(tl.int64)
        values = gradient + row[:, None] * width + columns[None, :]
        total += tl.sum(tl.load(values, mask=mine[:, None] & inside[None, :], other=0.0).to(tl.float32), axis=0)
    goes_on = tl.load(ids + border, mask=border < count, other=-1) == token
    if comes_from_the_left | goes_on:
        # Of each piece: what comes from the left, then what begins here and goes on.
        part = 2 * piece.to(tl.int64) + tl.where(comes_from_the_left, 0, 1)
        tl.store(parts + part * width + columns, total, mask=inside)
    else:
        _write_row(target, token, columns, inside, total, width, ADD)


@triton.jit
def _add_over_borders(
    ids, target, parts, count, width, table_rows,
    ADD: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per border between two pieces; it works where it is the first border that a run crosses."""
    piece = tl.program_id(0)
    start, border = piece * PIECE, (piece + 1) * PIECE
    token = tl.load(ids + border)
    if tl.load(ids + border - 1) != token:
        return
    if (token < 0) | (token >= table_rows):
        return
    if tl.load(ids + start - 1, mask=start > 0, other=-1) == token:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.load(parts + (2 * piece.to(tl.int64) + 1) * width + columns, mask=inside, other=0.0)
    at = piece + 1 + tl.arange(0, ROWS)
    mine = tl.load(ids + at * PIECE, mask=at * PIECE < count, other=-1) == token
    while tl.max(mine.to(tl.int32), axis=0) > 0:
        values = parts + 2 * at.to(tl.int64)[:, None] * width + columns[None, :]
        total += tl.sum(tl.load(values, mask=mine[:, None] & inside[None, :], other=0.0), axis=0)
        at += ROWS
        mine = tl.load(ids + at * PIECE, mask=at * PIECE < count, other=-1) == token
    _write_row(target, token, columns, inside, total, width, ADD)


def _sum_by_id(gradient: Tensor, tokens: Tensor, target: Tensor, add: bool) -> None:
    """Write, or add, to the rows of `target` the sums of the rows of `gradient` by their ids; ids outside it count
    for nothing."""
    assert target.is_contiguous()
    count, width = gradient.shape
    # Half the digits take half the passes of the sort.
    ids, order = torch.sort(tokens.reshape(-1).to(torch.int32), stable=True)
    pieces = triton.cdiv(count, PIECE)
    parts = torch.empty(2 * pieces, width, dtype=torch.float32, device=gradient.device)
    block = min(triton.next_power_of_2(width), LARGEST_BLOCK)
    blocks, warps = triton.cdiv(width, block), max(1, min(8, block // 256))
    how = {"ADD": add, "PIECE": PIECE, "ROWS": ROWS, "BLOCK": block, "num_warps": warps}
    if count:
        _sum_within_pieces[(count, blocks)](gradient, ids, order, target, parts, count, width, len(target), **how)
    if pieces > 1:
        _add_over_borders[(pieces - 1, blocks)](ids, target, parts, count, width, len(target), **how)


class Embedding(torch.autograd.Function):
    """(ids, table) -> rows."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight  # itself: a saved tensor may come back as another one, without `main_grad`
        return F.embedding(tokens, weight)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None:
            _sum_by_id(rows_of(gradient), tokens, main, add=True)
            return None, None
        dweight = torch.zeros(ctx.weight.shape, dtype=ctx.weight.dtype, device=gradient.device)
        _sum_by_id(rows_of(gradient), tokens, dweight, add=False)
        return None, dweight


def triton_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """The registry's entry."""
    rows: Tensor = Embedding.apply(tokens, weight)
    return rows
