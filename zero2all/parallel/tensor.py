"""Tensor and sequence parallelism: each tensor rank has a part of every matrix and, between them, of every sequence.

    residual, norms, dropout      (B, T/t, C): every rank has some of the positions
    attention, feed-forward       all positions are gathered; each rank computes its own heads and its own inner units,
                                  which is a part of a sum over the ranks; of the sum each gets its own positions
    embedding, head               each rank has the rows of some ids

The first matrix of a pair is cut by rows (its outputs), the second by columns (its inputs), so one sum after the second
suffices. Gathering before and summing after cost as much as one all-reduce. What is the same on every rank (norms, the
biases of second matrices) sees only the positions of its rank, so its gradient is summed over the ranks
(`zero2all.parallel.mesh.Mesh.sums`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero2all.model.config import VOCAB_MULTIPLE, ModelConfig
from zero2all.model.init import without_weights
from zero2all.model.z2all import Attention, Block, FeedForward, Z2all, adapted
from zero2all.ops.cut_vocabulary import Exchange, cut_linear_cross_entropy
from zero2all.ops.embedding import EmbeddingOp
from zero2all.ops.linear_cross_entropy import LinearCrossEntropyOp, Loss
from zero2all.ops.registry import Ops
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Axis
from zero2all.parallel.reduce import gather_into, scatter_sum_into
from zero2all.parallel.run_config import SpreadConfig

# ---- positions ---------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """(B, T/t, C) -> (B, T, C), and back by summing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _own_positions_of_sum(dy, ctx.axis), None


class _SumAndCut(torch.autograd.Function):
    """Parts of a sum (B, T, C) -> the own positions of the sum (B, T/t, C), and back by gathering."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _own_positions_of_sum(x, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(dy, ctx.axis), None


def gather_positions(x: Tensor, axis: Axis) -> Tensor:
    """All positions, for a part of the matrices: its gradient is summed over the ranks."""
    whole: Tensor = _Gather.apply(x, axis)
    return whole


def sum_and_cut(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks, of which each gets its own positions; in the dtype of the values."""
    own: Tensor = _SumAndCut.apply(x, axis)
    return own


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    B, T, C = x.shape
    of_ranks = x.new_empty(axis.size, B, T, C)
    gather_into(of_ranks.view(-1), x.contiguous().view(-1), group=axis.group)
    return of_ranks.transpose(0, 1).reshape(B, axis.size * T, C)


def _own_positions_of_sum(x: Tensor, axis: Axis) -> Tensor:
    B, T, C = x.shape
    of_ranks = x.view(B, axis.size, T // axis.size, C).transpose(0, 1).contiguous()
    own = torch.empty_like(of_ranks[0])
    scatter_sum_into(own.view(-1), of_ranks.view(-1), group=axis.group)
    return own


# ---- the model ---------------------------------------------------------------------------------------------------


class CutAttention(Attention):
    """The heads of one tensor rank."""

    def __init__(self, config: ModelConfig, ops: Ops, axis: Axis) -> None:
        """`config`: with the heads of one rank."""
        super().__init__(config, ops)
        self.axis = axis

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any | None) -> Tensor:
        """Own positions (B, T/t, C) -> own positions."""
        mixed = self.mix(gather_positions(x, self.axis), cos, sin, documents)
        branch = sum_and_cut(adapted(self.ops, self.out, mixed, None), self.axis)
        return branch if self.out.bias is None else branch + self.out.bias


class CutFeedForward(FeedForward):
    """The inner units of one tensor rank."""

    def __init__(self, config: ModelConfig, ops: Ops, axis: Axis) -> None:
        """`config`: with the inner units of one rank."""
        super().__init__(config, config.intermediate_size, ops)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Own positions (B, T/t, C) -> own positions."""
        branch = sum_and_cut(self.compute(gather_positions(x, self.axis), None), self.axis)
        return branch if self.down.bias is None else branch + self.down.bias


def local_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model with the heads and inner units of one tensor rank. With fewer kv heads than ranks, each has one."""
    return replace(
        config,
        head_dim=config.head_size,
        heads=config.heads // ranks,
        kv_heads=max(1, config.kv_heads // ranks),
        intermediate_size=config.intermediate_size // ranks,
    )


def cut_model(model: Z2all, axis: Axis) -> None:
    """Leave in a whole model on the meta device what one tensor rank has of it. Call it where the model is built,
    before anything else is done to it; the config of the model stays that of the whole. A run with one tensor rank does
    not call it."""
    config, local = model.config, local_config(model.config, axis.size)
    dtype, rows = model.embedding.weight.dtype, config.vocab_rows // axis.size
    with without_weights():
        for block in model.blocks:
            assert isinstance(block, Block)
            block.attention = CutAttention(local, block.attention.ops, axis)
            if isinstance(block.feed_forward, FeedForward):  # experts are cut over an axis of their own
                block.feed_forward = CutFeedForward(local, block.feed_forward.ops, axis)
        model.embedding = nn.Embedding(rows, config.hidden_size)
        if model.head is not None:
            model.head = nn.Linear(config.hidden_size, rows, bias=False)
    model.to(dtype).train(model.training)
    ops = model.ops
    model.ops = replace(
        ops,
        embedding=_cut_embedding(ops.embedding, axis),
        linear_cross_entropy=_loss_of_gathered(ops.taken["linear_cross_entropy"], axis),
    )


def _cut_embedding(embedding: EmbeddingOp, axis: Axis) -> EmbeddingOp:
    """Each rank looks up the ids whose rows it has; the others' rows are 0 in its part of the sum."""

    def look_up(tokens: Tensor, table: Tensor) -> Tensor:
        place = tokens - axis.rank * len(table)
        is_elsewhere = (place < 0) | (place >= len(table))
        rows = embedding(tokens % len(table), table)  # any row will do for the others
        return sum_and_cut(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), axis)

    return look_up


