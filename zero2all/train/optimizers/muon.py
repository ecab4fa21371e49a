"""Muon: the momentum of a matrix, made nearly orthogonal before it becomes a step; AdamW for everything else.

    m = mu m + (1 - mu) g                 u = (1 - mu) g + mu m with Nesterov, m without
    x = u, each row divided by its length and by 1.01 sqrt(rows): no singular value is above 1
    o = polynomial(x): with x = U S V^T close to U V^T; its length is set to sqrt(min(rows, columns))
    v = b2 v + (1 - b2) mean(o^2)         a value for each line along the longer side (NorMuon)
    o = o / sqrt(v), its length as before
    w = w - lr sqrt(max(1, rows / columns)) o - lr wd w [where o and w have the same sign]

The factor gives every matrix a step of the same spectral norm for a vector of unit entries, so one rate serves all
shapes. docs/optimizers.md says what each part is for and what it costs.

q, k and v are parameters of their own; gate and up, which alternate in one tensor, are taken apart, and each expert is
a matrix of its own. Matrices of equal shape are stacked, so that small models need few products. On a GPU
Triton kernels do the rest, compiled once for all shapes: momentum, lengths and precision in one pass, the step in one.

Each matrix is orthogonalised by one process, its owner, who also keeps v. Under ZeRO-1 and 2 the owner holds all of it.
Where a matrix is cut (rows by ZeRO-3, rows or columns by tensor parallelism) the momentum is updated where its values
are, u goes to the owner and o comes back (`MatrixOwners`). State: 4 bytes a parameter of a matrix and v, 8 of the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers import base
from zero2all.train.optimizers.adamw import AdamW

POLAR_EXPRESS = (
    (8.15655, -22.48329, 15.87877),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
    (2.34654, -1.70978, 0.42324),
)
"""Coefficients of x, x^3 and x^5 for each iteration: each set is the best for what the sets before it leave (Polar
Express). All of them take singular values from 0.001 on to between 0.85 and 1.15."""
CONVERGING = (1.875, -1.25, 0.375)
"""For every further iteration: Newton-Schulz of fifth order, which leaves 1 where it is and takes all others to it."""
SAFETY = 1.01
"""The first set grows fast beyond 1, so rounding must not push a singular value over it."""
SHORTEST, TINY = 1e-15, 1e-30
"""Least length to divide a row by (the squares of values below 1e-19 are 0 in float32), and least square."""
MUON_KINDS = ("matrix", "expert")
"""The kinds of parameters that are orthogonalised; a router, whose rows are compared with each other, is not."""
STACK_VALUES, STACK_PARAMETERS = 1 << 26, 32
"""Orthogonalised at once: enough to keep a GPU busy, little beside the model."""
SYMMETRIC_ROWS = 512
"""From here on the kernel that computes half of a symmetric product is taken."""

Tensors = Sequence[Tensor]
Stack = list[base.ParamState]
"""Parameters whose matrices have equal shapes and are orthogonalised together."""


class Muon(base.Optimizer):
    """Orthogonalised momentum for matrices, AdamW for routers, embeddings, head, norms and biases."""

    def __init__(
        self,
        groups: Sequence[base.ParameterGroup],
        rest: Sequence[AdamW],
        config: OptimConfig,
        holders: dist.ProcessGroup | None = None,
        kernels: bool = False,
    ) -> None:
        """`rest`: one optimizer for each set of settings. `holders`: the processes that together hold a matrix that is
        cut; None: those of its part. `kernels`: with the Triton kernels, for float32 weights."""
        cut = [param for group in groups for param in group.params if _is_cut(param)]
        self.owners = MatrixOwners(cut, holders or cut[0].part.group) if cut else None
        super().__init__(groups)
        self.matrices, self.rest, self.config, self.kernels = list(groups), list(rest), config, kernels
        self.param_groups = [group for one in (self, *rest) for group in one.param_groups]
        if not groups:
            self.updates = self.rest[0].updates  # on the device

    def initial_state(self, param: base.ParamState) -> dict[str, TensorPart]:
        """The momentum, and at the owner of a matrix the mean squares of its lines."""
        state, part, one = {"momentum": base.zeros_like_master(param)}, param.part, param.parameter
        lines = (one.alternating, max(matrix_shape(one)))
        size = lines if len(one.shape) == 2 else (*part.values.shape[:-2], *lines)
        squares = part.values.new_zeros(size, dtype=base.master_dtype(part.values))
        if len(one.shape) > 2:  # a stack is cut between its matrices
            state["mean_squares"] = part.by_row(squares, (*one.shape[1:-2], *lines))
        elif not _is_cut(param) or (self.owners is not None and self.owners.is_own(param)):
            state["mean_squares"] = TensorPart.whole(squares)
        return state

    def update(self, inputs: base.StepInputs) -> None:
        """Matrices of equal shape together, as many as STACK_VALUES allows; then the rest."""
        mu = self.config.momentum if self.momentum is None else self.momentum
        for group in self.matrices:
            params = [param for param in group.params if param.gradient is not None]
            numbers = Numbers(
                *(mu, group.lr, group.decay, inputs.scale, inputs.skip),
                nesterov=self.config.nesterov,
                cautious=self.config.muon.cautious_decay,
            )
            for stack in stacks_of([param for param in params if not _is_cut(param) and param.weight.numel()]):
                self._update_whole(stack, numbers)
            if self.owners is not None:
                self._update_cut(self.owners, [param for param in params if _is_cut(param)], numbers)
        for rest in self.rest:
            rest.update(inputs)

    def _update_whole(self, stack: Stack, numbers: Numbers) -> None:
        gradients = [gradient for param in stack if (gradient := param.gradient) is not None]  # of all of them
        momenta = [param.moment("momentum") for param in stack]
        turns, settings = [param.parameter.alternating for param in stack], self.config.muon
        x = prepare(gradients, momenta, turns, numbers, self._dtype(momenta[0]), self.kernels)
        o = orthogonalise(x, settings.iterations, self.kernels)
        factors = line_factors(o, [param.moment("mean_squares") for param in stack], settings.beta2, numbers.skip)
        sizes = [momentum.numel() // o[0].numel() for momentum in momenta]
        for param, one, factor in zip(stack, o.split(sizes), factors.split(sizes), strict=True):
            turn = param.parameter.alternating
            take_step(param.weight, one, factor, turn, numbers, self.kernels)

    def _update_cut(self, owners: MatrixOwners, params: Stack, numbers: Numbers) -> None:
        def direction(param: base.ParamState) -> Tensor:
            assert param.gradient is not None, "update takes only params with a gradient"
            ahead = look_ahead(param.gradient, param.moment("momentum"), numbers)
            return ahead.to(self._dtype(ahead))

        for stacks in owners.rounds(params):
            directions = [[direction(param) for param in stack] for stack in stacks]
            steps = owners.compute(stacks, directions, partial(self._steps_of, numbers=numbers))
            for param, step in ((p, s) for pair in zip(stacks, steps, strict=True) for p, s in zip(*pair, strict=True)):
                if step.numel():
                    take_step(param.weight, step[None], None, 1, numbers, self.kernels)

    def _steps_of(self, stack: Stack, matrices: list[Tensor], numbers: Numbers) -> list[Tensor]:
        """What an owner makes of whole matrices: their steps before the rate, in their shapes and precision."""
        turns, settings = [param.parameter.alternating for param in stack], self.config.muon
        x = prepare(matrices, None, turns, numbers, matrices[0].dtype, self.kernels)
        o = orthogonalise(x, settings.iterations, self.kernels)
        factors = line_factors(o, [param.moment("mean_squares") for param in stack], settings.beta2, numbers.skip)
        cut = evened(o, factors).to(o.dtype).split(turns)
        return [step.transpose(0, 1).reshape(one.shape) for step, one in zip(cut, matrices, strict=True)]

    def _dtype(self, matrix: Tensor) -> torch.dtype:
        if matrix.dtype == torch.float64:
            return torch.float64
        chosen = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(self.config.muon.precision)
        return chosen or (torch.bfloat16 if matrix.is_cuda else torch.float32)


# ---- the formula, on a stack (n, rows, columns) ----------------------------------------------------------------------


class Numbers(NamedTuple):
    """The constants of one step."""

    mu: float
    lr: float
    decay: float
    scale: Tensor | None
    skip: Tensor | None
    nesterov: bool = True
    cautious: bool = False
    """The decay is left out where the step leads away from 0."""


def prepare(
    values: Tensors, momenta: Tensors | None, turns: Sequence[int], numbers: Numbers, dtype: torch.dtype, kernels: bool
) -> Tensor:
    """The stack to orthogonalise: of gradients, after an update of their momenta, or without momenta of the values as
    they are. `turns`: how many matrices alternate in each tensor."""
    if kernels:
        from zero2all.ops.kernels.muon import rows_of_equal_length

        mu, nesterov, skip = numbers.mu, numbers.nesterov, numbers.skip
        scale = None if momenta is None else numbers.scale
        return rows_of_equal_length(values, momenta, turns, dtype, mu, nesterov, scale, skip, SHORTEST, SAFETY)
    if momenta is not None:
        values = [look_ahead(*pair, numbers) for pair in zip(values, momenta, strict=True)]
    pieces = [_apart(one, turn).flatten(0, 1) for one, turn in zip(values, turns, strict=True)]
    return of_unit_length(torch.cat(pieces), dtype)


def look_ahead(gradient: Tensor, momentum: Tensor, numbers: Numbers) -> Tensor:
    """Update a momentum; returns what to orthogonalise, or the part of it in this process."""
    gradient, mu = base.scaled(gradient, numbers.scale), numbers.mu
    new = mu * momentum + (1 - mu) * gradient
    base.replace(momentum, new, numbers.skip)
    return (1 - mu) * gradient + mu * new if numbers.nesterov else new


def of_unit_length(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled so that all rows have equal length and the matrix at most length 1, so that its singular values are at
    most 1. (Rows of zeros make it shorter; the polynomial lifts small singular values.)"""
    x = x.to(base.master_dtype(x))
    lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=SHORTEST)
    return (x / (SAFETY * math.sqrt(x.shape[-2]) * lengths)).to(dtype)


