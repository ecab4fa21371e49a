"""Data parallelism: every process works on its own rows with the same weights.

`replicate`: each process has all weights; gradients are summed over the processes once a step.
`shard`: FSDP2; each process keeps a part of every weight, gradient and moment, and gathers a block's weights while it
computes with them. Memory for weights and optimizer falls with the number of processes; each pass moves the weights.
"""

from __future__ import annotations

import torch

from zero2all.model.z2all import Z2all
from zero2all.parallel.world import World


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
