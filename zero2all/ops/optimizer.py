"""AdamW, by each of torch's three loops: one parameter at a time, grouped, or one fused kernel."""

from __future__ import annotations

from typing import Any

import torch

from zero2all.ops.implementation import Implementation


def fused_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    """One kernel reads and writes each value once."""
    return torch.optim.AdamW(groups, fused=True, **settings)


def foreach_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    """One kernel per arithmetic step over all parameters."""
    return torch.optim.AdamW(groups, foreach=True, **settings)


def eager_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    """One parameter after the other: the reference."""
    return torch.optim.AdamW(groups, foreach=False, fused=False, **settings)


IMPLEMENTATIONS = (
    Implementation("fused", fused_adamw),
    Implementation("foreach", foreach_adamw),
    Implementation("eager", eager_adamw),
)
