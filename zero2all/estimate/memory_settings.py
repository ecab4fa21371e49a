"""What determines the memory of a run: the inputs of `zero2all.estimate.memory`; and what one process holds of a model
that is cut over the pipeline, the tensor and the expert axis.

A tensor rank has an equal share of the heads, of the inner width and of the rows of embedding and head; norms, and the
biases of the projections into the residual, are copied, and so are routers and shared experts. A process of the expert
axis has an equal share of the experts. A pipeline stage has some of the blocks; the first one also the embedding, the
last one the last norm and the head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from zero2all.model.config import LoraConfig, ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint, Sizes


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
    values["layers"] = stage.layers if stage else model.layers
    return HeldModel(**values, table_rows=rows, routed=model.moe.experts)


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


WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by train.precision."""
Place = Literal["device", "host"]
PLACE_OF_STATES: dict[str, Place] = {"none": "device", "optimizer": "host"}
"""Where masters and optimizer states are kept, by parallel.offload."""


@dataclass(frozen=True)
class MemorySettings:
    """Everything that determines the memory of a run, except the shape of the model."""

    seq_len: int
    micro_batch_samples: int
    operators: Mapping[str, Footprint]  # what each operator needs (`Ops.footprints`)
    precision: str = "bfloat16"
    optimizer: str = "adamw"  # optim.kind
    kahan: bool = False  # optim.bf16_rounding: kahan
    recompute: str = "none"
    recompute_every: int = 1
    documents: bool = False  # whether attention is masked at document boundaries
    lora: LoraConfig = field(default_factory=LoraConfig)
    passes: int = 1  # micro-batches of a step in each process
    zero: int = 0  # parallel.zero, and the sizes of the axes of the mesh
    replicate: int = 1
    shard: int = 1
    context: int = 1
    context_method: Literal["ulysses", "gather"] = "ulysses"  # parallel.context_method, decided
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    stage: HeldStage | None = None  # of a pipeline; None: all of the model
    overlap: bool = True  # parallel.overlap
    compress: str = "none"  # parallel.compress
    offload: str = "none"  # parallel.offload
    bucket_bytes: float = 128e6  # of gradients (parallel.bucket_mb)
    workspace_bytes: float = 0.0
    """Of the libraries, out of torch's memory: see `zero2all.estimate.gpus`."""
    owned: tuple[float, float] | None = None
    """With zero 1 and 2: values of the matrices in KINDS_APART, and of the other parameters, that the fullest process
    keeps the masters of. None: equal shares."""

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP2 shards the weights; one process has nothing to shard."""
        return self.zero == 3 and self.replicate * self.shard > 1

    @property
    def state_ranks(self) -> int:
        """Processes that share one copy of the masters and the optimizer states."""
        return self.shard if self.zero >= 1 else 1

    @property
    def gradient_ranks(self) -> int:
        """Processes that share one copy of the gradients."""
        return self.shard if self.zero >= 2 else 1

    @property
    def gradient_bytes(self) -> int:
        """Of one gradient. Only an optimizer without masters takes them in the precision of the weights."""
        width = WIDTHS[self.precision]
        return width if self.optimizer == "adamw_bf16" else max(4, width)

    @property
    def has_split_masters(self) -> bool:
        """Whether a bfloat16 weight is the upper half of its master: our AdamW (`zero2all.ops.split_master`), but not
        that on the host."""
        splits = self.operators["optimizer"].splits_masters and self.offload == "none" and not self.is_fsdp
        return self.precision == "bfloat16" and self.optimizer == "adamw" and splits

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in one process of the context axis; its tensor ranks share them."""
        return self.micro_batch_samples * self.seq_len // self.context

    @property
    def expert_shard(self) -> int:
        """Processes that share one copy of the states of an expert."""
        return self.shard if self.is_fsdp else self.shard * self.context * self.tensor // self.expert

    def trained(self, model: ModelConfig) -> int:
        """Values that are updated, of a model as held: those of the adapters where there are some, else all."""
        return self.lora.parameters(model) if self.lora.rank else parameter_counts(model)["total"]

    def held(self, model: ModelConfig) -> ModelConfig:
        """A model as large as what this process holds."""
        return held_model(model, self.tensor, self.stage, self.expert)

    @property
    def processes(self) -> int:
        """All processes."""
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    def kv_copies(self, model: ModelConfig) -> int:
        """How often a context rank has each key and value for attention, beside a process with whole sequences that
        has 1/context of the tokens: gathered from all, or repeated until the heads divide."""
        if self.context_method == "gather":
            return self.context
        return math.lcm(model.kv_heads, self.context) // model.kv_heads

    def sizes(self, model: ModelConfig) -> Sizes:
        """What the size of saved tensors depends on."""
        width = WIDTHS[self.precision]
        return Sizes(
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_size=model.head_size,
            seq_len=self.seq_len,
            value_bytes=width,
            residual_bytes=max(4, width) if model.fp32_residual else width,
            documents=self.documents,
            attention_dropout=model.attention_dropout > 0,
            vocab_rows=model.vocab_rows,
            experts=model.moe.experts,
            router_rows=model.router_rows,
            experts_per_token=model.moe.experts_per_token,
            expert_size=model.moe.expert_size,
            shared_size=model.shared_size,
            qk_norm=model.qk_norm,
        )
