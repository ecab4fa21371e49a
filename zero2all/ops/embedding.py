"""Embedding: one row of a table per token id.

Every implementation takes the ids, of any shape, and the table (V, C), and returns (..., C) in the table's dtype.
They differ in the backward pass, which adds the gradient of each position to the row of its id.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.footprint import Footprint
from zero2all.ops.implementation import Implementation, needs_triton

EmbeddingOp = Callable[[Tensor, Tensor], Tensor]
"""(ids, table) -> rows."""


def torch_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """torch's: its gradient is a whole table, mostly zeros."""
    return F.embedding(tokens, weight)


def triton_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Our backward pass: writes only rows of ids that occur, and adds to the table's sink where it has one."""
    from zero2all.ops.kernels.embedding import triton_embedding as kernel

    return kernel(tokens, weight)


IMPLEMENTATIONS: tuple[Implementation[EmbeddingOp], ...] = (
    Implementation("triton", triton_embedding, needs_triton, compile_safe=False),
    Implementation("torch", torch_embedding, footprint=Footprint(writes_weight_gradient=True)),
)
