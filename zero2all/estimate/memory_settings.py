"""What determines the memory of a run: the inputs of `zero2all.estimate.memory`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from zero2all.estimate.local_model import HeldStage, held_model
from zero2all.model.config import LoraConfig, ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint, Sizes

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
    def loss_ranks(self) -> int:
        """Processes with tokens of their own."""
        return self.replicate * self.shard * self.context

    @property
    def processes(self) -> int:
        """All processes."""
        return self.loss_ranks * self.tensor * self.pipeline

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
