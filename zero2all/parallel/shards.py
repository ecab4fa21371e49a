"""Sharded tensors (DTensor): which part of one lies in this process, and how parts become whole.

A plain tensor is its own, whole part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import EllipsisType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zero2all.parallel.layout import LogicalParameter
from zero2all.parallel.parts import Part


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies in this process, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def has_part(tensor: Tensor) -> bool:
    """Whether this process has a part: a DTensor may be spread over some processes only."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from every process that has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def box(tensor: Tensor) -> tuple[slice, ...]:
    """Where the part of this process lies in the whole."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, length) for length in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))


def part_of(tensor: Tensor) -> Part:
    """What this process holds of a tensor, as a part."""
    if not isinstance(tensor, DTensor):
        return Part.whole(tensor)
    shape = tuple(tensor.shape)
    if not has_part(tensor):
        return Part(local(tensor).reshape(-1)[:0], shape, (0,) * len(shape), shape)
    place = box(tensor)
    lengths = tuple(along.stop - along.start for along in place)
    return Part(local(tensor), shape, tuple(along.start for along in place), lengths)


def logical_parts(table: Sequence[LogicalParameter], tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Tensors named '<anything>/<tensor of the model>' as parts under the names of the logical parameters in them:
    'model/…attention.qkv.weight' gives 'model/…attention.q.weight' and so on. A tensor that has something for each row
    of the model's is cut at the same rows; each logical parameter shares one that has not. Others keep their names."""
    inside: dict[str, list[LogicalParameter]] = {}
    for parameter in table:
        inside.setdefault(parameter.holder, []).append(parameter)
    parts = {}
    for name, tensor in tensors.items():
        prefix, slash, holder = name.rpartition("/")
        part = part_of(tensor)
        rows = sum(parameter.shape[0] for parameter in inside.get(holder, ()))
        for parameter in inside.get(holder, ()):
            is_by_row = part.shape[:1] == (rows,)
            own = _rows_of(part, parameter.first_row, parameter.shape[0]) if is_by_row else part
            parts[f"{prefix}{slash}{parameter.name}"] = own
        if holder not in inside:
            parts[name] = part
    return parts


def _rows_of(part: Part, first: int, count: int) -> Part:
    """The same box of the tensor that consists of some rows of this one."""
    offset, length = part.offsets[0], part.lengths[0]
    begin, end = (min(max(at - offset, 0), length) for at in (first, first + count))
    values = part.values[begin:end]
    at = min(max(offset - first, 0), count)
    return Part(values, (count, *part.shape[1:]), (at, *part.offsets[1:]), (len(values), *part.lengths[1:]))


def spread_like(parameter: Tensor, part: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """`part` as this process's part of a tensor that is sharded like `parameter`, of the same shape or of `shape`."""
    if not isinstance(parameter, DTensor):
        return part
    size = torch.Size(parameter.shape if shape is None else shape)
    strides = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=strides
    )


def spread_dimensions(parameter: Tensor) -> set[int]:
    """The dimensions along which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return set()
    return {placement.dim % parameter.dim() for placement in parameter.placements if hasattr(placement, "dim")}


def gradient_part(parameter: Tensor) -> Tensor | None:
    """This process's part of the gradient, sharded like the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local()
    return gradient


def sum_over_parts(partial_sum: Tensor, parameter: Tensor) -> Tensor:
    """Add up, in place, what every process computed from its part of `parameter`."""
    if isinstance(parameter, DTensor):
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(partial_sum, group=parameter.device_mesh.get_group(dimension))
    return partial_sum


def flat_index(tensor: Tensor, rows: slice | EllipsisType = ...) -> Tensor:
    """The place in the whole of each value of this process's part, or of some rows of that: int32, in their shape."""
    device = local(tensor).device
    index = torch.zeros((), dtype=torch.int32, device=device)
    stride = tensor.numel()
    place = list(box(tensor))
    if isinstance(rows, slice):
        place[0] = slice(place[0].start + rows.start, place[0].start + rows.stop)
    for length, along in zip(tensor.shape, place, strict=True):
        stride //= max(1, length)
        steps = torch.arange(along.start, along.stop, dtype=torch.int32, device=device) * stride
        index = index.unsqueeze(-1) + steps
    return index
