"""Embedding whose backward writes only the rows of the ids that occur.

The gradient of a row is the sum over all positions of its id. A stable sort by id makes the positions of one id a run,
in the order of the text: one program sums a run and writes its row, so no atomics are needed and the order of every sum
is fixed. In text some ids are every twentieth token, so the sorted positions are cut into pieces, and a program sums at
most the part of a run in one piece. A run within a piece is written at once. Of a run that crosses pieces each piece
writes a partial sum in float32, and a second pass adds these from left to right.

The programs see in the ids whether they have work, so the host never waits for the device.

The gradient of a table with a sink (`zero2all.ops.gradient_sink`) is added to it, row by row, in float32; a
table without one gets an ordinary gradient, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.gradient_sink import sink_of
from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.precision import without_autocast

PIECE = 64
"""Sorted positions in a piece; a power of two."""
ROWS = 4
"""Rows that a program loads at once."""
LARGEST_BLOCK = 2048
"""Most columns of one program."""


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
    """A program per sorted position; it works only where a run, or its part in a piece, begins."""
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
        # Two partial sums per piece: of the run that enters it, and of the run that leaves it.
        part = 2 * piece.to(tl.int64) + tl.where(comes_from_the_left, 0, 1)
        tl.store(parts + part * width + columns, total, mask=inside)
    else:
        _write_row(target, token, columns, inside, total, width, ADD)


@triton.jit
def _add_over_borders(
    ids, target, parts, count, width, table_rows,
    ADD: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per border between two pieces; it works only where a run crosses its first border."""
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
    """Sum the rows of `gradient` by id, and write the sums to the rows of `target`, or add them; ids outside of it are
    ignored."""
    assert target.is_contiguous()
    count, width = gradient.shape
    # With int32, the sort takes half as many passes.
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
        ctx.weight = weight  # not as a saved tensor, which may come back without its sink
        return F.embedding(tokens, weight)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        sink = sink_of(ctx.weight)
        if sink is not None:
            _sum_by_id(rows_of(gradient), tokens, sink.buffer, add=True)
            sink.mark_ready()
            return None, None
        dweight = torch.zeros(ctx.weight.shape, dtype=ctx.weight.dtype, device=gradient.device)
        _sum_by_id(rows_of(gradient), tokens, dweight, add=False)
        return None, dweight


def triton_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """See `zero2all.ops.embedding`."""
    rows: Tensor = Embedding.apply(tokens, weight)
    return rows
