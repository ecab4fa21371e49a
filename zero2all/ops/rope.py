"""Rotary position embedding in the rotate-half layout that Hugging Face checkpoints use.

Dimension d of the first half of a head is paired with dimension d of the second half; the pair is rotated by
position x frequency[d]. Every implementation takes the output of the qkv projection (B, T, Hq + 2 Hk, D), cos and sin,
(T, D/2) or (B, T, D/2) where rows have positions of their own, and the numbers of heads. It returns query, key and
value (B, H, T, D), the first two rotated. The projection's output may be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.implementation import Implementation, needs_liger, needs_triton
from zero2all.ops.precision import widened

RopeOp = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""(qkv, cos, sin, query heads, key/value heads) -> (query, key, value)."""


def eager_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The formula."""
    query, key, value = qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # the same for every head
    return _rotated(query, cos, sin), _rotated(key, cos, sin), value


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = widened(heads).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


def liger_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """liger-kernel's."""
    from liger_kernel.ops.rope import LigerRopeFunction

    query, key, value = qkv.transpose(1, 2).split((heads, kv_heads, kv_heads), dim=1)
    both = [torch.cat((table, table), dim=-1) for table in (cos, sin)]
    both = [table if table.dim() == 3 else table.unsqueeze(0) for table in both]
    query, key = LigerRopeFunction.apply(query, key, *both)
    return query, key, value


def triton_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Our kernel: rotates in place, copies nothing."""
    from zero2all.ops.kernels.rope import triton_rope as kernel

    return kernel(qkv, cos, sin, heads, kv_heads)


def _saved(sizes: Sizes) -> float:
    """Rotated copies of query and key."""
    return float(sizes.value_bytes * (sizes.query_size + sizes.kv_size))


def _gradient(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradient of the projection's output, in one tensor."""
    return (Moment(sizes.value_bytes * (sizes.query_size + 2.0 * sizes.kv_size)),)


def _gradient_in_steps(sizes: Sizes) -> tuple[Moment, ...]:
    """The same, and two products of query and key in float32."""
    turned = sizes.query_size + sizes.kv_size
    return (Moment(_gradient(sizes)[0].per_token + 2.0 * sizes.wide_bytes * turned),)


COPIES = Footprint(_saved, backward=_gradient_in_steps)
IN_PLACE = Footprint(backward=_gradient, overwrites_input=True)

IMPLEMENTATIONS: tuple[Implementation[RopeOp], ...] = (
    Implementation("triton", triton_rope, needs_triton, compile_safe=False, footprint=IN_PLACE),
    Implementation("eager", eager_rope, footprint=COPIES),
    Implementation("liger", liger_rope, needs_liger, compile_safe=False, footprint=COPIES),
)