def _loss_of_gathered(kind: str, axis: Axis) -> LinearCrossEntropyOp:
    """The loss of all positions, on every rank; the hidden states are those of its own positions."""

    def largest(values: Tensor) -> Tensor:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=axis.group)
        return values

    loss = cut_linear_cross_entropy(kind, Exchange(axis.rank, largest, axis.sum))

    def loss_of_gathered(
        hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0
    ) -> Loss:
        return loss(gather_positions(hidden, axis), head, targets, weights, vocab_size, z)

    return loss_of_gathered


# ---- kv heads on several ranks -----------------------------------------------------------------------------------


def sum_copied_heads(gradients: Sequence[Tensor], copies: int, axis: Axis) -> None:
    """Sum, in place, the gradients of kv heads that `copies` neighbouring ranks have: each rank has computed the part
    of its own query heads. One collective: every kv head has a row in it."""
    if not gradients:
        return
    own = torch.cat([values.reshape(-1) for values in gradients])
    if not own.numel():  # ZeRO gave these rows to other processes
        return
    of_heads = own.new_zeros(axis.size // copies, own.numel())
    of_heads[axis.rank // copies] = own
    axis.sum(of_heads)
    sums = of_heads[axis.rank // copies].split([values.numel() for values in gradients])
    for values, total in zip(gradients, sums, strict=True):
        values.copy_(total.view(values.shape))


# ---- rules -------------------------------------------------------------------------------------------------------


def problems(config: SpreadConfig, sizes: MeshSizes) -> list[str]:
    """Why a run cannot be spread over this many tensor ranks."""
    ranks, model = sizes.tensor, config.model
    if ranks == 1:
        return []
    cut = [("model.heads", model.heads, "query heads")]
    if model.expert_layers < model.layers:
        cut.append(("model.intermediate_size", model.intermediate_size, "inner units of the feed-forward"))
    found = [
        f"{name} {size} is not a multiple of parallel.tensor {ranks}: every rank has the same number of {what}. Choose "
        f"a divisor of {size}, or another {name}."
        for name, size, what in cut
        if size % ranks
    ]
    found += _kv_problems(model.kv_heads, ranks, config.parallel.copy_kv_heads)
    if model.vocab_size is not None and model.vocab_rows % ranks:
        unit = math.lcm(VOCAB_MULTIPLE, ranks)
        found.append(
            f"The vocabulary of {model.vocab_size} ids, padded to a multiple of {VOCAB_MULTIPLE}, has "
            f"{model.vocab_rows} rows, which is not a multiple of parallel.tensor {ranks}: every rank has the same "
            f"number of rows of the embedding and the head. Set parallel.tensor to a divisor of {model.vocab_rows}, or "
            f"model.vocab_size to {-(-model.vocab_size // unit) * unit}."
        )
    if config.optim.kind == "adamw_8bit":
        found.append(
            f"optim.kind adamw_8bit does not work with parallel.tensor {ranks}: it scales its moments row by row, and "
            f"a tensor rank has only a part of each. Use muon, adamw or adamw_bf16, or parallel.zero with "
            f"parallel.tensor 1."
        )
    if config.ops.compile != "none":
        found.append(
            f"ops.compile {config.ops.compile} does not work with parallel.tensor {ranks}: every block communicates, "
            f"which cannot be compiled. Set ops.compile to none."
        )
    return found


def _kv_problems(kv_heads: int, ranks: int, may_copy: bool) -> list[str]:
    if kv_heads % ranks == 0:
        return []
    if ranks % kv_heads:
        return [
            f"model.kv_heads {kv_heads} and parallel.tensor {ranks} do not fit: neither is a multiple of the other. "
            f"Set parallel.tensor to a divisor or a multiple of {kv_heads}."
        ]
    if may_copy:
        return []
    return [
        f"model.kv_heads {kv_heads} is less than parallel.tensor {ranks}. Set parallel.tensor to a divisor of "
        f"{kv_heads}, or set parallel.copy_kv_heads to true: then {ranks // kv_heads} ranks have a copy of each kv "
        f"head and sum its gradient."
    ]
