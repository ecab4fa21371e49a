"""Sharded tensors (DTensor): which part of one lies in this process. A plain tensor is its own, whole part."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import Tensor

from zero2all.parallel.layout import LogicalParameter
from zero2all.parallel.parts import Part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, asked without the seconds that it takes to import these."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process, sharing its memory."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def box(tensor: Tensor) -> tuple[slice, ...]:
    """Where the part of this process lies in the whole."""
    if not _is_sharded(tensor):
        return tuple(slice(0, length) for length in tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))


def part_of(tensor: Tensor, parameter: LogicalParameter) -> Part:
    """What this process holds of a logical parameter, whose holder (or its gradient) is `tensor`: FSDP2 cuts holders by
    rows over the shard dimension of the mesh. Shares memory with `tensor`."""
    values, first = local(tensor.detach()), box(tensor)[0].start
    rows, *rest = parameter.held.lengths
    begin, end = (min(max(row - first, 0), len(values)) for row in (parameter.first_row, parameter.first_row + rows))
    rows_before = min(max(first + begin - parameter.first_row, 0), rows)
    start = rows_before * math.prod(rest)
    return Part.of_range(values[begin:end], parameter.shape, start, _shard_group(tensor), parameter.held)


def _shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The processes that share one copy of a tensor."""
    if _is_sharded(tensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard() and tensor.device_mesh.size(dimension) > 1:
                return tensor.device_mesh.get_group(dimension)
    return None
