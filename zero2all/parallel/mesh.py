"""The processes of a run as a mesh with named axes.

Every process has a coordinate on each axis, in this order; neighbours differ in the last one, because they are more
likely to be joined by a fast link. An axis of size 1 has no group and costs nothing.

    pipeline    each process has some blocks of the model; hidden states go from one to the next
    replicate   copies of everything; gradients are summed
    shard       each process keeps a part of the states, gradients or weights (ZeRO, FSDP); gradients are summed
    context     each process has a part of every sequence
    tensor      each process has a part of every matrix

Experts are cut over processes that hold the same blocks: shard x context x tensor processes are expert_shard x expert.

    expert        each process has some of the experts; tokens go to them
    expert_shard  processes with the same experts

Code names the axis, or the product of axes, that it means:

    batch       replicate x shard: each has rows of its own
    loss        batch x context: each has tokens of its own
    world       all processes
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zero2all.parallel.config import MeshSizes

DENSE = ("pipeline", "replicate", "shard", "context", "tensor")
EXPERT = ("pipeline", "replicate", "expert_shard", "expert")

Spread = Literal["cut", "copied", "expert"]
"""How a parameter lies on the mesh. `cut`: over the tensor axis, so it is whole where that axis has one rank; `copied`:
on every tensor rank, each of which sees only some of the tokens; `expert`: cut over the expert axis."""


@dataclass(frozen=True)
class Axis:
    """The processes along one axis of the mesh, or a product of axes, seen from one of them."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None: this process alone

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over these processes, in place; queued on the device, the host does not wait."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class GradientAxes(NamedTuple):
    """Where the gradient of a parameter is summed."""

    all: Axis  # all processes that computed a part of the sum
    scatter: Axis  # of these, those among which ZeRO cuts it
    rest: Axis  # the others: copies of a cut range


def _along(*names: str) -> cached_property[Axis]:
    """An axis of a mesh, or the product of several."""
    return cached_property(lambda mesh: mesh._axis(*names))


@dataclass(frozen=True)
class Mesh:
    """The axes of a run, seen from one process; by default those of a run of one process."""

    sizes: MeshSizes = field(default_factory=MeshSizes)
    place: int = 0  # the rank of this process among all
    groups: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    """By the axes of a product; empty where nothing communicates (plans, tests)."""

    pipeline = _along("pipeline")
    """Stages."""
    replicate = _along("replicate")
    """Copies."""
    shard = _along("shard")
    """Parts of a copy."""
    context = _along("context")
    """Parts of sequences."""
    tensor = _along("tensor")
    """Parts of matrices."""
    expert = _along("expert")
    """Parts of the set of experts."""
    batch = _along("replicate", "shard")
    """Processes with rows of their own."""
    loss = _along("replicate", "shard", "context")
    """Processes with tokens of their own; tensor and pipeline ranks have the same tokens."""
    copies = _along("replicate", "context")
    """Processes that hold the same range of a weight that is cut over `shard`."""
    world = _along(*DENSE)
    """All processes."""

    def holders_of_matrix(self, is_sharded: bool) -> Axis:
        """Processes that hold the parts of one dense matrix; `is_sharded`: the shard axis cuts it too (ZeRO-3)."""
        return self._axis("shard", "tensor") if is_sharded else self.tensor

    def sums(self, spread: Spread) -> GradientAxes:
        """Where the gradient of a parameter is summed."""
        return self._sums[spread]

    @cached_property
    def _sums(self) -> dict[Spread, GradientAxes]:
        return {
            spread: GradientAxes(self._axis(*everywhere), self._axis(scatter), self._axis(*rest))
            for spread, (everywhere, scatter, rest) in GRADIENT_AXES.items()
        }

    @property
    def reports(self) -> bool:
        """Whether this process adds its losses to the figures of a step: one of the processes with the same tokens."""
        return self.tensor.rank == 0 and self.pipeline.rank == self.pipeline.size - 1

    @cached_property
    def for_fsdp(self) -> DeviceMesh:
        """Copies x shard, as FSDP2 takes it."""
        grid = self._ranks_along("replicate", "context", "shard").view(-1, self.shard.size)
        names = ("copies", "shard")
        kind = "cuda" if dist.get_backend(self.shard.group) == "nccl" else "cpu"
        if self.copies.group is None:
            return DeviceMesh.from_group(self._group("shard"), kind, grid.view(-1), mesh_dim_names=("shard",))
        groups = [self.copies.group, self._group("shard")]
        return DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=names)

    def _group(self, *names: str) -> dist.ProcessGroup:
        group = self._axis(*names).group
        assert group is not None, f"no group along {' x '.join(names)}"
        return group

    def _axis(self, *names: str) -> Axis:
        lengths = [axis_length(self.sizes, name) for name in names]
        rank = 0
        for name, length in zip(names, lengths, strict=True):
            rank = rank * length + coordinates(self.sizes, self.place)[name]
        return Axis(rank, math.prod(lengths), self.groups.get(names))

    def _ranks_along(self, *names: str) -> Tensor:
        """The processes that differ from this one only on these axes, in the order of the named axes."""
        here = coordinates(self.sizes, self.place)
        found = []
        for rank in range(self.sizes.processes):
            there = coordinates(self.sizes, rank)
            if all(there[name] == here[name] for name in DENSE if name not in names):
                found.append((tuple(there[name] for name in names), rank))
        return torch.tensor([rank for _, rank in sorted(found)])


