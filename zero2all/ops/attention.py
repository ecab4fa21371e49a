"""Causal grouped-query attention.

Legend: B batch, Hq query heads, Hk key/value heads, T queries, S keys (S >= T when a cache holds earlier keys), D head
width. Queries are the last T of the S positions. Where `document_ids` (B, T) are given, a query sees only keys of its
own document (T = S: there is no cache in training; `math` and `sdpa` take masks of T < S too). What an implementation
makes of them (a mask, boundaries) is prepared once per pass by its `prepare_documents` and handed to every layer.

math        the formula, with the whole (T, S) matrix of weights: the reference
sdpa        torch's scaled_dot_product_attention; torch chooses the backend
sdpa_cudnn  the same, on cuDNN's kernels: the fastest on Hopper of those that come with torch
sdpa_flash  the same, on FlashAttention 2
flex        torch's FlexAttention, compiled: skips blocks that no query may see, without a (T, S) mask
varlen      torch's varlen_attn: each document is a sequence of its own
fa4, fa3    FlashAttention 4 and 3, separate packages; 4 needs 13 % less time than cuDNN on an H200
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero2all.ops import flash_packages
from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.implementation import Implementation, OpContext, compiler_problem
from zero2all.ops.precision import widened


class AttentionOp(Protocol):
    """(B, Hq, T, D) queries, (B, Hk, S, D) keys and values -> (B, Hq, T, D)."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, documents: Any | None = None, /
    ) -> Tensor:
        """`documents`: what `prepare_documents` of the same implementation returned, or None."""


PrepareDocuments = Callable[[Tensor], Any]
"""Document ids (B, T) -> what the attention of the same implementation takes as `documents`."""


def document_mask(document_ids: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
    """(B, T) -> (B, 1, T, T): which keys a query may see: no later one, and none of another document. Only for queries
    from `begin` to `end`, and the keys before `end`, where these are given."""
    keys = document_ids[:, :end]
    same = keys[:, begin:].unsqueeze(2) == keys.unsqueeze(1)  # (B, T, S)
    return (same & torch.ones(same.shape[1:], dtype=torch.bool, device=keys.device).tril(begin)).unsqueeze(1)


@dataclass(frozen=True)
class AttentionImplementation(Implementation[AttentionOp]):
    """One implementation of attention."""

    prepare_documents: PrepareDocuments = document_mask


def math_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """The formula: softmax(q k^T / sqrt(D)) v with the future masked out. The reference for all others."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)  # (B, Hq, S, D)
    value = value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (B, Hq, T, S)
    T, S = scores.shape[-2:]
    future = torch.ones(T, S, dtype=torch.bool, device=scores.device).triu(S - T + 1)
    hidden = future if mask is None else ~mask
    weights = widened(scores).masked_fill(hidden, -math.inf).softmax(dim=-1).to(value.dtype)
    return F.dropout(weights, dropout) @ value  # (B, Hq, T, D)


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """torch's fused attention: never materialises the (T, S) weights on backends that can avoid it."""
    T, S = query.shape[2], key.shape[2]
    if T == S and mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=T > 1, enable_gqa=query.shape[1] != key.shape[1]
        )
    if mask is None and T > 1:  # the causal mask is aligned to the last key; one query sees every key
        mask = _last_queries_mask(T, S, query)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
    )


def _last_queries_mask(queries: int, keys: int, like: Tensor) -> Tensor:
    """For the last queries of all positions. FlashAttention 2, in half precision on a GPU, needs only its name: with a
    real mask torch would compute the whole matrix of weights for grouped queries."""
    if like.device.type == "cuda" and like.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)


