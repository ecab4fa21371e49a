"""Sharded data parallelism (FSDP2), and which part of a sharded tensor (DTensor) lies in this process.

Every process works on its own rows with the same weights.
`replicate`: each process has all weights; gradients are summed over the processes once a step.
`shard`: each process keeps a part of every weight, gradient and moment, and gathers a block's weights while it
computes with them. Memory for weights and optimizer falls with the number of processes; each pass moves the weights.

A plain tensor is its own, whole part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.model.z2all import Z2all
from zero2all.parallel.parameter_table import LogicalParameter
from zero2all.parallel.parts import TensorPart
from zero2all.parallel.world import World

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


def part_of(tensor: Tensor, parameter: LogicalParameter) -> TensorPart:
    """What this process holds of a logical parameter, whose holder (or its gradient) is `tensor`: FSDP2 cuts holders by
    rows over the shard dimension of the mesh. Shares memory with `tensor`."""
    values, first = local(tensor.detach()), box(tensor)[0].start
    rows, *rest = parameter.held.lengths
    begin, end = (min(max(row - first, 0), len(values)) for row in (parameter.first_row, parameter.first_row + rows))
    rows_before = min(max(first + begin - parameter.first_row, 0), rows)
    start = rows_before * math.prod(rest)
    return TensorPart.of_range(values[begin:end], parameter.shape, start, _shard_group(tensor), parameter.held)


def _shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The processes that share one copy of a tensor."""
    if _is_sharded(tensor):
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard() and tensor.device_mesh.size(dimension) > 1:
                return tensor.device_mesh.get_group(dimension)
    return None


def shard_model(model: Z2all, world: World, dtype: torch.dtype, with_masters: bool = True) -> None:
    """Shard every weight of a model on the meta device over the processes, and allocate the parts. They are kept in
    float32 (or float64; without masters in `dtype`) and gathered in `dtype`; gradients are summed, not averaged, in
    float32."""
    # Here, because it takes half as long as torch itself, in every start of runs that do not use it.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if not with_masters:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
    mesh = world.mesh.for_fsdp
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(model, "head_loss")
    model.to_empty(device=world.device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(model: Z2all, is_last_pass: bool) -> None:
    """Reduce gradients after the last micro-batch of a step only."""
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # FSDP2 adds it to what it shards
    if set_sync is not None:
        set_sync(is_last_pass)
