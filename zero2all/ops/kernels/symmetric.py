"""Half of a symmetric product: X X^T, and the polynomial b A + c A A + a I of a symmetric A, for Muon.

Of the tiles of the result only those on and below the diagonal are computed; each is written twice, as it is and
mirrored. That saves almost half of the operations. The products are summed in float32, and the sum of the polynomial is
made before it is rounded. With the identity in it, x <- (a I + b A + c A A) x is one more product, which reads x once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, DEPTH, WARPS, STAGES = 128, 64, 8, 3
"""Rows and columns of a tile, and columns of X that are read at once; two programs fit on a Hopper processor."""


@triton.jit
def _times_transposed(
    x, added, result, rows, columns,
    stride_matrix, stride_row, stride_column, factor, added_factor, diagonal,
    ADDS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A program computes one tile of one matrix. Of the lower triangle of `tiles` x `tiles`, read row by row, it is
    number program_id(0), so its row i is the largest with i (i + 1) / 2 <= number."""
    number = tl.program_id(0)
    i = ((tl.sqrt(8.0 * number.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > number, i - 1, i)  # the root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= number, i + 1, i)
    j = number - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    at_i = i * TILE + tl.arange(0, TILE)
    at_j = j * TILE + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    first = x + matrix * stride_matrix
    left = first + at_i[:, None].to(tl.int64) * stride_row + depth[None, :] * stride_column
    right = first + at_j[None, :].to(tl.int64) * stride_row + depth[:, None] * stride_column
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, columns, DEPTH):
        inside = depth < columns - start
        a = tl.load(left, mask=(at_i[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(right, mask=(at_j[None, :] < rows) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += DEPTH * stride_column
        right += DEPTH * stride_column
    total *= factor
    is_inside = (at_i[:, None] < rows) & (at_j[None, :] < rows)
    here = matrix * rows * rows + at_i[:, None].to(tl.int64) * rows + at_j[None, :]
    if ADDS:
        total += added_factor * tl.load(added + here, mask=is_inside, other=0.0).to(tl.float32)
        total += tl.where(at_i[:, None] == at_j[None, :], diagonal, 0.0)
    values = total.to(result.dtype.element_ty)
    tl.store(result + here, values, mask=is_inside)
    if i != j:
        mirrored = matrix * rows * rows + at_j[:, None].to(tl.int64) * rows + at_i[None, :]
        tl.store(result + mirrored, tl.trans(values), mask=(at_j[:, None] < rows) & (at_i[None, :] < rows))


def times_transposed(
    x: Tensor, factor: float = 1.0, added: Tensor | None = None, added_factor: float = 0.0, diagonal: float = 0.0
) -> Tensor:
    """factor x x^T for each of (n, rows, columns), in any strides; with `added`, symmetric and contiguous, also
    + added_factor added + diagonal I."""
    n, rows, columns = x.shape
    result = torch.empty(n, rows, rows, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(rows, TILE)
    _times_transposed[(tiles * (tiles + 1) // 2, n)](
        x, x if added is None else added, result, rows, columns,
        *x.stride(), factor, added_factor, diagonal,
        ADDS=added is not None, TILE=TILE, DEPTH=DEPTH, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return result
