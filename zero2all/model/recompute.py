"""Activation checkpointing: less is saved for the backward pass, and what is missing is computed again.

none       everything the backward pass needs is saved
full       of each block only its inputs; the block's forward runs again in the backward pass
every_n    the same for every n-th block, beginning with the first; the others save everything
selective  of each block its inputs and the results of matmuls and of fused attention, which are the expensive ones;
           norms, rotary positions, SwiGLU and dropout are computed again
groups     of each n consecutive blocks only the inputs of the first; the forward of the whole group runs again, and
           the activations of n blocks are there at once. Least memory where n is about the root of the layers

Loss and gradients keep their bits: the same operations run on the same numbers, and dropout draws the same masks,
because the random state of the first pass is restored. What a backward adds to a gradient sink is added once.

Under `selective` three results are computed again nevertheless: the qkv projection where our rotary kernel overwrites
its output (not with qk_norm), which would be rotated twice; attention with dropout, because what draws after it would
draw other numbers; and attention by plain matmuls (`ops.attention: math`), whose matrix of weights is too large to
save.

Apply it before compilation and before sharding. Modules and parameters keep their names.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zero2all.model.z2all import Block, Z2all

KINDS = ("none", "full", "every_n", "selective", "groups")


class RecomputedBlock(Block):
    """A block whose forward runs again in the backward pass. It takes over the submodules of a `Block`."""

    def __init__(self, block: Block, run_twice: Callable[..., Any]) -> None:
        nn.Module.__init__(self)
        for name, module in block.named_children():
            self.add_module(name, module)
        self.run_twice = run_twice
        """torch's checkpoint with its options, as one value: torch.compile can trace a partial, but not an attribute
        that holds an option."""
        self.train(block.training)

    def forward(
        self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, documents: Any | None
    ) -> tuple[Tensor, Tensor]:
        """As `Block`; without gradients there is no difference."""
        if not torch.is_grad_enabled():
            return super().forward(x, branch, cos, sin, documents)
        after: tuple[Tensor, Tensor] = self.run_twice(super().forward, x, branch, cos, sin, documents)
        return after


def apply_recompute(model: Z2all, kind: str, every_n: int = 1) -> None:
    """Replace blocks of `model` by ones that save less, or change how they are called; `every_n` is for the kind of
    that name and for `groups`."""
    assert kind in KINDS, f"kind is {kind!r}, not one of {KINDS}"
    assert every_n >= 1, f"every_n is {every_n}"
    config = model.config
    options: dict[str, Any] = {"preserve_rng_state": config.attention_dropout > 0 or config.residual_dropout > 0}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy(model))
    run_twice = partial(checkpoint, use_reentrant=False, **options)
    if kind == "groups":
        assert model.arrange is None, "recomputation is applied once"
        model.arrange = partial(_groups, run_twice, every_n)
        return
    for number, block in enumerate(model.blocks):
        if kind == "none" or (kind == "every_n" and number % every_n):
            continue
        assert type(block) is Block, "recomputation is applied once, before the model is sharded"
        model.blocks[number] = RecomputedBlock(block, run_twice)


def _groups(run_twice: Callable[..., Any], size: int, blocks: Sequence[nn.Module]) -> Sequence[Callable[..., Any]]:
    """The blocks of a pass, `size` of them as one call that runs again in the backward pass."""
    if not torch.is_grad_enabled():
        return blocks
    return [partial(run_twice, partial(_chain, blocks[at : at + size])) for at in range(0, len(blocks), size)]


def _chain(blocks: Sequence[nn.Module], x: Tensor, branch: Tensor | None, *shared: Any) -> tuple[Tensor, Tensor | None]:
    for block in blocks:
        x, branch = block(x, branch, *shared)
    return x, branch


MATMULS = {"aten::mm": 1, "aten::addmm": 2, "aten::_scaled_mm": 1, "aten::_grouped_mm": 1}
"""Matmuls of linear layers and experts, and which argument is the right-hand matrix (inputs x outputs)."""
FUSED_ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)


def _policy(model: Z2all) -> Callable[..., CheckpointPolicy]:
    # The width of the tensor itself: tensor parallelism cuts it.
    qkv = model.get_parameter("blocks.0.attention.qkv.weight")
    overwritten = len(qkv) if model.ops.footprints["rope"].overwrites(model.config.qk_norm) else None
    saves_attention = model.config.attention_dropout == 0

    def save_what_is_expensive(_: Any, operation: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
        schema = getattr(operation, "_schema", None)
        name = "" if schema is None else schema.name
        if name in FUSED_ATTENTION and saves_attention:
            return CheckpointPolicy.MUST_SAVE
        # Recognised by its width. Another matmul of the same width is computed again too, which is only slower.
        if name in MATMULS and arguments[MATMULS[name]].shape[-1] != overwritten:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return save_what_is_expensive
