"""AdamW on float32 masters with scaling, skipping and the low-precision write, by our kernel or torch's loops.

Every implementation takes `Flat` buffers, a factor on the gradient (clipping, loss scaling) and a flag to skip the
step, both scalars on the device. A skipped step changes nothing, not even the count of updates.

triton   one pass over the buffers; nothing waits for the device
fused    torch's fused kernel, then a copy into the low-precision weights; nothing waits for the device
foreach  torch's grouped loop; the host reads the flag and so waits for the device
eager    one parameter after the other: the reference
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from zero2all.ops.footprint import Footprint
from zero2all.ops.implementation import Implementation, needs_triton


@dataclass
class Flat:
    """Parameters with the same learning rate and weight decay, concatenated in flat buffers of equal length."""

    weights: Tensor
    """What the forward pass reads; the same tensor as `masters` where no lower precision is used."""
    masters: Tensor
    """float32 (or float64). `triton` also takes int16: what bfloat16 `weights` lack (`zero2all.ops.split_master`)."""
    gradients: Tensor
    firsts: Tensor  # running means of gradients
    seconds: Tensor  # running means of squared gradients
    slices: tuple[slice, ...]  # the slice of each parameter, for torch's loops
    weight_decay: float
    lr: float = 0.0


@dataclass(frozen=True)
class AdamWConstants:
    """The constants of the update."""

    beta1: float
    beta2: float
    eps: float


OptimizerOp = Callable[[list[Flat], Tensor, Tensor, Tensor, AdamWConstants], None]
"""(groups, updates made so far: a float32 scalar on the device, advanced here unless the step is skipped; factor on the
gradient, float32; whether to skip, bool; constants)."""


def triton_adamw(groups: list[Flat], updates: Tensor, scale: Tensor, skip: Tensor, constants: AdamWConstants) -> None:
    """Our kernel."""
    from zero2all.ops.kernels.adamw import adamw_update, bias_corrections

    corrections = bias_corrections(updates, constants.beta1, constants.beta2)
    flag = skip.int()
    for group in groups:
        adamw_update(
            group.weights, group.masters, group.gradients, group.firsts, group.seconds, scale, flag, corrections,
            lr=group.lr, beta1=constants.beta1, beta2=constants.beta2, eps=constants.eps,
            weight_decay=group.weight_decay,
        )  # fmt: skip
    updates.add_(~skip)


def _torch_adamw(
    loop: str, groups: list[Flat], updates: Tensor, scale: Tensor, skip: Tensor, constants: AdamWConstants
) -> None:
    """One of torch's three loops."""
    options: dict[str, Any] = {}
    # The fused kernel divides by grad_scale, and reads it in float32: not enough for a float64 model.
    scales_itself = loop == "fused" and groups[0].masters.dtype == torch.float32
    if loop == "fused":
        options = {"grad_scale": (1.0 / scale).float() if scales_itself else None, "found_inf": skip.float()}
    elif skip:  # the host waits for the device here
        return
    for group in groups:
        if not scales_itself:
            group.gradients.mul_(scale.to(group.gradients.dtype))
        buffers = (group.masters, group.gradients, group.firsts, group.seconds)
        masters, gradients, firsts, seconds = ([flat[at] for at in group.slices] for flat in buffers)
        # torch takes a count per parameter, and advances each.
        counts = list(updates.float().repeat(len(masters)).unbind())
        adamw(
            masters, gradients, firsts, seconds, [], counts, foreach=loop == "foreach", fused=loop == "fused",
            amsgrad=False, beta1=constants.beta1, beta2=constants.beta2, lr=group.lr,
            weight_decay=group.weight_decay, eps=constants.eps, maximize=False, **options,
        )  # fmt: skip
        if group.weights is not group.masters:
            group.weights.copy_(group.masters)
    updates.add_(~skip)


fused_adamw = partial(_torch_adamw, "fused")
foreach_adamw = partial(_torch_adamw, "foreach")
eager_adamw = partial(_torch_adamw, "eager")


IMPLEMENTATIONS: tuple[Implementation[OptimizerOp], ...] = (
    Implementation("triton", triton_adamw, needs_triton, footprint=Footprint(splits_masters=True)),
    Implementation("fused", fused_adamw),
    # Square roots of all second moments, and of one parameter after the other the update too.
    Implementation("foreach", foreach_adamw, footprint=Footprint(update_bytes_per_value=4.0)),
    Implementation("eager", eager_adamw, footprint=Footprint(update_bytes_of_largest=8.0)),
)
