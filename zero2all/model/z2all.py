"""Z2all: a Llama-style decoder, and only that.

`ops.registry` chooses the kernel of each operator, and `parallel` spreads the model over devices. Legend: B batch,
T positions, C hidden width, Hq and Hk query and key/value heads, D head width, F inner width of SwiGLU, V vocabulary
rows.

`document_ids` (B, T), where given, tell the documents of a row apart: attention is masked at document boundaries and
positions start at 0 in each document, so that the output for a document does not depend on its neighbours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero2all.model.config import LoraConfig, ModelConfig
from zero2all.model.moe import MixtureOfExperts
from zero2all.model.rope import rope_tables
from zero2all.ops.precision import widened
from zero2all.ops.registry import Ops
from zero2all.ops.rms_norm import eager_rms_norm
from zero2all.ops.rope import QkNorm


def adapted(ops: Ops, layer: nn.Linear, x: Tensor, bias: Tensor | None) -> Tensor:
    """(..., inputs) -> (..., outputs): W x + bias, and what its adapters add where it has some."""
    y, lora = ops.linear(x, layer.weight, bias), getattr(layer, "lora", None)  # `zero2all.model.lora`
    return y if lora is None else y + lora(x)


class RMSNorm(nn.Module):
    """Add a branch to the residual; scale each position of the sum to unit mean square, then by a learned weight."""

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.ops = eps, ops

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Residual and branch (B, T, C) -> the normalised sum and the sum."""
        return self.ops.rms_norm(x, branch, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q, k and v come from one matmul. With `qk_norm` each query and key
    head is normalised before it is rotated, so that attention logits stay bounded whatever the matrices become."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops, self.dropout = ops, config.attention_dropout
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        rows = (config.heads + 2 * config.kv_heads) * config.head_size
        self.qkv = nn.Linear(config.hidden_size, rows, bias=config.attention_bias != "none")
        self.out = nn.Linear(config.heads * config.head_size, config.hidden_size, bias=config.attention_bias == "all")
        self.q_norm = RMSNorm(config.head_size, config.rms_norm_eps, ops) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.rms_norm_eps, ops) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any | None) -> Tensor:
        """(B, T, C) -> (B, T, C). `documents` is what `ops.prepare_documents` returned."""
        return adapted(self.ops, self.out, self.mix(x, cos, sin, documents), self.out.bias)

    def mix(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any | None) -> Tensor:
        """The same before the output projection: (B, T, C) -> (B, T, Hq D)."""
        B, T, _ = x.shape
        qkv = adapted(self.ops, self.qkv, x, self.qkv.bias).view(B, T, -1, self.head_size)
        query, key, value = self.ops.rope(qkv, cos, sin, self.heads, self.kv_heads, self.qk_norm)  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        mixed = self.ops.attention(query, key, value, dropout, documents)  # (B, Hq, T, D)
        return mixed.transpose(1, 2).reshape(B, T, -1)

    @property
    def qk_norm(self) -> QkNorm | None:
        """The norms of query and key heads, which `ops.rope` computes."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return QkNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class FeedForward(nn.Module):
    """SwiGLU; gate and up come from one matmul whose rows alternate: row 2 i is gate i, row 2 i + 1 is up i. So the
    matmul's epilogue can multiply them, and a slice of rows is a set of whole units, as tensor parallelism needs it."""

    def __init__(self, config: ModelConfig, inner: int, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up_pairs = nn.Linear(config.hidden_size, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return self.compute(x, self.down.bias)

    def compute(self, x: Tensor, down_bias: Tensor | None) -> Tensor:
        """The same with this bias at the end: fused where `ops` can do that and there are no adapters."""
        pairs, down, ops = self.gate_up_pairs, self.down, self.ops
        if hasattr(pairs, "lora") or hasattr(down, "lora"):
            return adapted(ops, down, ops.swiglu(adapted(ops, pairs, x, pairs.bias)), down_bias)
        return ops.feed_forward(x, (pairs.weight, pairs.bias), (down.weight, down_bias))


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised residual; the next norm adds their output (the branch)."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.attention = Attention(config, ops)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.feed_forward = _feed_forward(config, layer, ops)
        self.dropout = nn.Dropout(config.residual_dropout)

    def forward(
        self, x: Tensor, branch: Tensor | None, cos: Tensor, sin: Tensor, documents: Any | None
    ) -> tuple[Tensor, Tensor]:
        """Residual and the branch not yet added to it (B, T, C) -> the same after this block."""
        normed, x = self.attention_norm(x, branch)
        branch = self.dropout(self.attention(normed, cos, sin, documents))
        normed, x = self.feed_forward_norm(x, branch)
        return x, self.dropout(self.feed_forward(normed))


def _feed_forward(config: ModelConfig, layer: int, ops: Ops) -> FeedForward | MixtureOfExperts:
    """The feed-forward part of a block: one SwiGLU for all tokens, or experts."""
    if not config.has_experts(layer):
        return FeedForward(config, config.intermediate_size, ops)
    shared = FeedForward(config, config.shared_size, ops) if config.moe.shared_experts else None
    return MixtureOfExperts(config, layer, ops, shared)


@dataclass(frozen=True)
class PipelineStage:
    """Consecutive blocks that a process of a pipeline runs at once (`zero2all.parallel.pipeline`)."""

    blocks: range
    is_first: bool
    is_last: bool


class Z2all(nn.Module):
    """The whole model: token ids in, logits or losses out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.lora = LoraConfig()
        """Which adapters it has (`zero2all.model.lora.add_adapters`)."""
        self.arrange: Callable[[Sequence[nn.Module]], Sequence[Callable[..., Any]]] | None = None
        """How the blocks of a pass are called (`zero2all.model.recompute`); None: one after the other."""
        self.embedding = nn.Embedding(config.vocab_rows, config.hidden_size)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops) if config.embedding_norm else None
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(Block(config, layer, ops) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.head = None if config.tied_embeddings else nn.Linear(config.hidden_size, config.vocab_rows, bias=False)
        cos, sin = rope_tables(config, config.max_seq_len)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(
        self,
        tokens: Tensor,
        document_ids: Tensor | None = None,
        places: Tensor | None = None,
        stage: PipelineStage | None = None,
        x: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, T) -> normalised hidden states (B, T, C). With `places` (T,) the tokens are those that stand
        there in longer rows, and document_ids are of the whole rows.
        `stage`: only its blocks, on what the stage before it returned (`x`); all but the last return the residual."""
        length = tokens.shape[1]
        longest = self.config.max_seq_len
        if length > longest and document_ids is None:
            raise ValueError(f"{length} positions exceed model.max_seq_len ({longest})")
        documents = None
        if document_ids is None:
            at = slice(length) if places is None else places
            cos, sin = self.cos[at], self.sin[at]  # (T, D/2)
        else:
            documents = self.ops.prepare_documents(document_ids)
            positions = _positions(document_ids)
            positions = positions if places is None else positions[:, places]
            if length > longest:  # rows of pairs: no answer is longer, but padding may be
                positions = positions.clamp(max=longest - 1)
            cos, sin = self.cos[positions], self.sin[positions]  # (B, T, D/2)
        if x is None:
            x = self.ops.embedding(tokens, self.embedding.weight)  # (B, T, C)
            x = x if self.embedding_norm is None else self.embedding_norm(x, None)[0]
            x = self.embedding_dropout(x)
            if self.config.fp32_residual:
                x = widened(x)
            elif torch.is_autocast_enabled(tokens.device.type):
                x = x.to(torch.get_autocast_dtype(tokens.device.type))
        branch: Tensor | None = None
        blocks: Sequence[Any] = list(self.blocks) if stage is None else self.blocks_of(stage)
        for block in blocks if self.arrange is None else self.arrange(blocks):
            x, branch = block(x, branch, cos, sin, documents)
        if stage is not None and not stage.is_last:
            return x if branch is None else x + branch
        normed, _ = self.norm(x, branch)
        return normed

    def blocks_of(self, stage: PipelineStage) -> list[nn.Module]:
        """The blocks of a stage, by their numbers in the whole model: a process may have only some of them."""
        return [self.blocks.get_submodule(str(number)) for number in stage.blocks]

    def embedding_rows(self) -> Tensor:
        """What a token id becomes (V, C): the rows of the embedding, normalised where `embedding_norm` does that."""
        rows, norm = self.embedding.weight, self.embedding_norm
        return rows if norm is None else scaled_rows(rows, norm.weight, norm.eps)

    @property
    def head_weight(self) -> Tensor:
        """The output matrix (V, C): the head's, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., vocab_size); the padding rows of the matrix are left out, so they are never predicted."""
        return F.linear(hidden, self.head_weight[: self.config.vocab_size])

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        document_ids: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Ids, targets and the weight of each position (B, T) -> the sum of weights * losses to call backward on, with
        z_loss * logsumexp(logits)^2 added to each loss, and the losses in nats (B, T), without gradient or z term."""
        if weights is None:
            weights = torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
        return self.head_loss(self(tokens, document_ids=document_ids), targets, weights, z_loss)

    def head_loss(self, hidden: Tensor, targets: Tensor, weights: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        """The same from hidden states (B, T, C)."""
        return self.ops.linear_cross_entropy(hidden, self.head_weight, targets, weights, self.config.vocab_ids, z_loss)


def scaled_rows(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An embedding with its norm applied to each row (V, C), so that no norm is needed any more."""
    normed, _ = eager_rms_norm(rows, None, weight, eps)
    return normed


def _positions(document_ids: Tensor) -> Tensor:
    """(B, T) -> (B, T): the place of each token within its document, from 0."""
    at = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return at - torch.where(begins, at, 0).cummax(dim=1).values


def compile_model(model: Z2all) -> None:
    """Put torch.compile around what `ops.compile` says, in place: one block, used for all of them, or the trunk, from
    the ids to the last norm. Head and loss are not compiled: they work in chunks. Nor are experts: how many tokens each
    has changes with every pass."""
    for block in model.blocks:
        if model.ops.compile != "none" and isinstance(block.feed_forward, MixtureOfExperts):
            block.feed_forward.routed = torch.compiler.disable(block.feed_forward.routed)  # type: ignore[method-assign]
    if model.ops.compile == "block":
        for block in model.blocks:
            block.compile(dynamic=False)
    elif model.ops.compile == "trunk":
        torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
        model.compile(dynamic=False)
