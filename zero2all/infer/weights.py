"""The weights of a model as the engine reads them: tensors by layer, without modules around them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from zero2all.model.config import ModelConfig
from zero2all.model.moe import MixtureOfExperts
from zero2all.model.z2all import Block, Z2all
from zero2all.ops.registry import Ops


@dataclass(frozen=True)
class LayerWeights:
    """One block. It has either a feed-forward part (gate_up_pairs, down) or experts."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    feed_forward_norm: Tensor
    gate_up_pairs: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down: Tensor | None = None
    down_bias: Tensor | None = None
    experts: MixtureOfExperts | None = None


@dataclass(frozen=True)
class Weights:
    """A whole model."""

    config: ModelConfig
    ops: Ops
    embedding: Tensor  # (V, C)
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor  # (vocab_ids, C): without padding rows
    cos: Tensor  # (max_seq_len, D / 2)
    sin: Tensor


def weights_of(model: Z2all) -> Weights:
    """The tensors of `model`; nothing is copied."""
    layers = [_layer(block) for block in model.blocks if isinstance(block, Block)]
    config, embedding, norm = model.config, model.embedding.weight.detach(), model.norm.weight.detach()
    head = model.head_weight.detach()[: config.vocab_ids]
    return Weights(config, model.ops, embedding, layers, norm, head, model.cos, model.sin)


def _layer(block: Block) -> LayerWeights:
    attention, feed_forward = block.attention, block.feed_forward
    inner: dict[str, Tensor | MixtureOfExperts | None]
    if isinstance(feed_forward, MixtureOfExperts):
        inner = {"experts": feed_forward}
    else:
        inner = {
            "gate_up_pairs": feed_forward.gate_up_pairs.weight.detach(),
            "gate_up_bias": _detached(feed_forward.gate_up_pairs.bias),
            "down": feed_forward.down.weight.detach(),
            "down_bias": _detached(feed_forward.down.bias),
        }
    return LayerWeights(
        attention_norm=block.attention_norm.weight.detach(),
        qkv=attention.qkv.weight.detach(),
        qkv_bias=_detached(attention.qkv.bias),
        out=attention.out.weight.detach(),
        out_bias=_detached(attention.out.bias),
        feed_forward_norm=block.feed_forward_norm.weight.detach(),
        **inner,  # type: ignore[arg-type]
    )


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias for rows x (N, in)."""
    return F.linear(x, weight, bias)
