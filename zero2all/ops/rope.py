"""Rotary position embedding in the rotate-half layout that Hugging Face checkpoints use, after an optional RMSNorm.

Dimension d of the first half of a head is paired with dimension d of the second half; the pair is rotated by
position x frequency[d]. Every implementation takes the output of the qkv projection (B, T, Hq + 2 Hk, D), cos and sin,
(T, D/2) or (B, T, D/2) where rows have positions of their own, and the numbers of heads. It returns query, key and
value (B, H, T, D), the first two rotated. The projection's output may be overwritten.

With a `QkNorm`, every query and key head h is first h / sqrt(mean(h^2) + eps) * weight, in at least float32 like the
rotation, with one rounding at the end. Its backward pass needs the heads as they were, so nothing is overwritten then
while gradients are computed.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.implementation import Implementation, needs_triton
from zero2all.ops.precision import widened


class QkNorm(NamedTuple):
    """The weights of the norms of query and key heads, (D,) each."""

    query: Tensor
    key: Tensor
    eps: float


class RopeOp(Protocol):
    """(qkv, cos, sin, query heads, key/value heads, norm) -> (query, key, value)."""

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norm: QkNorm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See above."""


def eager_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norm: QkNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula."""
    query, key, value = qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    turned = [_rotated(each, cos, sin).to(qkv.dtype) for each in _normed(query, key, norm)]
    return turned[0], turned[1], value


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = widened(heads).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _normed(query: Tensor, key: Tensor, norm: QkNorm | None) -> tuple[Tensor, Tensor]:
    """Both normalised, in at least float32."""
    if norm is None:
        return query, key
    return normed_heads(query, norm.query, norm.eps), normed_heads(key, norm.key, norm.eps)


def normed_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Heads (..., D) of unit mean square, times the weight (D,); in at least float32."""
    wide = widened(heads)
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight


def triton_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norm: QkNorm | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Our kernel: rotates in place, copies nothing; with a norm only where no gradient is needed."""
    from zero2all.ops.kernels.rope import triton_rope as kernel

    return kernel(qkv, cos, sin, heads, kv_heads, norm)


def _saved(sizes: Sizes) -> float:
    """Rotated copies of query and key; with a norm also both in float32 before and after it, and its root."""
    turned = sizes.query_size + sizes.kv_size
    if not sizes.qk_norm:
        return float(sizes.value_bytes * turned)
    wide = sizes.wide_bytes * (turned if sizes.value_bytes == sizes.wide_bytes else 2 * turned)
    return float(sizes.value_bytes * turned + wide + sizes.wide_bytes * (sizes.heads + sizes.kv_heads))


def _saved_by_kernel(sizes: Sizes) -> float:
    """Nothing, or with a norm the rotated copies."""
    return float(sizes.value_bytes * (sizes.query_size + sizes.kv_size)) if sizes.qk_norm else 0.0


def _gradient(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradient of the projection's output, in one tensor."""
    return (Moment(sizes.value_bytes * (sizes.query_size + 2.0 * sizes.kv_size)),)


def _gradient_in_steps(sizes: Sizes) -> tuple[Moment, ...]:
    """The same, and products of query and key in float32: two, with a norm more."""
    turned = sizes.query_size + sizes.kv_size
    products = 4.0 if sizes.qk_norm else 2.0
    return (Moment(_gradient(sizes)[0].per_token + products * sizes.wide_bytes * turned),)


COPIES = Footprint(_saved, backward=_gradient_in_steps)
IN_PLACE = Footprint(_saved_by_kernel, backward=_gradient, overwrites_input=True)

IMPLEMENTATIONS: tuple[Implementation[RopeOp], ...] = (
    Implementation("triton", triton_rope, needs_triton, compile_safe=False, footprint=IN_PLACE),
    Implementation("eager", eager_rope, footprint=COPIES),
)
