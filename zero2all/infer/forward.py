"""Passes over ragged batches, in plain torch: the reference, and what runs on the CPU.

Legend: N tokens of a pass, B sequences, Hq query heads, Hk key/value heads, D head width, C hidden width, V ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.weights import LayerWeights, Weight, Weights, project
from zero2all.ops.attention import SequenceBorders, ragged_attention, ragged_problem
from zero2all.ops.implementation import OpContext
from zero2all.ops.precision import widened
from zero2all.ops.rms_norm import RmsNormOp
from zero2all.ops.rope import QkNorm, RopeOp

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query (1, Hq, N, D), key and value (1, Hk, N, D)) -> (N, Hq D)."""


@dataclass(frozen=True)
class Span:
    """The new tokens of one sequence in a pass."""

    first: int
    """The row of the pass they begin at."""
    count: int
    length: int
    """Positions the sequence has with them: the earlier ones are in the cache."""
    table: Sequence[int]
    """The blocks of the sequence."""


class Forward:
    """A model with its cache."""

    def __init__(self, weights: Weights, blocks: KeyValueBlocks) -> None:
        self.weights, self.blocks = weights, blocks
        context = OpContext(weights.embedding.device.type, weights.embedding.dtype, head_size=weights.config.head_size)
        self._is_ragged = ragged_problem(context) is None

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, positions: Tensor, slots: Tensor, spans: Sequence[Span]) -> Tensor:
        """New tokens of several sequences, one after another (N,) -> normalised hidden states (N, C). Their keys and
        values are written to `slots` (N,)."""

        if self._is_ragged:
            return self.trunk(tokens, positions, self._ragged(slots, spans))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.blocks.write(layer, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
            mixed = [self._of_span(layer, span, query, key, value) for span in spans]
            return (mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2))[0].transpose(0, 1).flatten(1)

        return self.trunk(tokens, positions, attend)

    def _ragged(self, slots: Tensor, spans: Sequence[Span]) -> Attend:
        """Attention of all sequences of a pass in one call; where some have earlier positions, on keys and values that
        are gathered from the cache."""
        device = slots.device
        counts, lengths = [span.count for span in spans], [span.length for span in spans]
        queries, keys = (
            torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=device)
            for each in (counts, lengths)
        )
        places = None
        if counts != lengths:
            places = torch.tensor(
                [span.table[at // BLOCK] * BLOCK + at % BLOCK for span in spans for at in range(span.length)],
                device=device,
            )

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))  # (N, H, D)
            self.blocks.write(layer, slots, k, v)
            if places is not None:
                k, v = self.blocks.keys[layer].flatten(0, 1)[places], self.blocks.values[layer].flatten(0, 1)[places]
            mixed = ragged_attention(
                *(q.contiguous(), k.contiguous(), v.contiguous()),
                *(SequenceBorders(queries, max(counts)), SequenceBorders(keys, max(lengths))),
            )
            return mixed.flatten(1)

        return attend

    def _of_span(self, layer: int, span: Span, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one sequence: (1, Hq, count, D)."""
        rows = slice(span.first, span.first + span.count)
        if span.length == span.count:
            key, value = key[:, :, rows], value[:, :, rows]
        else:
            table = torch.tensor(span.table[: -(-span.length // BLOCK)], device=key.device)
            stored = self.blocks.read(layer, table)
            key, value = (each[: span.length].transpose(0, 1).unsqueeze(0) for each in stored)
        return self.weights.ops.attention(query[:, :, rows], key, value, 0.0)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, tables: Tensor) -> Tensor:
        """One new token of each of B sequences (B,), at `positions` (B,), with the blocks in `tables` (B, blocks) ->
        logits (B, V) in float32. A sequence sees its positions up to the new one."""
        tables = tables.long()
        block = tables.gather(1, (positions // BLOCK).unsqueeze(1)).squeeze(1)
        slots = block * BLOCK + positions % BLOCK
        if not tokens.is_cuda and len(tokens) == 1 and _are_neighbours(tables[0]):
            return self.logits(self.trunk(tokens, positions, self._alone(int(tables[0, 0]), int(positions[0]))))
        seen = torch.arange(tables.shape[1] * BLOCK, device=tables.device) <= positions.unsqueeze(1)  # (B, S)
        mask = None if bool(seen.all()) else seen[:, None, None, :]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self.blocks.write(layer, slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
            keys, values = (each.transpose(1, 2) for each in self.blocks.read(layer, tables))  # (B, Hk, S, D)
            B, Hk, _, D = keys.shape
            # All query heads of a key head are queries of it: one token has no future to hide from them.
            grouped = query[0].transpose(0, 1).reshape(B, Hk, -1, D)
            mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return mixed.reshape(B, -1)

        return self.logits(self.trunk(tokens, positions, attend))

    def _alone(self, first: int, position: int) -> Attend:
        """Attention of one sequence whose blocks stand side by side: its keys and values are read where they are."""
        begin, end = first * BLOCK, first * BLOCK + position + 1

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.blocks.slots_of_layer[layer]
            keys[end - 1].copy_(key[0, :, 0])
            values[end - 1].copy_(value[0, :, 0])
            grouped = query.reshape(1, key.shape[1], -1, key.shape[3])
            known = keys[begin:end].transpose(0, 1)[None], values[begin:end].transpose(0, 1)[None]  # (1, Hk, S, D)
            return F.scaled_dot_product_attention(grouped, *known).reshape(1, -1)

        return attend

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, C) -> (N, V) in float32."""
        return wide_logits(hidden, self.weights.head)

    def trunk(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """From ids (N,) to the last norm (N, C)."""
        weights, config, ops = self.weights, self.weights.config, self.weights.ops
        tables = weights.cos[positions], weights.sin[positions]  # (N, D / 2)
        rope = ops.rope if tokens.is_cuda else _fewer_calls_rope(tables)
        rms_norm = ops.rms_norm if tokens.is_cuda or weights.norm.dtype != torch.float32 else _fewer_calls_rms_norm
        x = self.begin(tokens)
        branch: Tensor | None = None
        for number, layer in enumerate(weights.layers):
            normed, x = rms_norm(x, branch, layer.attention_norm, config.rms_norm_eps)
            qkv = project(normed, layer.qkv, layer.qkv_bias).view(1, len(tokens), -1, config.head_size)
            mixed = attend(number, *rope(qkv, *tables, config.heads, config.kv_heads, layer.qk_norm))
            branch = self.second(mixed, layer.out, layer.out_bias)
            normed, x = rms_norm(x, branch, layer.feed_forward_norm, config.rms_norm_eps)
            branch = self._feed_forward(layer, normed)
        return self.end(x, branch, rms_norm)

    # What differs where a model is spread over ranks (`spread`).

    def begin(self, tokens: Tensor) -> Tensor:
        """The residual before the first block (N, C)."""
        x = F.embedding(tokens, self.weights.embedding)
        return widened(x) if self.weights.config.fp32_residual else x

    def second(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """The second matrix of a pair, whose columns tensor ranks share."""
        return project(x, weight, bias)

    def on_all_ranks(self, values: Tensor) -> Tensor:
        """What was computed from hidden states."""
        return values

    def end(self, x: Tensor, branch: Tensor | None, rms_norm: RmsNormOp) -> Tensor:
        """After the last block: normalised hidden states (N, C)."""
        return rms_norm(x, branch, self.weights.norm, self.weights.config.rms_norm_eps)[0]

    def _feed_forward(self, layer: LayerWeights, x: Tensor) -> Tensor:
        if layer.experts is not None:
            mixed: Tensor = layer.experts(x.unsqueeze(0))[0]
            return mixed
        assert layer.gate_up_pairs is not None
        assert layer.down is not None
        inner = self.weights.ops.swiglu(project(x, layer.gate_up_pairs, layer.gate_up_bias))
        return self.second(inner, layer.down, layer.down_bias)


def wide_logits(hidden: Tensor, head: Weight) -> Tensor:
    """(N, C) -> (N, V), not rounded to bfloat16 on a GPU: two likely ids would often come out equal."""
    if isinstance(head, Tensor) and head.is_cuda and hidden.dtype == head.dtype == torch.bfloat16:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    return project(hidden, head, None).float()


def _are_neighbours(table: Tensor) -> bool:
    """Whether the blocks of a table (blocks,) stand side by side, in order."""
    return len(table) == 1 or bool((table[1:] - table[:-1] == 1).all())


def _fewer_calls_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The formula of `ops.rms_norm` in float32, for few tokens on a CPU: calls take longer than their arithmetic."""
    x = x if branch is None else x + branch
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (weight * torch.rsqrt(norm * norm * (1 / x.shape[-1]) + eps)), x


def _fewer_calls_rope(tables: tuple[Tensor, Tensor]) -> RopeOp:
    """The formula of `ops.rope` for few tokens on a CPU, where calls take longer than their arithmetic: queries and
    keys at once, and whole heads instead of halves."""
    cos, sin = (table.unsqueeze(1) for table in tables)
    whole_cos, whole_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)  # (N, 1, D)

    def rope(
        qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norm: QkNorm | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        del cos, sin
        if qkv.shape[1] == 1 and qkv.dtype == whole_cos.dtype:  # one token: heads need not change places
            by_head = qkv.view(1, -1, 1, qkv.shape[3])
            turning = by_head[:, : heads + kv_heads]
            turning = turning if norm is None else _normed(turning, norm, heads)
            turned = torch.addcmul(turning * whole_cos, turning.roll(qkv.shape[3] // 2, dims=-1), whole_sin)
            return turned[:, :heads], turned[:, heads:], by_head[:, heads + kv_heads :]
        turning, value = qkv[0].split((heads + kv_heads, kv_heads), dim=1)
        wide = widened(turning) if norm is None else _normed(turning, norm, heads)
        turned = torch.addcmul(wide * whole_cos, wide.roll(wide.shape[-1] // 2, dims=-1), whole_sin).to(qkv.dtype)
        query, key = turned.transpose(0, 1).unsqueeze(0).split((heads, kv_heads), dim=1)
        return query, key, value.transpose(0, 1).unsqueeze(0)

    return rope


def _normed(turning: Tensor, norm: QkNorm, heads: int) -> Tensor:
    """Query and key heads (N, Hq + Hk, ..., D), normalised together."""
    wide = widened(turning)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + norm.eps)
    normed[:, :heads] *= norm.query
    normed[:, heads:] *= norm.key
    return normed
