"""The weights of a model as the optimizer sees them: float32 masters, their gradients, and what the forward pass reads.

An update of a thousandth of a weight would vanish in the rounding of bfloat16 or float16, so the optimizer works on
float32 masters and writes the low-precision weights from them. Gradients are summed in float32 too. In a float32 (or
float64) model the masters are the weights themselves. A bfloat16 weight is the upper half of its master, so an
optimizer that can join both needs only the missing 16 bits (`zero2all.ops.split_master`).

`FlatWeights`: every process has all weights, in one buffer each for masters, weights and gradients: the norm is one
reduction, the sum over processes one all-reduce, and the update one pass. Parameters of a group are neighbours.

`ShardedWeights`: every process has a part of each weight (FSDP2), in float32; the low-precision weights of a block are
gathered while it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zero2all.model.config import ParameterKind
from zero2all.model.z2all import Z2all
from zero2all.ops.implementation import has_triton
from zero2all.ops.split_master import join, split
from zero2all.parallel.layout import LogicalParameter, layout_table
from zero2all.parallel.parts import Part
from zero2all.parallel.shards import local, part_of
from zero2all.parallel.world import World
from zero2all.train.optimizers.base import Master

ALIGNMENT = 128
"""Parameters begin at multiples of this many values, so that every kernel can load them in wide words."""

CHUNK_VALUES = 1 << 25
"""Values that are joined or split at once."""


@dataclass(frozen=True)
class Place:
    """Where a parameter lies in the buffers."""

    name: str
    parameter: nn.Parameter
    at: slice


class FlatWeights:
    """Takes over the parameters of `model`: their storage becomes a view of flat buffers on the model's device."""

    def __init__(
        self,
        model: Z2all,
        group_of: Mapping[str, ParameterKind],
        dtype: torch.dtype,
        with_masters: bool = True,
        split_masters: bool = False,
    ) -> None:
        """`group_of` names the group of each parameter; `groups` then says where each lies. Without masters, an
        optimizer that rounds for itself (adamw_bf16) works on the low-precision weights and gradients. `split_masters`:
        `masters` holds only the 16 bits that the bfloat16 weights lack."""
        self._table = layout_table(model.config)
        named = list(model.named_parameters())
        names = list(dict.fromkeys(group_of[name] for name, _ in named))
        self.places: list[Place] = []
        self.groups: dict[ParameterKind, slice] = {}
        length = 0
        for group in names:
            start = length
            for name, parameter in named:
                if group_of[name] == group:
                    self.places.append(Place(name, parameter, slice(length, length + parameter.numel())))
                    length += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self.groups[group] = slice(start, length)
        device = named[0][1].device
        self.dtype, wide = dtype, torch.promote_types(dtype, torch.float32) if with_masters else dtype
        assert dtype == torch.bfloat16 or not split_masters, "only a bfloat16 is one half of a float32"
        self.split_masters = split_masters
        self.masters = torch.zeros(length, dtype=torch.int16 if split_masters else wide, device=device)
        self.weights = self.masters if dtype == wide else torch.zeros(length, dtype=dtype, device=device)
        self.gradients = torch.zeros(length, dtype=wide, device=device)
        self._hooks = [self._take(place) for place in self.places]

    @torch.no_grad()
    def _take(self, place: Place) -> torch.utils.hooks.RemovableHandle | None:
        parameter, shape = place.parameter, place.parameter.shape
        self._write(place.at, parameter.detach().reshape(-1))
        parameter.data = self.weights[place.at].view(shape)
        gradient = self.gradients[place.at].view(shape)
        if self.weights is self.masters:
            parameter.grad = gradient  # autograd adds to it in place
            return None
        # Some kernels add to main_grad themselves; what autograd leaves in .grad is added there at once and freed.
        parameter.main_grad = gradient  # type: ignore[attr-defined]
        return parameter.register_post_accumulate_grad_hook(_move_to_main)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A buffer of this length as views in the shapes of the parameters."""
        return {place.name: flat[place.at].view(place.parameter.shape) for place in self.places}

    def _write(self, at: slice, values: Tensor) -> None:
        """Masters and weights from new values of the masters."""
        if self.split_masters:
            self.weights[at], self.masters[at] = split(values.float())
            return
        self.masters[at] = values
        if self.weights is not self.masters:
            self.weights[at] = values

    def masters_by_name(self) -> dict[str, Tensor]:
        """The masters, each with its gradient in `.grad`, for an optimizer that takes them one by one; live."""
        assert not self.split_masters, "there are no whole masters"
        masters, gradients = self.by_name(self.masters), self.by_name(self.gradients)
        for name, master in masters.items():
            master.grad = gradients[name]
        return masters

    def logical_masters(self) -> dict[str, Master]:
        """The masters of all logical parameters with their gradients; live."""
        assert not self.split_masters, "there are no whole masters"
        masters, gradients = self.logical_parts(self.masters), self.logical_parts(self.gradients)
        return {name: Master(part, partial(getattr, gradients[name], "values")) for name, part in masters.items()}

    def logical_parts(self, flat: Tensor) -> dict[str, Part]:
        """A buffer of this length as the logical parameters, which share its memory."""
        holders = self.by_name(flat)
        return {one.name: part_of(holders[one.holder], one) for one in self._table}

    @contextmanager
    def masters_between_steps(self) -> Iterator[dict[str, Tensor]]:
        """The masters by name, to read or to write, between two steps; split ones lie in `gradients`."""
        if not self.split_masters:
            yield self.by_name(self.masters)
            return
        with torch.no_grad():
            for at in self._chunks():
                self.gradients[at] = join(self.weights[at], self.masters[at])
            try:
                yield self.by_name(self.gradients)
            finally:
                for at in self._chunks():
                    self._write(at, self.gradients[at])
                self.zero_gradients()

    def _chunks(self) -> Iterator[slice]:
        """The buffers in chunks, so that joining split masters takes little extra memory."""
        for start in range(0, self.gradients.numel(), CHUNK_VALUES):
            yield slice(start, min(start + CHUNK_VALUES, self.gradients.numel()))

    def master_samples(self, most: int) -> dict[str, Tensor]:
        """At most about `most` values of each master, evenly spread over the part in this process; at any time."""
        samples = {}
        for place in self.places:
            every = slice(place.at.start, place.at.stop, _stride(place.at.stop - place.at.start, most))
            samples[place.name] = (
                join(self.weights[every].contiguous(), self.masters[every])
                if self.split_masters
                else self.masters[every]
            )
        return samples

    def reduce_gradients(self, world: World) -> None:
        """Sum the gradients over the processes, after the last micro-batch."""
        world.mesh.batch.sum(self.gradients)

    def squared_norm(self, world: World) -> Tensor:
        """The square of the L2 norm of the whole gradient, float64, the same in every process."""
        del world
        if self.gradients.is_cuda and self.gradients.dtype == torch.float32 and has_triton():
            from zero2all.ops.kernels.adamw import sum_of_squares

            return sum_of_squares(self.gradients)
        wide = torch.promote_types(self.gradients.dtype, torch.float32)
        return torch.linalg.vector_norm(self.gradients, dtype=wide).double().square()

    def updated(self) -> None:
        """Write the low-precision weights; an optimizer that does so itself calls `touched` instead."""
        if self.weights is not self.masters and not self.split_masters:
            self.weights.copy_(self.masters)
        self.touched()

    def touched(self) -> None:
        """Invalidate caches made from the weights (float8 copies)."""
        torch.autograd.graph.increment_version([place.parameter for place in self.places])

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()


class ShardedWeights:
    """The parameters of a model that `parallel.data.shard_model` has sharded."""

    def __init__(self, model: Z2all, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._parameters = dict(model.named_parameters())
        self._table = layout_table(model.config)

    def masters_by_name(self) -> dict[str, Tensor]:
        """The masters, each with its gradient in `.grad`, for an optimizer that takes them one by one; live."""
        return dict(self._parameters)

    def logical_masters(self) -> dict[str, Master]:
        """The parts of all logical parameters in this process with their gradients; live."""

        def master(one: LogicalParameter) -> Master:
            parameter = self._parameters[one.holder]
            return Master(
                part_of(parameter, one),
                lambda: None if parameter.grad is None else part_of(parameter.grad, one).values,
            )

        return {one.name: master(one) for one in self._table}

    @contextmanager
    def masters_between_steps(self) -> Iterator[dict[str, Tensor]]:
        """The masters by name, to read or to write, between two steps."""
        yield self.masters_by_name()

    def master_samples(self, most: int) -> dict[str, Tensor]:
        """At most about `most` values of each master, evenly spread over the part in this process; at any time."""
        parts = {name: local(parameter).detach().reshape(-1) for name, parameter in self._parameters.items()}
        return {name: part[:: _stride(part.numel(), most)] for name, part in parts.items()}

    def reduce_gradients(self, world: World) -> None:
        """Nothing to do: FSDP has summed the gradients in the backward pass."""
        del world

    def squared_norm(self, world: World) -> Tensor:
        """The square of the L2 norm of the whole gradient, float64, the same in every process."""
        wide = torch.promote_types(self.dtype, torch.float32)
        squares = [
            torch.linalg.vector_norm(local(parameter.grad), dtype=wide).double().square()
            for parameter in self._parameters.values()
            if parameter.grad is not None
        ]
        return world.mesh.shard.sum(torch.stack(squares).sum())

    def updated(self) -> None:
        """Nothing to do: FSDP gathers the weights in every pass."""

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        for parameter in self._parameters.values():
            parameter.grad = None


Weights = FlatWeights | ShardedWeights


def _move_to_main(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None


def _stride(count: int, most: int) -> int:
    return max(1, count // most)
