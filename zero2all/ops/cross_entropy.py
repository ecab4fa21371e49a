"""Cross-entropy per token, in nats: one loss per token, so that the loss of each channel costs nothing extra.

Used only where `linear_cross_entropy` is off: its other implementations never hold all logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.footprint import Footprint, Head, Moment, Sizes
from zero2all.ops.implementation import Implementation, needs_triton
from zero2all.ops.precision import widened

CrossEntropyOp = Callable[[Tensor, Tensor], Tensor]
"""Logits (N, V) and targets (N,) -> losses (N,)."""


def torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, V) logits and (N,) targets -> (N,) losses in at least float32, by torch's kernel."""
    return F.cross_entropy(widened(logits), targets, reduction="none")


def eager_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logsumexp minus the target's logit: the definition."""
    wide = widened(logits)
    return wide.logsumexp(dim=-1) - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def triton_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Our kernel: the logits are overwritten with their gradient."""
    from zero2all.ops.kernels.cross_entropy import triton_cross_entropy as kernel

    return kernel(logits, targets)


def _logits(sizes: Sizes) -> float:
    return float(sizes.value_bytes * sizes.vocab_rows)


def _copy(sizes: Sizes) -> float:
    """The logits in float32, where they are narrower."""
    return float(sizes.wide_bytes * sizes.vocab_rows) if sizes.value_bytes < sizes.wide_bytes else 0.0


def _after_loss(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradient of the logits makes that of the hidden states and that of the head."""
    of_head = float(sizes.value_bytes * sizes.vocab_rows * sizes.hidden_size)
    return (Moment(_logits(sizes) + sizes.value_bytes * sizes.hidden_size, of_head),)


def _forward_in_place(sizes: Sizes) -> tuple[Moment, ...]:
    """The logits, which become their gradient."""
    return (Moment(_logits(sizes)),)


def _forward_by_torch(sizes: Sizes) -> tuple[Moment, ...]:
    """Logits, their copy, log-probabilities."""
    return (Moment(_logits(sizes) + _copy(sizes) + sizes.wide_bytes * sizes.vocab_rows),)


def _backward_by_torch(sizes: Sizes) -> tuple[Moment, ...]:
    """Log-probabilities, their gradient and that of the logits in float32, which is then rounded."""
    return (Moment(3.0 * sizes.wide_bytes * sizes.vocab_rows), *_after_loss(sizes))


def _forward_by_formula(sizes: Sizes) -> tuple[Moment, ...]:
    """Logits and their copy."""
    return (Moment(_logits(sizes) + _copy(sizes)),)


def _backward_by_formula(sizes: Sizes) -> tuple[Moment, ...]:
    """The logits in float32; the gradient of the target's logit, a matrix of zeros but for one value a row; and of
    logsumexp the difference, its exponential and the product with the gradient."""
    return (Moment(5.0 * sizes.wide_bytes * sizes.vocab_rows), *_after_loss(sizes))


IN_PLACE = Footprint(head=Head(_forward_in_place, _after_loss, keeps_hidden=True))
BY_TORCH = Footprint(head=Head(_forward_by_torch, _backward_by_torch, keeps_hidden=True))
BY_FORMULA = Footprint(head=Head(_forward_by_formula, _backward_by_formula, keeps_hidden=True))

IMPLEMENTATIONS: tuple[Implementation[CrossEntropyOp], ...] = (
    Implementation("triton", triton_cross_entropy, needs_triton, compile_safe=False, footprint=IN_PLACE),
    Implementation("torch", torch_cross_entropy, footprint=BY_TORCH),
    Implementation("eager", eager_cross_entropy, footprint=BY_FORMULA),
)
