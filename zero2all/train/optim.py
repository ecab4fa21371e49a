"""Parameter groups and the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.model.z2all import Z2all
from zero2all.train.config import OptimConfig

TABLES = ("embedding.weight", "head.weight")


def parameter_groups(model: Z2all, config: OptimConfig) -> list[dict[str, Any]]:
    """Two groups: what decays (matrices, by option the vocabulary tables) and what does not (norms, biases)."""
    decayed: list[torch.nn.Parameter] = []
    kept: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        decays = parameter.dim() > 1 and (config.decay_embeddings or name not in TABLES)
        (decayed if decays else kept).append(parameter)
    return [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def build_optimizer(model: Z2all, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW in the implementation the registry chose."""
    return model.ops.optimizer(
        parameter_groups(model, config), lr=config.lr_max, betas=(config.beta1, config.beta2), eps=config.eps
    )


def clip_gradient(model: Z2all, max_norm: float) -> torch.Tensor:
    """Scale the whole gradient down to `max_norm` where it is longer (0 leaves it alone); returns its length before."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
