"""Cross-entropy per token, in nats: the loss of each token apart, so that channels can be told apart for free."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation
from zero2all.ops.widen import widened


def torch_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(N, V) logits and (N,) targets -> (N,) losses in at least float32, by torch's kernel."""
    return F.cross_entropy(widened(logits), targets, reduction="none")


def eager_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logsumexp minus the target's logit: the definition."""
    wide = widened(logits)
    return wide.logsumexp(dim=-1) - wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


IMPLEMENTATIONS = (Implementation("torch", torch_cross_entropy), Implementation("eager", eager_cross_entropy))
