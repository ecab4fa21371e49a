"""What one process holds of a model that is cut over the pipeline, the tensor and the expert axis.

A tensor rank has an equal share of the heads, of the inner width and of the rows of embedding and head; norms, and the
biases of the projections into the residual, are copied, and so are routers and shared experts. A process of the expert
axis has an equal share of the experts. A pipeline stage has some of the blocks; the first one also
the embedding, the last one the last norm and the head.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from zero2all.model.config import ModelConfig


@dataclass(frozen=True)
class HeldStage:
    """The part of a model in one process of the pipeline axis."""

    layers: int
    has_embedding: bool = True
    has_head: bool = True
    in_flight: float = 1.0
    """Micro-batches whose activations it keeps at the peak, counted in those of all its blocks."""
    heads: int = 1
    """Micro-batches of the last stage whose loss is computed and whose backward pass has not begun, at the peak."""
    deferred: int = 0
    """With zero_bubble: micro-batches after whose backward pass the gradients of matrices are still to be computed."""
    sends: int = 0
    """Tensors of hidden states that it sends in one pass: forward to the next stage, and gradients back."""


@dataclass(frozen=True)
class HeldModel(ModelConfig):
    """A model of the size of what one process holds."""

    table_rows: int = 0
    routed: int = 0

    @property
    def router_rows(self) -> int:
        """Experts that a router chooses among, also those in other processes."""
        return self.routed

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head in this process."""
        return self.table_rows


def held_model(model: ModelConfig, tensor: int = 1, stage: HeldStage | None = None, expert: int = 1) -> ModelConfig:
    """A model as large as what a process holds of `model`. In the first and the last stage of a pipeline it has one
    table (tied), between them none."""
    if tensor == expert == 1 and stage is None:
        return model
    moe = replace(model.moe, experts=model.moe.experts // expert)
    if stage is not None and not stage.has_embedding:
        moe = replace(moe, dense_layers=0)  # they are the first
    values = {field.name: getattr(model, field.name) for field in fields(ModelConfig)}
    values |= {
        "heads": model.heads // tensor,
        "kv_heads": max(1, model.kv_heads // tensor),
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate_size // tensor,
        "moe": moe,
        "embedding_norm": model.embedding_norm and (stage is None or stage.has_embedding),
    }
    rows = model.vocab_rows // tensor
    if stage is not None and not (stage.has_embedding and stage.has_head):
        rows = rows if stage.has_embedding or stage.has_head else 0
        values["tied_embeddings"] = True
    return HeldModel(
        **{**values, "layers": stage.layers if stage else model.layers}, table_rows=rows, routed=model.moe.experts
    )


def expert_values(model: ModelConfig) -> int:
    """Values of the experts of a model (as held)."""
    return 3 * model.hidden_size * model.moe.expert_size * model.moe.experts * model.expert_layers


def copied_values(model: ModelConfig) -> int:
    """Values of a model (as held) of which every tensor rank has a copy: norms, biases that are added once, routers and
    shared experts."""
    of_experts = model.expert_layers * model.hidden_size * (model.router_rows + 3 * model.shared_size)
    biases = (model.hidden_size if model.attention_bias == "all" else 0) + (model.hidden_size if model.mlp_bias else 0)
    norms = 2 * model.hidden_size + (2 * model.head_size if model.qk_norm else 0)
    return model.layers * (norms + biases) + (1 + model.embedding_norm) * model.hidden_size + of_experts
