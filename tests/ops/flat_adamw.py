"""Some steps of AdamW over flat buffers: by an implementation, and by the formula."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.ops.agreement import random
from zero2all.ops.optimizer import AdamWConstants, Flat
from zero2all.ops.split_master import split

LR, CONSTANTS = 1e-2, AdamWConstants(0.9, 0.95, 1e-8)
NO = torch.tensor(False)
MAX_NORM = 4.0
STEPS, LENGTHS, DECAYS = 10, (1300, 77), (0.1, 0.0)
SLICES = ((slice(0, 5), slice(8, 1300)), (slice(0, 77),))
"""Gaps between parameters, as alignment leaves them."""


def begun() -> list[Tensor]:
    return [random(length, seed=50 + number) for number, length in enumerate(LENGTHS)]


def gradients() -> list[list[Tensor]]:
    """Longer than MAX_NORM in even steps, shorter in odd ones; zeros in the gap."""
    rows = [[random(length, seed=100 * step + group) for group, length in enumerate(LENGTHS)] for step in range(STEPS)]
    for step, row in enumerate(rows):
        row[0][5:8] = 0.0
        rows[step] = [values * (1.0 if step % 2 == 0 else 0.0625) for values in row]
    return rows


def by_formula(max_norm: float) -> list[Tensor]:
    """The weights of each group; gradients are clipped together, or not where `max_norm` is 0."""
    weights, beta1, beta2 = begun(), CONSTANTS.beta1, CONSTANTS.beta2
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step, of_step in enumerate(gradients(), 1):
        scale = min(1.0, max_norm / float(torch.cat(of_step).norm())) if max_norm else 1.0
        for number, (decay, gradient) in enumerate(zip(DECAYS, of_step, strict=True)):
            means[number] = beta1 * means[number] + (1 - beta1) * scale * gradient
            squares[number] = beta2 * squares[number] + (1 - beta2) * (scale * gradient) ** 2
            spread = (squares[number] / (1 - beta2**step)).sqrt() + CONSTANTS.eps
            weights[number] = weights[number] * (1 - LR * decay) - LR * means[number] / (1 - beta1**step) / spread
    return weights


def updated(
    function: Callable[..., None],
    device: str = "cpu",
    weights_in: torch.dtype = torch.float32,
    masters_in: torch.dtype = torch.float32,
    max_norm: float = MAX_NORM,
    split_masters: bool = False,
) -> tuple[list[Flat], Tensor]:
    """The groups after all steps, and the count of updates."""
    groups, updates = [], torch.zeros((), device=device)
    for values, slices, decay in zip(begun(), SLICES, DECAYS, strict=True):
        masters = values.to(device, masters_in)
        weights = masters if weights_in == masters_in else masters.to(weights_in)
        zeros = [torch.zeros_like(masters) for _ in range(3)]
        weights, masters = split(masters) if split_masters else (weights, masters)
        groups.append(Flat(weights, masters, *zeros, slices=slices, weight_decay=decay, lr=LR))
    for of_step in gradients():
        for group, gradient in zip(groups, of_step, strict=True):
            group.gradients.copy_(gradient)
        norm = torch.cat(of_step).norm().to(device)
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        function(groups, updates, scale.float(), NO.to(device), CONSTANTS)
    return groups, updates


def buffers_of(groups: list[Flat], updates: Tensor) -> list[Tensor]:
    """All that a skipped step must leave as it is."""
    names = ("weights", "masters", "firsts", "seconds")
    return [*(getattr(group, name) for group in groups for name in names), updates]


def assert_weights_are_rounded_masters(function: Callable[..., None], device: str = "cpu") -> None:
    groups, alone = (updated(function, device, dtype)[0] for dtype in (torch.bfloat16, torch.float32))
    for group, wide in zip(groups, alone, strict=True):
        assert torch.equal(group.masters, wide.masters)
        assert torch.equal(group.weights, group.masters.bfloat16())
