"""torch.compile around the blocks or the whole trunk of a model, in place.

`block` compiles one block and uses it for all of them; `trunk` compiles everything from the ids to the last norm, which
takes longer and lets the compiler optimise across blocks. The head and the loss are not compiled: they work in chunks.
"""

from __future__ import annotations

import torch

from zero2all.model.z2all import Z2all


def compile_model(model: Z2all) -> None:
    """Compile what `ops.compile` says."""
    if model.ops.compile == "block":
        for block in model.blocks:
            block.compile(dynamic=False)
    elif model.ops.compile == "trunk":
        torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
        model.compile(dynamic=False)
