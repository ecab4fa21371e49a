"""The head and the loss where each of several processes has some rows of the head, that is the logits of some ids.

All processes have the same hidden states and targets. Of a chunk of tokens each computes its own logits, their largest
and the sum of their exponentials. One exchange of the largest and one of two sums (exponentials, and the logit of the
target, which only one process has) give every process the loss of every token, and the gradient of its own logits. No
process ever has the logits of another. The gradient of the hidden states is then a part of a sum over the processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zero2all.ops.linear_cross_entropy import LinearCrossEntropyOp, fill_by_chunks, loss_by_chunks, of_several
from zero2all.ops.precision import widened


class Exchange(NamedTuple):
    """How the processes that share a head exchange numbers."""

    rank: int  # this one has the rows from rank * (rows of one) on
    largest: Callable[[Tensor], Tensor]  # the largest over the processes, in place
    sum: Callable[[Tensor], Tensor]  # the sum over the processes, in place


def cut_linear_cross_entropy(kind: str, exchange: Exchange) -> LinearCrossEntropyOp:
    """`zero2all.ops.linear_cross_entropy` by this kind (triton or chunked), with the rows of one process as head."""
    assert kind in ("triton", "chunked"), f"{kind} needs the whole head"
    kernel = of_several(CutKernel(exchange, kind == "triton"), lambda columns: exchange.rank * columns, exchange.sum)
    return partial(loss_by_chunks, fill_by_chunks(kernel))


class RowSums(NamedTuple):
    """Of each row of logits (N,): the largest, the sum of exp(logit - largest), and the logit of the target, 0 where it
    is not among these columns."""

    largest: Tensor
    exponentials: Tensor
    at_target: Tensor


@dataclass(frozen=True)
class CutKernel:
    """Losses and gradient of one chunk, with our kernels or by the formulas."""

    exchange: Exchange
    by_triton: bool

    def __call__(
        self, logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As `zero2all.ops.linear_cross_entropy.torch_kernel`, of the logits (N, rows of one process)."""
        first = self.exchange.rank * logits.shape[1]
        columns = min(max(vocab_size - first, 0), logits.shape[1])  # the others are padding
        sums: Callable[..., tuple[Tensor, Tensor, Tensor]] = _sums
        slopes: Callable[..., None] = _slopes
        if self.by_triton:
            from zero2all.ops.kernels.cross_entropy import row_sums as sums
            from zero2all.ops.kernels.cross_entropy import slopes_in_place as slopes
        own = RowSums(*sums(logits, targets, first, columns))
        largest = self.exchange.largest(own.largest.clone())
        exponentials = own.exponentials * (own.largest - largest).exp()
        total, at_target = self.exchange.sum(torch.stack((exponentials, own.at_target)))
        logsum = largest + total.log()
        counted = targets >= 0
        losses = torch.where(counted, logsum - at_target, 0.0)
        penalties = torch.where(counted, z * logsum.square(), 0.0) if z else None
        if gradient:
            here = torch.where(counted, weights, 0.0).to(logsum.dtype)
            slopes(logits, targets, here, logsum, first, columns, z)
        return losses, penalties


def _sums(logits: Tensor, targets: Tensor, first: int, columns: int) -> RowSums:
    wide = widened(logits[:, :columns])
    nothing = wide.new_zeros(len(wide))
    if columns == 0:
        return RowSums(torch.full_like(nothing, -torch.inf), nothing, nothing)
    largest = wide.amax(dim=1)
    column, is_here = _column(targets, first, columns)
    at_target = torch.where(is_here, wide.gather(1, column).squeeze(1), 0.0)
    return RowSums(largest, (wide - largest.unsqueeze(1)).exp_().sum(dim=1), at_target)


def _slopes(
    logits: Tensor, targets: Tensor, weights: Tensor, logsum: Tensor, first: int, columns: int, z: float
) -> None:
    """Overwrite the logits with their gradient."""
    logits[:, columns:].zero_()
    if columns:
        slopes = (widened(logits[:, :columns]) - logsum.unsqueeze(1)).exp_()
        slopes.mul_((weights * (1.0 + 2.0 * z * logsum)).unsqueeze(1))
        column, is_here = _column(targets, first, columns)
        slopes.scatter_add_(1, column, -torch.where(is_here, weights, 0.0).unsqueeze(1))
        logits[:, :columns] = slopes


def _column(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """The column of each target (N, 1), any where it is not here; and whether it is here (N,)."""
    column = targets - first
    return column.clamp(0, columns - 1).unsqueeze(1), (column >= 0) & (column < columns)