def orthogonalise(x: Tensor, iterations: int, kernels: bool = False) -> Tensor:
    """Each matrix, of singular values of at most 1, with all of them near 1; by products in its precision."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x  # x x^T is then the smaller product
    for a, b, c in [*POLAR_EXPRESS, *[CONVERGING] * (iterations - len(POLAR_EXPRESS))][:iterations]:
        if kernels and x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-2] >= SYMMETRIC_ROWS:
            from zero2all.ops.kernels.symmetric import times_transposed

            product = times_transposed(x)
            x = times_transposed(product, factor=c, added=product, added_factor=b, diagonal=a) @ x
        else:
            product = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def line_factors(o: Tensor, squares: Tensors, beta2: float, skip: Tensor | None) -> Tensor:
    """Factors (n, lines) of the lines of `o` along its longer side that make a step of it, in the precision of the
    weights: o of length sqrt(min(rows, columns)), its lines divided by their usual root mean square, at its old length
    and times the factor of its shape. Updates the mean squares."""
    rows, columns = o.shape[-2:]
    lengths = torch.linalg.vector_norm(o, dim=_across(o), dtype=base.master_dtype(o)).square()
    factors = torch.ones_like(lengths)
    if beta2:
        now = lengths / lengths.sum(dim=-1, keepdim=True).clamp(min=TINY)  # means, as o has the length sqrt(least)
        mean = beta2 * torch.cat([one.flatten(0, -2) for one in squares]) + (1 - beta2) * now
        for one, new in zip(squares, mean.split([one.flatten(0, -2).shape[0] for one in squares]), strict=True):
            base.replace(one, new.view(one.shape), skip)
        factors = mean.clamp(min=TINY).rsqrt()
    length = (lengths * factors.square()).sum(dim=-1, keepdim=True).clamp(min=TINY)
    return factors * (max(1.0, rows / columns) * min(rows, columns) / length).sqrt()


def evened(o: Tensor, factors: Tensor) -> Tensor:
    """Steps before the rate: `o` with the factors of its lines."""
    return o * factors.unsqueeze(_across(o))


def take_step(weight: Tensor, o: Tensor, factors: Tensor | None, turns: int, numbers: Numbers, kernels: bool) -> None:
    """Subtract a step and the decay."""
    if kernels and weight.is_contiguous():  # a part of a matrix may have other strides
        from zero2all.ops.kernels.muon import subtract_step

        subtract_step(weight, o, factors, turns, numbers.lr, numbers.decay, numbers.cautious, numbers.skip)
        return
    target = _apart(weight, turns)
    step = (o if factors is None else evened(o, factors)).to(weight.dtype).unflatten(0, target.shape[:2])
    lost = numbers.decay * target
    if numbers.cautious:
        lost = torch.where(step * target >= 0, lost, 0.0)
    base.replace(target, target - numbers.lr * (step + lost), numbers.skip)


def matrix_shape(parameter: LogicalParameter) -> tuple[int, int]:
    """Rows and columns of each matrix that is stored in a parameter."""
    return parameter.shape[-2] // parameter.alternating, parameter.shape[-1]


def _apart(values: Tensor, turns: int) -> Tensor:
    """A view (stack, turns, rows, columns) of (..., rows x turns, columns)."""
    return values.view(-1, values.shape[-2] // turns, turns, values.shape[-1]).transpose(1, 2)


def _across(o: Tensor) -> int:
    """The dimension of the shorter side; the first of two equal ones has the lines."""
    return -1 if o.shape[-2] >= o.shape[-1] else -2


def _is_cut(param: base.ParamState) -> bool:
    """Whether other processes hold some of each matrix; the same answer in all of them."""
    part = param.part
    return len(part.shape) == 2 and not param.is_elsewhere and (part.group is not None or part.lengths != part.shape)


def stacks_of(params: Sequence[base.ParamState]) -> Iterator[Stack]:
    """Parameters whose matrices have equal shapes together, in stacks of about the same size."""
    alike: dict[tuple[int, int], Stack] = {}
    for param in params:
        alike.setdefault(matrix_shape(param.parameter), []).append(param)
    for same in alike.values():
        values = sum(math.prod(one.part.shape) if len(one.part.shape) == 2 else one.weight.numel() for one in same)
        pieces = max(-(-values // STACK_VALUES), -(-len(same) // STACK_PARAMETERS))
        at_once = -(-len(same) // min(pieces, len(same)))
        yield from (same[first : first + at_once] for first in range(0, len(same), at_once))


# ---- who orthogonalises which matrix ---------------------------------------------------------------------------------


class MatrixOwners:
    """One owner for each matrix of which several processes hold a part, and the exchange with them: the parts go to the
    owner, its result comes back. All processes of the group make one, with the same matrices in the same order, and
    call each method together. A part is a box of rows and columns; kv heads may be held by several processes alike.

    Owners have about the same work in all, and no process does what another one does. Matrices are exchanged in rounds,
    so that little memory is needed at a time; one way is one all-to-all, in which each process sends to every owner
    what it holds of the owner's matrices.
    """

    def __init__(self, params: Sequence[base.ParamState], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        names = [param.parameter.name for param in params]
        owners = balanced_owners([orthogonalising_cost(param.parameter) for param in params], self._ranks)
        self._owners = dict(zip(names, owners, strict=True))
        boxes = torch.zeros(len(params), self._ranks, 4, dtype=torch.int64, device=params[0].weight.device)
        for place, param in enumerate(params):
            for at, values in param.part.boxes():
                assert values.shape == param.weight.shape, f"{param.parameter.name}: the layout cuts rows"
                boxes[place, self._rank] = torch.tensor([*at, *values.shape])
        dist.all_reduce(boxes, group=group)
        self._boxes: dict[str, list[tuple[slice, slice]]] = {}
        """Of each matrix what each process holds."""
        for name, param, found in zip(names, params, boxes.tolist(), strict=True):
            self._boxes[name] = [(slice(r, r + rows), slice(c, c + columns)) for r, c, rows, columns in found]
            held = sum(rows * columns for _, _, rows, columns in {tuple(box) for box in found})
            assert held == math.prod(param.parameter.shape), f"{name} is not held once by the group"

    def is_own(self, param: base.ParamState) -> bool:
        """Whether this process owns a matrix."""
        return self._owners[param.parameter.name] == self._rank

    def rounds(self, params: Iterable[base.ParamState]) -> Iterator[list[Stack]]:
        """The matrices in rounds of a stack for each owner, an empty one where an owner has no more. Costly stacks come
        first, so that the owners of a round have about as much to do."""
        owned: list[Stack] = [[] for _ in range(self._ranks)]
        for param in params:
            owned[self._owners[param.parameter.name]].append(param)
        stacks = [
            sorted(stacks_of(own), key=lambda s: -sum(orthogonalising_cost(p.parameter) for p in s)) for own in owned
        ]
        for one_each in zip_longest(*stacks, fillvalue=[]):
            yield list(one_each)

    def compute(
        self, stacks: list[Stack], parts: list[list[Tensor]], work: Callable[[Stack, list[Tensor]], list[Tensor]]
    ) -> list[list[Tensor]]:
        """Have each owner apply `work` to the whole matrices of its stack of a round. `parts` has what this process
        holds of each matrix of each stack; the answer has the same places of the results."""
        own, given = stacks[self._rank], [part for stack in parts for part in stack]
        sent = [sum(part.numel() for part in stack) for stack in parts]
        wholes = [given[0].new_empty(param.parameter.shape) for param in own]
        held = [self._held(own, wholes, rank) for rank in range(self._ranks)]
        received = [sum(view.numel() for view in views) for views in held]
        pieces = self._exchange(given, sent, received).split([view.numel() for views in held for view in views])
        for view, piece in zip((view for views in held for view in views), pieces, strict=bool(own)):
            view.copy_(piece.view(view.shape))
        results = work(own, wholes) if own else []
        back = [view for rank in range(self._ranks) for view in self._held(own, results, rank)]
        returned = self._exchange(back or [given[0].new_empty(0)], received, sent)
        flat = iter(returned.split([part.numel() for part in given]))
        return [[next(flat).view(part.shape) for part in stack] for stack in parts]

    def _held(self, own: Stack, wholes: list[Tensor], rank: int) -> list[Tensor]:
        """Views of what a process holds of the matrices of a stack."""
        return [whole[self._boxes[param.parameter.name][rank]] for param, whole in zip(own, wholes, strict=True)]

    def _exchange(self, tensors: list[Tensor], sent: list[int], received: list[int]) -> Tensor:
        """Send `sent` values to each process, one after the other; the values received, likewise."""
        values = torch.cat([tensor.reshape(-1) for tensor in tensors])
        answer = values.new_empty(sum(received))
        dist.all_to_all_single(answer, values, received, sent, group=self._group)
        return answer


def orthogonalising_cost(parameter: LogicalParameter) -> int:
    """Operations of one iteration on all matrices of a parameter."""
    small, large = sorted(matrix_shape(parameter))
    matrices = math.prod(parameter.shape[:-2]) * parameter.alternating
    return matrices * (4 * small * small * large + 2 * small**3)


def balanced_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """The owner of each item: the costliest first, each to the rank that has least so far."""
    owners, loads = [0] * len(costs), [0] * ranks
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
