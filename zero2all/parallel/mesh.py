"""The processes of a run as a mesh with named axes.

Every process has a coordinate on each axis. An axis of size 1 has no group and costs nothing.

    replicate   copies of everything; gradients are summed
    shard       each process keeps a part of the states, gradients or weights (ZeRO, FSDP); gradients are summed

Later axes (pp, cp, tp) stand beside them. Code names the axis, or the product of axes, that it means:

    batch       replicate x shard: each process has rows of its own
    loss        all processes whose tokens make up the batch; the same as batch until there is a cp axis
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("replicate", "shard")


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


@dataclass(frozen=True)
class Mesh:
    """The axes of a run; by default those of one process."""

    replicate: Axis = field(default_factory=Axis)
    shard: Axis = field(default_factory=Axis)
    batch: Axis = field(default_factory=Axis)
    torch_mesh: DeviceMesh | None = None  # for FSDP2

    @property
    def loss(self) -> Axis:
        """The processes over which losses and counts are summed."""
        return self.batch


def make_mesh(device: torch.device, replicate: int, shard: int) -> Mesh:
    """The mesh of all processes of the process group, which are `replicate * shard`; neighbours share a shard group,
    because they are more likely to be joined by a fast link."""
    size = dist.get_world_size()
    assert replicate * shard == size, f"{replicate} x {shard} is not the number of processes ({size})"
    torch_mesh = init_device_mesh(device.type, (replicate, shard), mesh_dim_names=AXES)

    def axis(name: str) -> Axis:
        length = torch_mesh[name].size()
        if length == 1:
            return Axis()
        # The group of all processes exists already; another one would take more memory and connections.
        group = dist.group.WORLD if length == size else torch_mesh.get_group(name)
        return Axis(torch_mesh.get_local_rank(name), length, group)

    return Mesh(axis("replicate"), axis("shard"), Axis(dist.get_rank(), size, dist.group.WORLD), torch_mesh)
