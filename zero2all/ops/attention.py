"""Causal grouped-query attention.

Legend: B batch, Hq query heads, Hk key/value heads, T queries, S keys (S >= T when a cache holds earlier keys), D head
width. Queries are the last T of the S positions. `segments` (B, T), where given, numbers the documents of each row: a
query then sees only keys of its own document (T = S: there is no cache in training).

math        the formula, with the whole (T, S) matrix of weights: the reference
sdpa        torch's scaled_dot_product_attention, on whichever of its backends it likes best
sdpa_cudnn  the same, on cuDNN's kernels: the fastest on Hopper that torch brings
sdpa_flash  the same, on FlashAttention 2
flex        torch's FlexAttention, compiled: documents cost what they need, not a (T, S) mask
varlen      torch's varlen_attn: documents as sequences of their own, packed
fa4, fa3    FlashAttention 4 and 3, packages of their own; 4 needs 13 % less time than cuDNN on an H200
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero2all.ops import flash_packages
from zero2all.ops.implementation import Implementation, Situation
from zero2all.ops.widen import widened

Made = TypeVar("Made")


def math_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None) -> Tensor:
    """The formula: softmax(q k^T / sqrt(D)) v with the future masked out. The reference for all others."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)  # (B, Hq, S, D)
    value = value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # (B, Hq, T, S)
    T, S = scores.shape[-2:]
    future = torch.ones(T, S, dtype=torch.bool, device=scores.device).triu(S - T + 1)
    hidden = future if segments is None else ~once_a_pass(segments, document_mask)
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
        mask = once_a_pass(segments, document_mask)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, enable_gqa=query.shape[1] != key.shape[1]
    )


def once_a_pass(segments: Tensor, make: Callable[[Tensor], Made]) -> Made:
    """What `make` makes of the documents of a pass.

    Every layer is given the very same tensor: the first makes it, and keeps it with the tensor for the others.
    """
    if torch.compiler.is_compiling():
        return make(segments)
    made: dict[Any, Made] = segments.__dict__.setdefault("made", {})
    if make not in made:
        made[make] = make(segments)
    return made[make]


def document_mask(segments: Tensor) -> Tensor:
    """(B, T) -> (B, 1, T, T): which keys a query may see: no later one, and none of another document."""
    T = segments.shape[1]
    same = segments.unsqueeze(2) == segments.unsqueeze(1)  # (B, T, T)
    return (same & torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()).unsqueeze(1)


# ---- one backend of sdpa -------------------------------------------------------------------------------------------


def _on_backend(
    backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None
) -> Tensor:
    """Training and prompts on the backend named; generation, one query at a time, on whichever fits."""
    if query.shape[2] != key.shape[2] or query.shape[2] == 1 or segments is not None:
        return sdpa_attention(query, key, value, dropout, segments)
    with sdpa_kernel(backend):
        return sdpa_attention(query, key, value, dropout)


cudnn_attention = partial(_on_backend, SDPBackend.CUDNN_ATTENTION)
flash_attention = partial(_on_backend, SDPBackend.FLASH_ATTENTION)


