"""Causal grouped-query attention.

Legend: B batch, Hq query heads, Hk key/value heads, T queries, S keys (S >= T when a cache holds earlier keys), D head
width. Queries are the last T of the S positions. `segments` (B, T), where given, numbers the documents of each row: a
query then sees only keys of its own document (T = S: there is no cache in training).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation
from zero2all.ops.widen import widened


def math_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None) -> Tensor:
    """The formula: softmax(q k^T / sqrt(D)) v with the future masked out. The reference for all others."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)  # (B, Hq, S, D)
    value = value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (B, Hq, T, S)
    T, S = scores.shape[-2:]
    future = torch.ones(T, S, dtype=torch.bool, device=scores.device).triu(S - T + 1)
    hidden = future if segments is None else ~document_mask(segments)
    weights = widened(scores).masked_fill(hidden, -math.inf).softmax(dim=-1).to(value.dtype)
    return F.dropout(weights, dropout) @ value  # (B, Hq, T, D)


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None) -> Tensor:
    """torch's fused attention: never materialises the (T, S) weights on backends that can avoid it."""
    T, S = query.shape[2], key.shape[2]
    if T == S and segments is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=T > 1, enable_gqa=query.shape[1] != key.shape[1]
        )
    # With a cache the causal mask hangs at the lower right corner; one query sees everything.
    mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=query.device).tril(S - T)
    if segments is not None:
        mask = document_mask(segments)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
    )


def document_mask(segments: Tensor) -> Tensor:
    """(B, T) -> (B, 1, T, T): which keys a query may see: no later one, and none of another document."""
    T = segments.shape[1]
    same = segments.unsqueeze(2) == segments.unsqueeze(1)  # (B, T, T)
    return (same & torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()).unsqueeze(1)


IMPLEMENTATIONS = (Implementation("sdpa", sdpa_attention), Implementation("math", math_attention))
