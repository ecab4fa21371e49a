"""What the operators compute, by definition: plain formulas in torch, to be evaluated in float64."""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def swiglu(pairs: Tensor) -> Tensor:
    gate, up = pairs[..., 0::2], pairs[..., 1::2]
    return gate * gate.sigmoid() * up


def feed_forward(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
) -> Tensor:
    return linear(swiglu(linear(x, gate_up, gate_up_bias)), down, down_bias)


def rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total / (total.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight, total


def rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each pair as one complex number, turned by multiplication."""
    half = qkv.shape[-1] // 2
    angles = torch.complex(cos.double(), sin.double()).unsqueeze(-2)  # (..., T, 1, D/2)
    turned = torch.complex(qkv[..., :half], qkv[..., half:]) * angles
    turned = torch.cat((turned.real, turned.imag), dim=-1)
    query, key, value = turned[:, :, :heads], turned[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def normed_rope(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every query and key head has unit mean square (eps is 0.01), then its weights, then the rotation."""
    query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=2)
    query, key = rms_norm(query, None, query_weight, 0.01)[0], rms_norm(key, None, key_weight, 0.01)[0]
    return rope(torch.cat((query, key, value), dim=2), cos, sin, heads, kv_heads)


def losses_and_penalties(logits: Tensor, targets: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """A target below zero has neither."""
    logsum = logits.logsumexp(dim=-1)
    counted = (targets >= 0).double()
    losses = (logsum - logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)) * counted
    return losses, z * logsum.square() * counted


def head_and_loss(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float
) -> tuple[Tensor, Tensor]:
    """The sum and the losses by their definitions, over all logits at once."""
    losses, penalties = losses_and_penalties(hidden @ head[:vocab_size].t(), targets, z)
    return (weights * (losses + penalties)).sum(), losses.detach()