def _on_backend(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    """Training and prompts on `backend`; generation and masks on the backend that torch chooses."""
    if query.shape[2] != key.shape[2] or query.shape[2] == 1 or mask is not None:
        return sdpa_attention(query, key, value, dropout, mask)
    with sdpa_kernel(backend):
        return sdpa_attention(query, key, value, dropout)


cudnn_attention = partial(_on_backend, SDPBackend.CUDNN_ATTENTION)
flash_attention = partial(_on_backend, SDPBackend.FLASH_ATTENTION)


def _half_precision_on_cuda(context: OpContext) -> str | None:
    if context.device != "cuda":
        return "it needs a CUDA device"
    if context.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is {str(context.dtype).removeprefix('torch.')}"
    return None


def _no_documents(context: OpContext) -> str | None:
    return "it has no mask for documents" if context.documents else None


def _sdpa_head(context: OpContext) -> str | None:
    if context.head_size % 8 or context.head_size > 256:
        return f"it takes heads of at most 256 in multiples of 8, and this model's are {context.head_size}"
    return None


def _needs_flash(context: OpContext) -> str | None:
    return _half_precision_on_cuda(context) or _no_documents(context) or _sdpa_head(context)


def _probe_cudnn(context: OpContext) -> str | None:
    problem = _needs_flash(context)
    if problem is not None:
        return problem
    if context.head_size > 128:
        return f"it takes heads of at most 128, and this model's are {context.head_size}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of the Ampere generation or newer"
    if (torch.backends.cudnn.version() or 0) < 91500:
        return f"cuDNN {torch.backends.cudnn.version()} is older than 9.15, and torch does not trust its attention"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are required, and its backward pass is not deterministic"
    return None


@cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def flex_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, blocks: Any | None = None) -> Tensor:
    """Blocks of 128 x 128 in which no query sees a key are skipped."""
    if query.shape[2] != key.shape[2]:
        assert blocks is None, "a cache holds one document"
        return sdpa_attention(query, key, value, dropout)
    attend, block_mask = _compiled_flex()
    T = query.shape[2]
    if blocks is None:
        blocks = block_mask(_past, None, None, T, T, device=query.device)
    mixed: Tensor = attend(query, key, value, block_mask=blocks, enable_gqa=query.shape[1] != key.shape[1])
    return mixed


def _document_blocks(document_ids: Tensor) -> Any:
    """The BlockMask of FlexAttention."""
    B, T = document_ids.shape
    return _compiled_flex()[1](_past_of_the_document(document_ids), B, None, T, T, device=document_ids.device)


def _past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    del batch, head
    return query >= key


def _past_of_the_document(document_ids: Tensor) -> Callable[..., Tensor]:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    return visible


def _needs_flex(context: OpContext) -> str | None:
    if context.device != "cuda":
        return "it is compiled for CUDA devices"
    if context.dropout:
        return "it has no dropout"
    if context.head_size & (context.head_size - 1):
        return f"it takes heads whose width is a power of two, and this model's are {context.head_size}"
    return compiler_problem()


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, boundaries: Tensor | None = None
) -> Tensor:
    """Each document as a sequence of its own."""
    B, Hq, T, D = query.shape
    if key.shape[2] != T:
        assert boundaries is None, "a cache holds one document"
        return sdpa_attention(query, key, value, dropout)
    if boundaries is None:
        boundaries = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=query.device)
    q, k, v = (heads.transpose(1, 2).reshape(B * T, -1, D) for heads in (query, key, value))
    borders = SequenceBorders(boundaries, T)
    return ragged_attention(q, k, v, borders, borders).view(B, T, Hq, D).transpose(1, 2)


class SequenceBorders(NamedTuple):
    """Where sequences that lie end to end begin, and the end (int32); and the length of the longest."""

    begins: Tensor
    longest: int


def ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: SequenceBorders, keys: SequenceBorders
) -> Tensor:
    """Sequences end to end: (N, Hq, D) queries, (M, Hk, D) keys and values -> (N, Hq, D). The queries of a sequence are
    its last positions."""
    from torch.nn.attention.varlen import varlen_attn

    begins, longest = (queries.begins, keys.begins), (queries.longest, keys.longest)
    if not torch.is_grad_enabled():  # the same kernel, which knows groups of heads, in half of the host's time
        flash = torch.ops.aten._flash_attention_forward
        mixed = flash(query, key, value, *begins, *longest, 0.0, True, False)[0]
        assert isinstance(mixed, Tensor)
        return mixed
    groups, known = query.shape[1] // key.shape[1], _varlen_parameters()
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if groups > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
    mixed = varlen_attn(query, key, value, *begins, *longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed


@cache
def _varlen_parameters() -> frozenset[str]:
    """What the `varlen_attn` of this torch takes."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def _boundaries(document_ids: Tensor) -> Tensor:
    """Where documents begin in the B * T tokens, and the end: int32. Counting them waits for the device."""
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().squeeze(1), (0, 1), value=document_ids.numel()).int()


def ragged_problem(context: OpContext) -> str | None:
    """Why `ragged_attention` cannot run there."""
    problem = _half_precision_on_cuda(context) or _sdpa_head(context)
    if problem is None and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        problem = f"torch {torch.__version__} has no varlen_attn"
    return problem


def _needs_varlen(context: OpContext) -> str | None:
    problem = ragged_problem(context)
    if problem is None and context.dropout:
        problem = "it has no dropout"
    return problem


def _of_package(
    module: str, query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor | None = None
) -> Tensor:
    if query.shape[2] != key.shape[2] or mask is not None:
        return sdpa_attention(query, key, value, dropout, mask)
    return flash_packages.flash_attention_of(module, query, key, value)


def _needs_package(module: str, context: OpContext) -> str | None:
    problem = _half_precision_on_cuda(context) or _no_documents(context) or _sdpa_head(context)
    if problem is None and context.dropout:
        problem = "it has no dropout"
    if problem is None and context.keeps_results:
        problem = "recompute: selective keeps only results of torch's operators, and would compute it twice"
    return problem or flash_packages.problem_of(module, context)


def _saved_by_math(sizes: Sizes) -> float:
    """Query, and key and value repeated for each query head; the (T, S) weights, as softmax and as the matmul reads
    them; their dropout; the mask."""
    copy = sizes.value_bytes if sizes.value_bytes < 4 else 0
    saved = 3.0 * sizes.value_bytes * sizes.query_size
    saved += sizes.heads * sizes.seq_len * (sizes.wide_bytes + copy)
    saved += sizes.heads * sizes.seq_len * (1 + sizes.value_bytes) if sizes.attention_dropout else 0.0
    return saved + (sizes.seq_len if sizes.documents else 0)


def _saved(sizes: Sizes) -> float:
    """Query, key and value, and a float32 logsumexp per head."""
    return float(sizes.value_bytes * (sizes.query_size + 2 * sizes.kv_size) + 4 * sizes.heads)


def _saved_with_mask(sizes: Sizes) -> float:
    """The same and the mask as numbers, which every block makes for itself."""
    return _saved(sizes) + (sizes.seq_len * sizes.value_bytes if sizes.documents else 0)


def _gradients(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradients of query, key and value; that of the query is added up in float32 before it is rounded."""
    added_up = sizes.wide_bytes if sizes.value_bytes < sizes.wide_bytes else 0
    per_token = sizes.value_bytes * (sizes.query_size + 2 * sizes.kv_size) + added_up * sizes.query_size
    return (Moment(per_token + 4.0 * sizes.heads),)


def _gradients_by_math(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradients of the (T, S) weights before and after the softmax, one of them also narrow."""
    copy = sizes.value_bytes if sizes.value_bytes < sizes.wide_bytes else 0
    return (Moment(sizes.heads * sizes.seq_len * (2.0 * sizes.wide_bytes + copy)),)


FUSED = Footprint(_saved, backward=_gradients, is_fused=True)
FLEX = Footprint(_saved, backward=_gradients, is_fused=True, result_like_query=True)
MASKED = Footprint(_saved_with_mask, backward=_gradients, is_fused=True, result_like_query=True)


def _package(name: str, module: str) -> AttentionImplementation:
    return AttentionImplementation(
        name,
        partial(_of_package, module),
        partial(_needs_package, module),
        compile_safe=False,
        deterministic=False,
        footprint=FUSED,
    )


IMPLEMENTATIONS = (
    _package("fa4", flash_packages.FA4),
    AttentionImplementation("sdpa_cudnn", cudnn_attention, _probe_cudnn, deterministic=False, footprint=MASKED),
    AttentionImplementation("sdpa", sdpa_attention, deterministic=False, footprint=MASKED),
    AttentionImplementation("sdpa_flash", flash_attention, _needs_flash, deterministic=False, footprint=MASKED),
    AttentionImplementation(
        "varlen",
        varlen_attention,
        _needs_varlen,
        compile_safe=False,
        deterministic=False,
        footprint=FUSED,
        prepare_documents=_boundaries,
    ),
    AttentionImplementation("flex", flex_attention, _needs_flex, footprint=FLEX, prepare_documents=_document_blocks),
    _package("fa3", flash_packages.FA3),
    AttentionImplementation("math", math_attention, footprint=Footprint(_saved_by_math, backward=_gradients_by_math)),
)
