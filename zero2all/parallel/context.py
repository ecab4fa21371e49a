"""Context parallelism: each process of the context axis has a part of every sequence.

Everything but attention works on single tokens, so only attention communicates. Two ways, for c processes:

ulysses  Rank r has tokens r T/c to (r + 1) T/c. An all-to-all turns all heads of these tokens into 1/c of the heads of
         the whole sequence, attention computes as it would alone, and a second all-to-all turns its output back. The
         query heads must divide by c. Key/value heads that do not are repeated, just often enough.
gather   Keys and values of all ranks are gathered (the backward pass reduce-scatters their gradients); a rank computes
         all heads of its own queries. A query sees all tokens before it, so late ones are more work: the sequence is
         cut into 2c chunks, and rank r has chunks r and 2c - 1 - r, which is as much work for every rank.

Positions and documents are those of the whole row: each rank knows them and picks its tokens by `places`.
Legend: B rows, T tokens of the whole sequence, S = T/c, Hq and Hk query and key/value heads, D head width.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from zero2all.model.config import ModelConfig
from zero2all.ops.attention import AttentionOp, document_mask, sdpa_attention
from zero2all.ops.registry import Ops
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import Axis, Mesh
from zero2all.parallel.reduce import gather_into, scatter_sum_into
from zero2all.parallel.run_config import SpreadConfig

Method = Literal["ulysses", "gather"]


def method_of(model: ModelConfig, parallel: ParallelConfig, sizes: MeshSizes) -> Method:
    """The method of a run; auto: ulysses where the heads of a tensor rank divide."""
    if parallel.context_method != "auto":
        return parallel.context_method
    return "gather" if model.heads // sizes.tensor % sizes.context else "ulysses"


def places_of(
    model: ModelConfig, parallel: ParallelConfig, mesh: Mesh, length: int, device: torch.device
) -> Tensor | None:
    """(S,) where the tokens of this process stand in a sequence of `length` tokens; None: it has all of them."""
    rank, size = mesh.context.rank, mesh.context.size
    if size == 1:
        return None
    if method_of(model, parallel, mesh.sizes) == "ulysses":
        return torch.arange(rank * length // size, (rank + 1) * length // size, device=device)
    chunks = [torch.arange(begin, end, device=device) for begin, end in _own_chunks(rank, size, length)]
    return torch.cat(chunks)


def own_tokens(of_rows: Tensor, places: Tensor | None) -> Tensor:
    """(B, T) -> (B, S): of values per token, those of this process."""
    return of_rows if places is None else of_rows[:, places]


def spread_attention(ops: Ops, model: ModelConfig, parallel: ParallelConfig, mesh: Mesh) -> Ops:
    """The operators with an attention that sees whole sequences; unchanged where each process has whole ones."""
    if mesh.context.size == 1:
        return ops
    # Collectives stay outside of compiled graphs; attention between them is compiled as before.
    outside: Callable[..., Any] = (lambda function: function) if ops.compile == "none" else torch.compiler.disable
    if method_of(model, parallel, mesh.sizes) == "ulysses":
        return dataclasses.replace(ops, attention=_ulysses(ops.attention, mesh.context, outside))
    # With documents, only implementations that take a mask can have fewer queries than keys.
    masked = ops.attention if ops.prepare_documents is document_mask else sdpa_attention
    return dataclasses.replace(
        ops,
        attention=_gathered(ops.attention, masked, mesh.context, outside),
        prepare_documents=lambda document_ids: _chunk_masks(document_ids, mesh.context),
    )


def problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Why the sequences of a run cannot be cut over this many context ranks."""
    ranks, asked, found = sizes.context, config.parallel.context_method, []
    if ranks == 1:
        return []
    heads = config.model.heads // sizes.tensor
    if asked == "ulysses" and heads % ranks:
        found.append(
            f"parallel.context_method ulysses gives each of the {ranks} context ranks an equal share of the query "
            f"heads, but model.heads / parallel.tensor = {config.model.heads} / {sizes.tensor} = {heads} is not a "
            f"multiple of {ranks}. Set parallel.context_method to gather, or parallel.context to a divisor of {heads}."
        )
    return found