GRADIENT_AXES: dict[Spread, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "cut": (("replicate", "shard", "context"), "shard", ("replicate", "context")),
    "copied": (("replicate", "shard", "context", "tensor"), "shard", ("replicate", "context", "tensor")),
    "expert": (("replicate", "expert_shard"), "expert_shard", ("replicate",)),
}
PRODUCTS: tuple[tuple[str, ...], ...] = (
    DENSE,
    *((name,) for name in (*DENSE, "expert")),
    ("replicate", "shard"),
    ("shard", "tensor"),
    *(product for everywhere, scatter, rest in GRADIENT_AXES.values() for product in (everywhere, (scatter,), rest)),
)
"""Products of axes that have a group."""


def axis_length(sizes: MeshSizes, name: str) -> int:
    """The number of processes along an axis."""
    if name == "expert_shard":
        return sizes.shard * sizes.context * sizes.tensor // sizes.expert
    length: int = getattr(sizes, name)
    return length


def coordinates(sizes: MeshSizes, rank: int) -> dict[str, int]:
    """The place of a process on every axis."""
    found, left = {}, rank
    for name in reversed(DENSE):
        left, found[name] = divmod(left, axis_length(sizes, name))
    inner = (found["shard"] * sizes.context + found["context"]) * sizes.tensor + found["tensor"]
    found["expert_shard"], found["expert"] = divmod(inner, sizes.expert)
    return found


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait for collectives that were started with async_op. Where one fails gloo raises a bare RuntimeError, as any
    code may; here it becomes a DistError, as NCCL's are, so that it is known as a lost process
    (`zero2all.parallel.world`)."""
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise dist.DistError(str(error)) from error


def make_mesh(sizes: MeshSizes, timeout: timedelta | None = None) -> Mesh:
    """The mesh of all processes of the process group. Every process calls it, and creates all groups in one order.
    `timeout`: how long a process waits for the others; None: as long as torch does."""
    count = dist.get_world_size()
    assert sizes.processes == count, f"{sizes} is not the number of processes ({count})"
    everyone = [coordinates(sizes, rank) for rank in range(count)]
    # The group of all processes exists already; another one would take more memory and connections.
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(count)): dist.group.WORLD}
    groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
    for names in dict.fromkeys(PRODUCTS):
        others = [name for name in (EXPERT if set(names) <= set(EXPERT) else DENSE) if name not in names]
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(everyone):
            members.setdefault(tuple(place[name] for name in others), []).append(rank)
        for ranks in (tuple(each) for each in members.values() if len(each) > 1):
            if ranks not in made:
                made[ranks] = dist.new_group(ranks, timeout)
            if dist.get_rank() in ranks:
                groups[names] = made[ranks]  # type: ignore[assignment]
    return Mesh(sizes, dist.get_rank(), groups)
