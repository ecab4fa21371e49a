"""Muon: the momentum of a matrix, made nearly orthogonal before it becomes a step; AdamW for everything else.

    m = mu m + (1 - mu) g          u = (1 - mu) g + mu m with Nesterov, m without
    o = orthogonalise(u): with u = U S V^T it is close to U V^T, every direction of the matrix gets an equal step
    w = w (1 - lr wd) - lr rms sqrt(max(rows, columns)) o

The factor gives the step a root mean square of `rms` (0.2), about that of AdamW, whose learning rate and weight decay
carry over. Newton-Schulz finds o with products only: x = u / |u|, then repeats x = a x + b (x x^T) x + c (x x^T)^2 x.

gate and up, which alternate in one tensor, are taken apart first: orthogonalising them together would tie their scales.
Each expert of a mixture is a matrix of its own. Equal shapes are stacked, so that small models need few products.

Each matrix is orthogonalised by one process, its owner. Under ZeRO-1 and 2 the owner holds all of it. Of a matrix that
is cut by rows (ZeRO-3) the momentum is updated where its rows are, u goes to the owner and o comes back
(`MatrixOwners`). State: 4 bytes a parameter of a matrix, 8 of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.layout import LogicalParameter
from zero2all.parallel.parts import Part
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import (
    Optimizer,
    ParameterGroup,
    ParamState,
    StepInputs,
    replace,
    scaled,
    zeros_like_master,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MUON_KINDS = ("matrix", "expert")
"""The kinds of parameters that are orthogonalised; a router, whose rows are compared with each other, is not."""
STACK_VALUES = 1 << 26
"""Values orthogonalised at once: enough to keep a GPU busy, little beside the model."""


class Muon(Optimizer):
    """Orthogonalised momentum for matrices, AdamW for routers, embeddings, head, norms and biases."""

    def __init__(self, groups: Sequence[ParameterGroup], rest: AdamW, config: OptimConfig) -> None:
        super().__init__(groups)
        self.matrices, self.rest, self.config = list(groups), rest, config
        self.param_groups = [*groups, *rest.param_groups]
        if not groups:
            self.updates = rest.updates  # on the device
        cut = [param for group in groups for param in group.params if param.part.group is not None]
        self.owners = MatrixOwners(cut) if cut else None

    def initial_state(self, param: ParamState) -> dict[str, Part]:
        """The momentum."""
        return {"momentum": zeros_like_master(param)}

    def update(self, inputs: StepInputs) -> None:
        """Matrices of equal shape together, as many as STACK_VALUES allows; then the rest."""
        for group in self.matrices:
            params = [param for param in group.params if param.gradient is not None]
            self._update_whole([param for param in params if param.part.group is None], group, inputs)
            if self.owners is not None:
                cut = [param for param in params if param.part.group is not None]
                self._update_cut(self.owners, cut, group, inputs)
        self.rest.update(inputs)

    def _update_whole(self, params: list[ParamState], group: ParameterGroup, inputs: StepInputs) -> None:
        for stack in _stacks(params):
            directions = torch.stack([self._direction(param, inputs) for param in stack])  # (n, …, rows, columns)
            _take_steps(stack, self._orthogonal_apart(directions, stack[0].parameter), group, inputs.skip)

    def _update_cut(
        self, owners: MatrixOwners, params: list[ParamState], group: ParameterGroup, inputs: StepInputs
    ) -> None:
        for stacks in owners.rounds(params, _stacks):
            directions = [[self._direction(param, inputs) for param in stack] for stack in stacks]
            steps = owners.compute(stacks, directions, self._orthogonal_apart)
            for stack, own_steps in zip(stacks, steps, strict=True):
                _take_steps(stack, own_steps, group, inputs.skip)

    def _direction(self, param: ParamState, inputs: StepInputs) -> Tensor:
        """Update the momentum; returns what to orthogonalise, or the part of it in this process."""
        gradient, momentum = param.gradient, param.moment("momentum")
        assert gradient is not None, "update takes only params with a gradient"
        gradient = scaled(gradient, inputs.scale)
        mu = self.config.momentum
        new = mu * momentum + (1 - mu) * gradient
        replace(momentum, new, inputs.skip)
        ahead = (1 - mu) * gradient + mu * new if self.config.nesterov else new
        return ahead.to(self._dtype(ahead))

    def _orthogonal_apart(self, matrices: Tensor, parameter: LogicalParameter) -> Tensor:
        """`_orthogonal` of each matrix that is stored in one of (..., rows, columns)."""
        if parameter.alternating == 1:
            return self._orthogonal(matrices)
        apart = matrices.unflatten(-2, (-1, parameter.alternating)).transpose(
            -3, -2
        )  # (..., alternating, rows, columns)
        return self._orthogonal(apart).transpose(-3, -2).flatten(-3, -2)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """(..., rows, columns) -> the same, nearly orthogonal and of the wanted root mean square."""
        scale = self.config.muon_update_rms * max(matrices.shape[-2:]) ** 0.5
        return scale * orthogonalise(matrices, self.config.muon_iterations)

    def _dtype(self, matrix: Tensor) -> torch.dtype:
        if matrix.dtype == torch.float64:
            return torch.float64
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(self.config.muon_precision)
        return chosen or (torch.bfloat16 if matrix.is_cuda else torch.float32)


def orthogonalise(matrices: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz on each of (..., rows, columns), in their precision."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # x x^T is then the smaller product
    length = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = (x / length.clamp(min=1e-30)).to(matrices.dtype)
    for _ in range(iterations):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if tall else x


def _take_steps(
    params: Sequence[ParamState], steps: Iterable[Tensor], group: ParameterGroup, skip: Tensor | None
) -> None:
    for param, step in zip(params, steps, strict=True):
        kept = param.weight * (1 - group.lr * group.weight_decay)
        replace(param.weight, kept - group.lr * step.to(kept.dtype), skip)


def _stacks(params: list[ParamState]) -> Iterator[list[ParamState]]:
    """Parameters of equal shape together, each stack of at most STACK_VALUES. Of experts a process may own some."""
    alike: dict[tuple[object, ...], list[ParamState]] = {}
    for param in params:
        own = param.weight.shape if param.part.group is None else None
        alike.setdefault((param.parameter.shape, own, param.parameter.alternating), []).append(param)
    for same in alike.values():
        at_once = max(1, STACK_VALUES // max(1, same[0].parameter.numel))
        for first in range(0, len(same), at_once):
            yield same[first : first + at_once]


# ---- who orthogonalises which matrix ---------------------------------------------------------------------------------


Stack = list[ParamState]
"""Matrices of equal shape, which are orthogonalised together."""


class MatrixOwners:
    """One owner for each matrix of which several processes hold rows, and the exchange with them: the rows go to the
    owner, its result comes back. All processes of the group make one, with the same matrices in the same order, and
    call each method together.

    Owners have about the same work in all, and no process does what another one does. Matrices are exchanged in rounds,
    so that little memory is needed at a time; one way is one all-to-all, in which each process sends to every owner
    what it holds of the owner's matrices.
    """

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