class _SequenceAllToAll(torch.autograd.Function):
    """(c, ...): part i goes to rank i; part i of the result came from rank i. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=axis.group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _SequenceAllToAll.apply(grads[0], ctx.axis), None


def _ulysses(attention: AttentionOp, axis: Axis, outside: Callable[..., Any]) -> AttentionOp:
    to_sequences, to_tokens = outside(_to_sequences), outside(_to_tokens)

    def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float, documents: Any | None = None) -> Tensor:
        query, key, value = to_sequences(query, key, value, axis)
        mixed: Tensor = to_tokens(attention(query, key, value, dropout, documents), axis)
        return mixed

    return attend


def _to_sequences(query: Tensor, key: Tensor, value: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """All heads (B, H, S, D) of the own tokens -> the own heads (B, H/c, T, D) of all tokens.

    One message has query, key and value, token by token. The received parts follow each other in the order of the
    sequence, so they are used as they came: the heads of a token lie side by side, as after the qkv projection."""
    repeats = math.lcm(key.shape[1], axis.size) // key.shape[1]
    key, value = _repeated(key, repeats), _repeated(value, repeats)
    # (B, H, S, D) -> (c, S, B, H/c, D); written once, by `cat`
    parts = [heads.unflatten(1, (axis.size, -1)).permute(1, 3, 0, 2, 4) for heads in (query, key, value)]
    sequence = _SequenceAllToAll.apply(torch.cat(parts, dim=3), axis).flatten(0, 1)  # (T, B, H/c, D)
    query, key, value = sequence.split([part.shape[3] for part in parts], dim=2)
    return query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)


def _to_tokens(mixed: Tensor, axis: Axis) -> Tensor:
    """The own heads (B, Hq/c, T, D) of all tokens -> all heads (B, Hq, S, D) of the own tokens; in memory the heads of
    a token lie side by side."""
    parts = _SequenceAllToAll.apply(mixed.permute(2, 0, 1, 3).unflatten(0, (axis.size, -1)), axis)  # (c, S, B, Hq/c, D)
    heads: Tensor = parts.permute(2, 1, 0, 3, 4).flatten(2, 3)  # (B, S, Hq, D)
    return heads.transpose(1, 2)


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    """Each head `repeats` times, side by side."""
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def _own_chunks(rank: int, size: int, length: int) -> list[tuple[int, int]]:
    """Begin and end of the two chunks of a rank."""
    chunk = length // (2 * size)
    return [(number * chunk, (number + 1) * chunk) for number in (rank, 2 * size - 1 - rank)]


class _GatherPast(torch.autograd.Function):
    """(S, ...): the two chunks of this rank -> for each of them the sequence up to its end. The two overlap."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, size = axis, axis.size
        by_rank = own.new_empty(size * own.shape[0], *own.shape[1:])
        gather_into(by_rank, own, group=axis.group)
        # By rank the chunks are 0, 2c - 1, 1, 2c - 2, …; so chunk 0 lies at 0, chunk 1 at 2, …, chunk 2c - 1 at 1.
        at = torch.arange(0, 2 * size, 2, device=own.device)
        sequence = _chunks_at(by_rank, torch.cat((at, at.flip(0) + 1)))
        return tuple(sequence[:end] for _, end in _own_chunks(axis.rank, size, len(sequence)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_early, of_late), axis = grads, ctx.axis
        chunk = len(of_early) // (axis.rank + 1)  # the early one is chunk number `rank`
        grad = of_late.new_zeros(2 * axis.size * chunk, *of_late.shape[1:])
        grad[: len(of_late)] = of_late
        grad[: len(of_early)] += of_early
        early = torch.arange(axis.size, device=grad.device)
        by_rank = _chunks_at(grad, torch.stack((early, 2 * axis.size - 1 - early), dim=1).flatten())
        own = grad.new_empty(2 * chunk, *grad.shape[1:])
        scatter_sum_into(own, by_rank, group=axis.group)
        return own, None


def _chunks_at(sequence: Tensor, at: Tensor) -> Tensor:
    """The chunks of a sequence (T, ...) in another order."""
    return sequence.unflatten(0, (len(at), -1)).index_select(0, at).flatten(0, 1)


def _gathered(attention: AttentionOp, masked: AttentionOp, axis: Axis, outside: Callable[..., Any]) -> AttentionOp:
    gather = outside(_past_of_chunks)

    def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float, masks: Any | None = None) -> Tensor:
        op, mask_of = (attention, (None, None)) if masks is None else (masked, masks)
        chunks = zip(query.chunk(2, dim=2), gather(key, value, axis), mask_of, strict=True)
        mixed = [op(own, keys, values, dropout, mask).transpose(1, 2) for own, (keys, values), mask in chunks]
        return torch.cat(mixed, dim=1).transpose(1, 2)  # in memory (B, S, Hq, D), as the next projection reads it

    return attend


def _past_of_chunks(key: Tensor, value: Tensor, axis: Axis) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (B, Hk, S, D) of the own tokens -> for each own chunk those (B, Hk, end, D) up to its end."""
    own = torch.cat([heads.permute(2, 0, 1, 3) for heads in (key, value)], dim=2)  # (S, B, 2 Hk, D)
    past = [both.permute(1, 2, 0, 3).chunk(2, dim=1) for both in _GatherPast.apply(own.contiguous(), axis)]
    return [(keys, values) for keys, values in past]


def _chunk_masks(document_ids: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    """Document ids (B, T) of whole rows -> which keys the queries of each own chunk may see."""
    chunks = _own_chunks(axis.rank, axis.size, document_ids.shape[1])
    return tuple(document_mask(document_ids, begin, end) for begin, end in chunks)
