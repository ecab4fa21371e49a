"""Stochastic rounding whose random bits are a function of (seed, update, parameter, place) only.

A value between two representable ones goes up with the probability of its distance from the lower one, so that the mean
of many roundings is the value itself, and small updates add up where rounding to the nearest would lose each of them.
The random bits are a hash, computed where the values are: no state to save, no host in between, and the same bits on
every device and for every cut of a parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import EllipsisType

import torch
from torch import Tensor

from zero2all.config.training import OptimConfig
from zero2all.parallel.parts import TensorPart
from zero2all.train.optimizers.adamw import AdamW
from zero2all.train.optimizers.base import Formula, ParameterGroup, ParamState, StepInputs, row_chunks


class RoundedAdamW(AdamW):
    """AdamW whose state, or weights, are stored in few bits and rounded stochastically."""

    rounded_formula: Formula
    """(AdamW's formula, scaled gradient, weight, *moments, *numbers, place of each value in the whole, key): widen,
    update by the formula and round -> new weight and moments."""

    def __init__(
        self, groups: Sequence[ParameterGroup], config: OptimConfig, seed: int, compiled: bool = False
    ) -> None:
        self.seed = seed
        super().__init__(groups, config, compiled=compiled)
        # One object: a new one is compiled again.
        self.rounded = partial(_at_places, partial(type(self).rounded_formula, self.formula))

    def update_one(self, param: ParamState, numbers: tuple[Tensor, ...], inputs: StepInputs) -> None:
        """Update one parameter and its moments."""
        gradient = param.gradient
        if gradient is None or not gradient.numel():
            return
        key = rounding_key(self.seed, param.parameter.name, inputs.count)
        for rows in row_chunks(param.weight):
            targets = [param.weight[rows], *(param.moment(name)[rows] for name in param.state)]
            rounding = (places_of(param.part, rows), key)
            self.apply(self.rounded, gradient[rows], targets, (*numbers, *rounding), inputs.scale, inputs.skip)


def places_of(part: TensorPart, rows: slice | EllipsisType) -> Tensor:
    """The place of each value of some rows (of a range of values: some values) in the whole flattened tensor; only that
    of the first where the others follow it, because a compiled formula counts faster than it reads."""
    if isinstance(rows, slice):
        before = rows.start * part.values[0].numel()
        part = replace(part, values=part.values[rows], start=part.start + before)
    return torch.tensor(part.start, dtype=torch.int32) if part.lengths == part.shape else part.index()


def _at_places(formula: Formula, gradient: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """A formula with the place of each value."""
    *others, places, key = others  # type: ignore[assignment]
    if places.dim() == 0:
        count = torch.arange(gradient.numel(), dtype=torch.int32, device=gradient.device)
        places = places + count.view(gradient.shape)
    return formula(gradient, *others, places, key)


def rounding_key(seed: int, parameter_name: str, count: Tensor) -> Tensor:
    """A 32-bit key for one parameter in one update; `count` stays on its device."""
    digest = hashlib.blake2b(f"{seed}/{parameter_name}".encode(), digest_size=4).digest()
    return _mix(count.to(torch.int32) ^ int.from_bytes(digest, "little", signed=True))


def random_bits(index: Tensor, key: Tensor, stream: int) -> Tensor:
    """32 random bits (int32) for each place in `index`; another `stream` gives independent ones."""
    return _mix(index ^ _mix(key + stream))


def _mix(bits: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every bit depends on every other (multiply, shift, xor)."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


def fraction(bits: Tensor) -> Tensor:
    """Random bits as numbers from 0 up to but not including 1."""
    return (bits & 0xFFFFFF).float() / 2**24


def to_bfloat16(values: Tensor, bits: Tensor) -> Tensor:
    """float32 values rounded up or down to bfloat16: 16 random bits added to the lower half of a float32 carry into the
    upper half, a bfloat16, with exactly the wanted probability."""
    rounded = (values.view(torch.int32) + (bits & 0xFFFF)) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16)
