"""torch.compile around the blocks or the whole trunk of a model, in place.

`block` compiles one block and uses it for all of them; `trunk` compiles everything between the ids and the head,
which takes longer and lets the compiler see across blocks. The head and the loss stay outside: they work in chunks.
"""

from __future__ import annotations

import torch

from zero2all.model.z2all import Z2all


def compile_model(model: Z2all) -> None:
    """Do what the model's operators were resolved for (`ops.compile`)."""
    if model.ops.compile == "block":
        for block in model.blocks:
            block.compile(dynamic=False)
    elif model.ops.compile == "trunk":
        torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
        model.compile(dynamic=False)
