"""Cross-entropy per token, in nats: one loss per token, so that the loss of each channel costs nothing extra.

Used only where `linear_cross_entropy` is off: its other implementations never hold all logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.footprint import Footprint, wide_logits
from zero2all.ops.implementation import Implementation, needs_liger, needs_triton
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


def liger_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """liger-kernel's, which also overwrites the logits with their gradient."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    losses, *_ = LigerCrossEntropyFunction.apply(logits, targets, None, -100, 0.0, 0.0, "none")
    return widened(losses)


def triton_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Our kernel: the logits are overwritten with their gradient."""
    from zero2all.ops.kernels.cross_entropy import triton_cross_entropy as kernel

    return kernel(logits, targets)


IMPLEMENTATIONS: tuple[Implementation[CrossEntropyOp], ...] = (
    Implementation("triton", triton_cross_entropy, needs_triton, compile_safe=False),
    Implementation("torch", torch_cross_entropy, footprint=Footprint(logit_bytes=wide_logits)),
    Implementation("eager", eager_cross_entropy, footprint=Footprint(logit_bytes=wide_logits)),
    Implementation("liger", liger_cross_entropy, needs_liger, compile_safe=False),
)
