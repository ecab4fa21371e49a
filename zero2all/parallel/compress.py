"""PowerSGD (arXiv 1905.13727): the gradient of a matrix is summed over the processes as two thin matrices of rank r.

    M     = gradient + error             (n, m) in each process; error: what it has not sent yet
    P     = orthonormal columns of the sum of M Q              (n, r)
    Q     = the sum of M^T P, kept for the next step           (m, r)
    gradient = P Q^T                     error = M - P (M^T P)^T, of the own M

Q of the step before is a good first guess, so one such iteration finds the largest directions of slowly changing
gradients. Every other value is only late: the errors are sent in later steps. Only matrices are compressed, and only
where P and Q have less than half of their values; everything else is summed as it is, together with P.

It takes 6 n m r FLOPs for a matrix, and memory for the errors, as large as the gradients in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from zero2all.estimate.slow_link import is_low_rank
from zero2all.parallel.buckets import FlatPlan
from zero2all.parallel.mesh import Axis
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import Box, Part

GROUP = "powersgd"
"""Of its tensors in a checkpoint."""


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is sent as P and Q."""

    name: str
    place: slice  # in the flat buffers
    factor: Tensor  # Q (m, r)
    error: Tensor  # (n, m)


@dataclass(frozen=True)
class LowRankSum:
    """A bucket on its way."""

    number: int
    values: Tensor  # the bucket's buffer
    matrices: list[Tensor]  # M of each
    sent: Tensor
    """The P of all matrices and the values that are sent as they are, one after the other: to be summed first."""


class PowerSgd:
    """Factors and errors of all matrices of a process."""

    def __init__(self, table: Sequence[LogicalParameter], plan: FlatPlan, axis: Axis, rank: int, like: Tensor) -> None:
        """`axis`: the processes over which gradients are summed. `like`: the gradients."""
        self._plan, self._axis, self._rank = plan, axis, rank
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._low: dict[int, list[_Matrix]] = {number: [] for number in range(len(plan.buckets))}
        self._plain: dict[int, list[slice]] = {number: [] for number in self._low}
        bucket_of = {name: number for number, bucket in enumerate(plan.buckets) for name in bucket.holders}
        for one in table:
            number, first = bucket_of[one.holder], plan.places[one.holder].start + one.start
            place = slice(first, first + one.numel)
            if not is_low_rank(one.shape, rank):
                self._plain[number].append(place)
                continue
            factor = torch.empty(one.shape[1], rank, dtype=self._dtype, device=like.device)
            error = torch.empty(one.shape, dtype=self._dtype, device=like.device)
            self._low[number].append(_Matrix(one.name, place, factor, error))
        self.is_rerun = False
        """Whether the same step follows: nothing is kept of this one."""
        self.reset()

    @property
    def _matrices(self) -> list[_Matrix]:
        return [one for matrices in self._low.values() for one in matrices]

    def reset(self) -> None:
        """Begin anew: no errors, and factors that depend on the names alone."""
        for one in self._matrices:
            seed = int.from_bytes(hashlib.blake2b(one.name.encode(), digest_size=8).digest(), "little")
            one.factor.copy_(torch.randn(one.factor.shape, generator=torch.Generator().manual_seed(seed)))
            one.error.zero_()

    def forget_errors(self, refused: Tensor) -> None:
        """After a step, with a bool on the device: of a gradient that was refused nothing may be sent later."""
        for one in self._matrices:
            one.error.masked_fill_(refused, 0.0)

    def tensors(self) -> dict[str, Part]:
        """For the checkpoint; live. Factors are the same in all processes, errors are not."""
        found, (rank, ranks) = {}, (self._axis.rank, self._axis.size)
        for one in self._matrices:
            box = Box((rank, 0, 0), (1, *one.error.shape))
            found[f"{GROUP}/q/{one.name}"] = Part.whole(one.factor)
            found[f"{GROUP}/error/{one.name}"] = Part(one.error.unsqueeze(0), (ranks, *one.error.shape), box)
        return found

    @torch.no_grad()
    def begin(self, number: int, values: Tensor) -> LowRankSum:
        """What is to be summed first of a bucket whose gradients are `values`."""
        start, low = self._plan.buckets[number].span.start, self._low[number]
        factors = _orthonormal([one.factor for one in low])
        matrices, parts = [], []
        for one, factor in zip(low, factors, strict=True):
            gradient = _at(values, one.place, start).view(one.error.shape)
            matrices.append(one.error + gradient if self.is_rerun else one.error.add_(gradient))
            parts.append((matrices[-1] @ factor).view(-1))
        parts += [_at(values, place, start).to(self._dtype) for place in self._plain[number]]
        return LowRankSum(number, values, matrices, torch.cat(parts))

    @torch.no_grad()
    def finish(self, begun: LowRankSum) -> None:
        """After `sent` was summed: sum Q, and write the sums of the gradients into the bucket."""
        start, low = self._plan.buckets[begun.number].span.start, self._low[begun.number]
        sizes = [self._rank * len(one.error) for one in low]
        *projected, rest = begun.sent.split([*sizes, len(begun.sent) - sum(sizes)])
        for place in self._plain[begun.number]:
            length = place.stop - place.start
            _at(begun.values, place, start).copy_(rest[:length])
            rest = rest[length:]
        if not low:
            return
        columns = _orthonormal([each.view(-1, self._rank) for each in projected])
        own = [matrix.T @ each for matrix, each in zip(begun.matrices, columns, strict=True)]
        summed = self._axis.sum(torch.cat([each.view(-1) for each in own]))
        # What is not finite has no orthonormal columns, but must be seen in the gradient.
        not_finite = 0.0 * (begun.sent.sum() + summed.sum())
        for one, matrix, each, mine, flat in zip(
            low, begun.matrices, columns, own, summed.split([each.numel() for each in own]), strict=True
        ):
            factor = flat.view(mine.shape)
            gradient = (each @ factor.T).add_(not_finite)
            _at(begun.values, one.place, start).copy_(gradient.view(-1))
            if not self.is_rerun:
                matrix.addmm_(each, mine.T, alpha=-1.0)
                # A direction that no gradient had stays as it was, or it would be lost for ever.
                square = factor.square().sum(dim=0)
                one.factor.copy_(torch.where((square > 0) & (square < torch.inf), factor, one.factor))


def _at(values: Tensor, place: slice, start: int) -> Tensor:
    """A range of the flat buffers in that of a bucket which begins at `start`."""
    return values[place.start - start : place.stop - start]


def _orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The columns of matrices (n, r) made orthonormal by Gram-Schmidt, all matrices at once; each column is projected
    twice, because rounding leaves something of a small one after the first time. A column that is nearly a combination
    of those before it becomes zero."""
    if not matrices:
        return []
    found = pad_sequence(list(matrices), batch_first=True)  # (k, n, r): rows of zeros change nothing
    negligible = 16 * torch.finfo(found.dtype).eps
    for at in range(found.shape[2]):
        before, column = found[:, :, :at], found[:, :, at : at + 1]
        length = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        for _ in range(2):
            column = column - before @ (before.mT @ column)
        left = torch.linalg.vector_norm(column, dim=1, keepdim=True)
        found[:, :, at : at + 1] = torch.where(left > negligible * length, column / left, 0.0)
    return [each[: len(matrix)] for each, matrix in zip(found, matrices, strict=True)]
