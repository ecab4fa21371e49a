"""Activation checkpointing: less is kept for the backward pass, and what is missing is computed again.

none       everything the backward pass needs is kept
full       of each block only what goes in; the block's forward runs once more in the backward pass
every_n    the same for every n-th block, beginning with the first; the others keep everything
selective  of each block what goes in and what is dear to compute: the outputs of matmuls and of fused attention;
           norms, rotary positions, SwiGLU and dropout are computed again

Loss and gradients keep their bits: the same operations run on the same numbers, and dropout draws the same masks,
because the random state of the first pass is put back. The backward pass walks the graph of the first forward pass, in
which only the kept tensors are filled in anew, so what a backward does besides (adding to `main_grad`) happens once.

Three things need care under `selective`, where some results come from the store instead of being computed:
- Our rotary kernel overwrites the output of the qkv projection, so that one may not be stored: it would be turned
  twice. It is computed again.
- Stored attention draws no random numbers the second time, and whatever draws after it would draw others. With
  attention dropout, attention is computed again.
- Attention by plain matmuls (`ops.attention: math`) is computed again: its matrix of weights is what one wants rid of.

Apply it before compilation and before sharding. A block stays the module it is, with the same parameter names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero2all.model.z2all import Block, KeyValueCache, Z2all

KINDS = ("none", "full", "every_n", "selective")


class RecomputedBlock(Block):
    """A block whose forward runs again in the backward pass. Made from a `Block` by `apply_recompute`."""

    run_twice: Callable[..., Any]
    """torch's checkpoint with its options, as one value: torch.compile looks into a partial, not into an attribute that
    holds an option."""

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: KeyValueCache | None,
        segments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `Block`; where no gradient will be asked for, nothing is different."""
        if cache is not None or not torch.is_grad_enabled():
            return super().forward(x, branch, cos, sin, cache, segments)
        after: tuple[Tensor, Tensor] = self.run_twice(super().forward, x, branch, cos, sin, None, segments)
        return after


def apply_recompute(model: Z2all, kind: str, every_n: int = 1) -> None:
    """Let the blocks of `model` keep less, in place; `every_n` counts for the kind of that name."""
    assert kind in KINDS, f"kind is {kind!r}, not one of {KINDS}"
    assert every_n >= 1, f"every_n is {every_n}"
    config = model.config
    options: dict[str, Any] = {"preserve_rng_state": config.attention_dropout > 0 or config.residual_dropout > 0}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy(model))
    for number, block in enumerate(model.blocks):
        if kind == "none" or (kind == "every_n" and number % every_n):
            continue
        assert type(block) is Block, "recomputation is applied once, before the model is sharded"
        block.__class__ = RecomputedBlock
        assert isinstance(block, RecomputedBlock)
        block.run_twice = partial(checkpoint, use_reentrant=False, **options)


# ---- what `selective` keeps ----------------------------------------------------------------------------------------

MATMULS = {"aten::mm": 1, "aten::addmm": 2, "aten::_scaled_mm": 1}
"""Matmuls of linear layers, and which argument is the right-hand matrix (inputs x outputs)."""
FUSED_ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)


def _policy(model: Z2all) -> Callable[..., CheckpointPolicy]:
    config = model.config
    taken = model.ops.taken
    qkv_columns = (config.heads + 2 * config.kv_heads) * config.head_size
    overwritten = qkv_columns if taken["rope"] == "triton" else None
    keeps_attention = config.attention_dropout == 0

    def keep_what_is_dear(_: Any, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        name = "" if schema is None else schema.name
        if name in FUSED_ATTENTION and keeps_attention:
            return CheckpointPolicy.MUST_SAVE
        # Told apart by its width: another matmul of that very width is computed again too, which is only slower.
        if name in MATMULS and arguments[MATMULS[name]].shape[1] != overwritten:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return keep_what_is_dear
