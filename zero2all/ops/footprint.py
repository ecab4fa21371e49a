"""What the implementations of the operators need in memory. No torch here: planning must not need it.

Each implementation states its `Footprint` beside its code; `estimate.pass_memory` walks through a pass and adds
them up. Bytes are per token unless said otherwise. What is saved for the backward pass counts beside an operator's
input and output, which belong to its neighbours. What is alive during the backward pass of an operator counts as
`Moment`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
    vocab_rows: int = 0  # of the head
    experts: int = 0  # of a block, in this process
    router_rows: int = 0  # experts that a token can choose
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0  # inner width of the shared experts
    qk_norm: bool = False  # whether query and key heads are normalised

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


class Moment(NamedTuple):
    """Bytes that are alive at one moment of an operator's pass, beside what it has saved and the gradient it is given;
    less what it has freed by then."""

    per_token: float = 0.0
    fixed: float = 0.0  # whatever the number of tokens: gradients of weights
    per_row: float = 0.0
    """linear_cross_entropy: per token of a chunk (`Footprint.chunk_rows`)."""
    per_second_row: float = 0.0
    """The same per token of a second chunk, where there is one."""


Moments = Callable[[Sizes], tuple[Moment, ...]]


def no_moments(sizes: Sizes) -> tuple[Moment, ...]:
    """Nothing is alive that counts."""
    del sizes
    return ()


@dataclass(frozen=True)
class Head:
    """linear_cross_entropy, which computes the gradient of the hidden states during the forward pass or after it."""

    forward: Moments
    """From the hidden states (which are not counted) to the loss."""
    backward: Moments
    """From the loss to the gradient of the hidden states; what is saved in between counts here."""
    keeps_hidden: bool = False
    """Whether the hidden states are needed until the backward pass."""


@dataclass(frozen=True)
class Footprint:
    """The memory of one implementation. Fields that mean nothing for its operator keep their defaults."""

    saved: Bytes = nothing  # saved for the backward pass, beside input and output
    forward: Moments = no_moments
    """What is alive in its forward pass beside what it saves: rms_norm (the sum, which the next norm reads), swiglu,
    feed_forward and experts."""
    backward: Moments = no_moments
    """The moments of the backward pass, the gradient of the input among them."""
    overwrites_input: bool = False
    """rope: query and key are rotated in the output of the qkv projection, which therefore cannot be kept; not with
    qk_norm (`overwrites`). Where it is false, copies lie in memory head by head."""
    result_like_query: bool = False
    """attention: its result lies in memory as the query does. After a rope that copies, that is head by head, so the
    result is copied for the projection after it."""
    input_copy_bytes: int = 0
    """linear: bytes per value of a copy of its input that is saved in place of the input."""
    weight_copy_bytes: int = 0  # linear: bytes per value of copies of the weights
    writes_weight_gradient: bool = False
    """linear: each weight gradient exists as a tensor of its own before it is added up. embedding: a whole table."""
    is_fused: bool = False
    """attention: one kernel, whose result `recompute: selective` keeps. feed_forward: one autograd function, so
    recomputation cannot stop inside it."""
    head: Head | None = None  # linear_cross_entropy, cross_entropy
    chunk_rows: Callable[[Sizes, int], int] | None = None
    """linear_cross_entropy: tokens of a micro-batch whose logits exist at once; None: all."""
    kept_results: Bytes = nothing
    """feed_forward, experts: what `recompute: selective` keeps of their matmuls, and their backward pass needs."""
    kept_besides: Bytes = nothing  # what it keeps although the backward pass does not need it
    splits_masters: bool = False
    """optimizer: a bfloat16 weight is one half of its float32 master, and only the other half is stored beside it."""
    update_bytes_per_value: float = 0.0  # optimizer: temporaries of an update, per value of all parameters
    update_bytes_of_largest: float = 0.0  # the same per value of the largest parameter

    def overwrites(self, qk_norm: bool) -> bool:
        """Whether rope overwrites its input in a model with or without qk_norm, whose backward pass needs the input."""
        return self.overwrites_input and not qk_norm
