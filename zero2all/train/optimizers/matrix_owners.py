"""One owner for each matrix of which several processes hold rows: the rows go to the owner, its result comes back.

Owners have about the same work in all, and no process does what another one does. Matrices are exchanged in rounds, so
that little memory is needed at a time; one way is one all-to-all, in which each process sends to every owner what it
holds of the owner's matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.parallel.layout import LogicalParameter
from zero2all.train.optimizers.base import ParamState

Stack = list[ParamState]
"""Matrices of equal shape, which are orthogonalised together."""


class MatrixOwners:
    """The owners of matrices that are cut over one group, and the exchange with them. All processes of the group make
    one, with the same matrices in the same order, and call each method together."""

    def __init__(self, params: Sequence[ParamState]) -> None:
        self._group = params[0].part.group
        assert all(param.part.group is self._group for param in params), "all matrices are cut over the same group"
        self._rank, self._ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        names = [param.parameter.name for param in params]
        owners = balanced_owners([orthogonalising_cost(param.parameter) for param in params], self._ranks)
        self._owners = dict(zip(names, owners, strict=True))
        own = torch.tensor([param.weight.numel() for param in params], device=params[0].weight.device)
        counts = own.new_zeros(len(params), self._ranks)
        counts[:, self._rank] = own
        dist.all_reduce(counts, group=self._group)
        per_matrix: list[list[int]] = counts.tolist()
        self._counts = dict(zip(names, per_matrix, strict=True))  # values of a matrix in each process
        for param in params:
            counted = self._counts[param.parameter.name]
            assert sum(counted) == param.parameter.numel, f"{param.parameter.name} is not held once by the group"
            assert not param.weight.numel() or param.part.start == sum(counted[: self._rank]), (
                f"{param.parameter.name}: its parts are not in the order of ranks"
            )

    def rounds(
        self, params: Iterable[ParamState], stacks_of: Callable[[Stack], Iterable[Stack]]
    ) -> Iterator[list[Stack]]:
        """The matrices in rounds of a stack for each owner, an empty one where an owner has no more. Costly stacks come
        first, so that the owners of a round have about as much to do."""
        owned: list[Stack] = [[] for _ in range(self._ranks)]
        for param in params:
            owned[self._owners[param.parameter.name]].append(param)
        stacks = [sorted(stacks_of(own), key=_cost_of_stack, reverse=True) for own in owned]
        for one_each in zip_longest(*stacks, fillvalue=[]):
            yield list(one_each)

    def compute(
        self, stacks: list[Stack], parts: list[list[Tensor]], work: Callable[[Tensor, LogicalParameter], Tensor]
    ) -> list[list[Tensor]]:
        """Have each owner apply `work` to its stack of a round, (matrices, *shape) -> the same shape. `parts` has what
        this process holds of each matrix of each stack; the answer has the same places of the results."""
        own = stacks[self._rank]
        sent = [sum(part.numel() for part in stack) for stack in parts]
        received = [sum(self._counts[param.parameter.name][rank] for param in own) for rank in range(self._ranks)]
        pieces = self._exchange([part for stack in parts for part in stack], sent, received)
        results = self._cut(work(self._joined(pieces, own), own[0].parameter), own) if own else [pieces]
        returned = self._exchange(results, received, sent)
        flat = iter(returned.split([part.numel() for stack in parts for part in stack]))
        return [[next(flat).view(part.shape) for part in stack] for stack in parts]

    def _joined(self, pieces: Tensor, own: Stack) -> Tensor:
        """Whole matrices from what each process sent of all of them, one process after the other."""
        counts = [self._counts[param.parameter.name] for param in own]
        by_rank = pieces.split([count for of_rank in zip(*counts, strict=True) for count in of_rank])
        matrices = [torch.cat(by_rank[index :: len(own)]) for index in range(len(own))]
        return torch.stack(matrices).view(len(own), *own[0].parameter.shape)

    def _cut(self, matrices: Tensor, own: Stack) -> list[Tensor]:
        """The reverse of `_joined`: what goes to each process, one process after the other."""
        cut = [
            matrix.reshape(-1).split(self._counts[param.parameter.name])
            for matrix, param in zip(matrices, own, strict=True)
        ]
        return [piece for of_rank in zip(*cut, strict=True) for piece in of_rank]

    def _exchange(self, tensors: list[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Send `sent` values to each process, one after the other; the values received, likewise."""
        values = torch.cat([tensor.reshape(-1) for tensor in tensors])
        answer = values.new_empty(sum(received))
        dist.all_to_all_single(answer, values, received, sent, group=self._group)
        return answer


def orthogonalising_cost(parameter: LogicalParameter) -> int:
    """Operations of one iteration of Newton-Schulz on all matrices of a parameter."""
    rows, columns = parameter.shape[-2] // parameter.alternating, parameter.shape[-1]
    matrices = math.prod(parameter.shape[:-2]) * parameter.alternating
    small, large = sorted((rows, columns))
    return matrices * (4 * small * small * large + 2 * small**3)


def balanced_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The owner of each item: the costliest first, each to the rank that has least so far."""
    owners, loads = [0] * len(costs), [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def _cost_of_stack(stack: Stack) -> int:
    return len(stack) * orthogonalising_cost(stack[0].parameter)
