"""AdamW on float32 masters with clipping, skipping and the low-precision write, by our kernel or torch's loops.

Every implementation takes `Flat` buffers, the learning rate and the gradient's norm, a scalar on the device. Where
the norm is not finite nothing changes, not even the count of updates; where it is above `max_norm` the gradient is
scaled down to it.

triton   one pass over the buffers; nothing waits for the device
fused    torch's fused kernel, then a copy into the low-precision weights; nothing waits for the device
foreach  torch's grouped loop; the host looks at the norm
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

from zero2all.ops.implementation import Implementation, needs_triton


@dataclass(frozen=True)
class Flat:
    """Parameters with one weight decay, one after the other in flat buffers of equal length."""

    weights: Tensor
    """What the forward pass reads. The very tensor `masters` where no lower precision is used."""
    masters: Tensor
    gradients: Tensor
    firsts: Tensor
    """Running means of gradients."""
    seconds: Tensor
    """Running means of squared gradients."""
    slices: tuple[slice, ...]
    """Where each parameter lies; torch's loops go by them."""
    weight_decay: float


@dataclass(frozen=True)
class AdamW:
    """The constants of the update."""

    beta1: float
    beta2: float
    eps: float
    max_norm: float


Update = Callable[[list[Flat], Tensor, float, Tensor, AdamW], None]
"""(groups, updates made so far: a float64 scalar on the device, advanced here; learning rate, norm, constants)."""


def triton_adamw(groups: list[Flat], updates: Tensor, lr: float, norm: Tensor, constants: AdamW) -> None:
    """Our kernel."""
    from zero2all.ops.kernels.adamw import adamw_update, bias_corrections

    corrections = bias_corrections(updates, constants.beta1, constants.beta2)
    for group in groups:
        adamw_update(
            group.weights, group.masters, group.gradients, group.firsts, group.seconds, norm, corrections,
            max_norm=constants.max_norm, lr=lr, beta1=constants.beta1, beta2=constants.beta2, eps=constants.eps,
            weight_decay=group.weight_decay,
        )  # fmt: skip
    updates.add_(torch.isfinite(norm))


def _torch_adamw(loop: str, groups: list[Flat], updates: Tensor, lr: float, norm: Tensor, constants: AdamW) -> None:
    """One of torch's three loops."""
    longest = constants.max_norm
    shrink = (norm / longest).clamp(min=1.0) if longest > 0 else torch.ones_like(norm)
    options: dict[str, Any] = {}
    if loop == "fused":
        finite = torch.isfinite(norm)
        options = {"grad_scale": torch.where(finite, shrink, 1.0).float(), "found_inf": (~finite).float()}
    elif not torch.isfinite(norm):
        return
    else:
        for group in groups:
            group.gradients.div_(shrink.to(group.gradients.dtype))
    for group in groups:
        parts = [[flat[at] for at in group.slices] for flat in _buffers(group)]
        masters, gradients, firsts, seconds = parts
        # torch wants a count per parameter, and moves each on.
        counts = list(updates.float().repeat(len(masters)).unbind())
        adamw(
            masters, gradients, firsts, seconds, [], counts, foreach=loop == "foreach", fused=loop == "fused",
            amsgrad=False, beta1=constants.beta1, beta2=constants.beta2, lr=lr, weight_decay=group.weight_decay,
            eps=constants.eps, maximize=False, **options,
        )  # fmt: skip
        if group.weights is not group.masters:
            group.weights.copy_(group.masters)
    updates.add_(torch.isfinite(norm))


def _buffers(group: Flat) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return group.masters, group.gradients, group.firsts, group.seconds


fused_adamw = partial(_torch_adamw, "fused")
foreach_adamw = partial(_torch_adamw, "foreach")
eager_adamw = partial(_torch_adamw, "eager")


IMPLEMENTATIONS = (
    Implementation("triton", triton_adamw, needs_triton),
    Implementation("fused", fused_adamw),
    Implementation("foreach", foreach_adamw),
    Implementation("eager", eager_adamw),
)
