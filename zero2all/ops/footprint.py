"""What the implementations of the operators need in memory. No torch here: planning must not need it.

Each implementation states its `Footprint` beside its code; `zero2all.limits` adds them up. Bytes are per token unless
said otherwise, and count what is saved for the backward pass beside an operator's input and output, which belong to
its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What the size of saved tensors depends on."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_size: int
    seq_len: int
    value_bytes: int  # of one activation
    residual_bytes: int  # of one value of the residual stream
    documents: bool = False  # whether attention is masked at document boundaries
    attention_dropout: bool = False

    @property
    def wide_bytes(self) -> int:
        """Of one value where an operator computes in at least float32."""
        return max(4, self.value_bytes)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, or of all value heads."""
        return self.kv_heads * self.head_size


Bytes = Callable[[Sizes], float]


def nothing(sizes: Sizes) -> float:
    """Nothing is saved except input and output."""
    del sizes
    return 0.0


def one_value(sizes: Sizes) -> float:
    """One activation: only the logit itself."""
    return float(sizes.value_bytes)


def wide_logits(sizes: Sizes) -> float:
    """A logit, its copy in float32 where it is narrower, its log-probability, and the gradient of that."""
    copy = sizes.wide_bytes if sizes.value_bytes < sizes.wide_bytes else 0
    return float(sizes.value_bytes + copy + 2 * sizes.wide_bytes)


@dataclass(frozen=True)
class Footprint:
    """The memory of one implementation. Fields that mean nothing for its operator keep their defaults."""

    saved: Bytes = nothing  # saved for the backward pass, beside input and output
    overwrites_input: bool = False
    """rope: query and key are rotated in the output of the qkv projection, which therefore cannot be kept."""
    input_copy_bytes: int = 0
    """linear: bytes per value of a copy of its input that is saved in place of the input."""
    weight_copy_bytes: int = 0  # linear: bytes per value of copies of the weights
    writes_weight_gradient: bool = False
    """linear: each weight gradient exists as a tensor of its own before it is added up."""
    is_fused: bool = False
    """attention: one kernel, whose result `recompute: selective` keeps. feed_forward: one autograd function, so
    recomputation cannot stop inside it."""
    logit_bytes: Bytes = one_value  # cross_entropy, linear_cross_entropy: bytes per logit that exists
    chunk_rows: int | None = None
    """linear_cross_entropy: tokens whose logits exist at once; None: all of a micro-batch."""
    splits_masters: bool = False
    """optimizer: a bfloat16 weight is one half of its float32 master, and only the other half is stored beside it."""