def _half_precision_on_cuda(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "it needs a CUDA device"
    if situation.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is {str(situation.dtype).removeprefix('torch.')}"
    return None


def _no_documents(situation: Situation) -> str | None:
    return "it has no mask for documents" if situation.documents else None


def _sdpa_head(situation: Situation) -> str | None:
    if situation.head_size % 8 or situation.head_size > 256:
        return f"it takes heads of at most 256 in multiples of 8, and this model's are {situation.head_size}"
    return None


def _probe_flash(situation: Situation) -> str | None:
    return _half_precision_on_cuda(situation) or _no_documents(situation) or _sdpa_head(situation)


def _probe_cudnn(situation: Situation) -> str | None:
    problem = _probe_flash(situation)
    if problem is not None:
        return problem
    if situation.head_size > 128:
        return f"it takes heads of at most 128, and this model's are {situation.head_size}"
    if torch.cuda.get_device_capability() < (8, 0):
        return "it needs a GPU of the Ampere generation or newer"
    if (torch.backends.cudnn.version() or 0) < 91500:
        return f"cuDNN {torch.backends.cudnn.version()} is older than 9.15, whose attention torch does not trust"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and its backward is not"
    return None


# ---- documents without a mask of T x T -----------------------------------------------------------------------------


@cache
def _compiled_flex() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def flex_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None) -> Tensor:
    """Blocks of 128 x 128 that nobody may see are left out."""
    if query.shape[2] != key.shape[2]:
        return sdpa_attention(query, key, value, dropout, segments)
    attend, block_mask = _compiled_flex()
    T = query.shape[2]
    if segments is None:
        mask = block_mask(_past, None, None, T, T, device=query.device)
    else:
        mask = once_a_pass(segments, _document_blocks)
    mixed: Tensor = attend(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return mixed


def _document_blocks(segments: Tensor) -> Any:
    B, T = segments.shape
    # Of an alias: what is kept with a tensor and refers back to it would live until the next collection of garbage.
    return _compiled_flex()[1](_past_of_the_document(segments.detach()), B, None, T, T, device=segments.device)


def _past(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    del batch, head
    return query >= key


def _past_of_the_document(segments: Tensor) -> Callable[..., Tensor]:
    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del head
        return (query >= key) & (segments[batch, query] == segments[batch, key])

    return visible


def _probe_flex(situation: Situation) -> str | None:
    if situation.device != "cuda":
        return "it is compiled for CUDA devices"
    if situation.dropout:
        return "it has no dropout"
    if situation.head_size & (situation.head_size - 1):
        return f"it takes heads whose width is a power of two, and this model's are {situation.head_size}"
    return None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None
) -> Tensor:
    """Documents one after the other, each by itself. Counting them, once a pass, waits for the device."""
    B, Hq, T, D = query.shape
    if key.shape[2] != T:
        return sdpa_attention(query, key, value, dropout, segments)
    from torch.nn.attention.varlen import varlen_attn

    if segments is None:
        borders = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=query.device)
    else:
        borders = once_a_pass(segments, _borders)
    q, k, v = (heads.transpose(1, 2).reshape(B * T, -1, D) for heads in (query, key, value))
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    if Hq != k.shape[1] and "enable_gqa" in parameters:
        options["enable_gqa"] = True
    elif Hq != k.shape[1]:
        k, v = (heads.repeat_interleave(Hq // heads.shape[1], dim=1) for heads in (k, v))
    mixed = varlen_attn(q, k, v, borders, borders, T, T, **options)
    assert isinstance(mixed, Tensor)
    return mixed.view(B, T, Hq, D).transpose(1, 2)


def _borders(segments: Tensor) -> Tensor:
    """Where documents begin in the B * T tokens, and the end: int32."""
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True).flatten()
    return F.pad(begins.nonzero().squeeze(1), (0, 1), value=segments.numel()).int()


def _probe_varlen(situation: Situation) -> str | None:
    problem = _half_precision_on_cuda(situation) or _sdpa_head(situation)
    if problem is None and importlib.util.find_spec("torch.nn.attention.varlen") is None:
        problem = f"torch {torch.__version__} has no varlen_attn"
    if problem is None and situation.dropout:
        problem = "it has no dropout"
    return problem


# ---- packages of their own -----------------------------------------------------------------------------------------


def _of_package(
    module: str, query: Tensor, key: Tensor, value: Tensor, dropout: float, segments: Tensor | None = None
) -> Tensor:
    if query.shape[2] != key.shape[2]:
        return sdpa_attention(query, key, value, dropout, segments)
    return flash_packages.flash_attention_of(module, query, key, value)


def _probe_package(module: str, situation: Situation) -> str | None:
    problem = _half_precision_on_cuda(situation) or _no_documents(situation) or _sdpa_head(situation)
    if problem is None and situation.dropout:
        problem = "it has no dropout"
    if problem is None and situation.keeps_results:
        problem = "recompute: selective keeps results of torch's operators only, and would compute it twice"
    return problem or flash_packages.problem_of(module, situation)


def _package(name: str, module: str) -> Implementation:
    return Implementation(
        name, partial(_of_package, module), partial(_probe_package, module), compile_safe=False, deterministic=False
    )


IMPLEMENTATIONS = (
    _package("fa4", flash_packages.FA4),
    Implementation("sdpa_cudnn", cudnn_attention, _probe_cudnn, deterministic=False),
    Implementation("sdpa", sdpa_attention, deterministic=False),
    Implementation("sdpa_flash", flash_attention, _probe_flash, deterministic=False),
    Implementation("varlen", varlen_attention, _probe_varlen, compile_safe=False, deterministic=False),
    Implementation("flex", flex_attention, _probe_flex),
    _package("fa3", flash_packages.FA3),
    Implementation("math", math_attention),
)
