"""Memory of a training run on one device, by arithmetic, before anything is allocated.

All the time: weights, float32 masters, gradients, optimizer state. During a step: what each block saves for the
backward pass, times the tokens of a micro-batch, plus the larger of two peaks: the head with its logits (end of the
forward pass), or the first block of the backward pass with its gradients.

The operators state what they save (`zero2all.ops.footprint`). Not counted: what the CUDA context and libraries take,
and what torch's allocator reserves without using it. With torch.compile the compiler decides what is saved, mostly less
than this. Passes in a CUDA graph (`zero2all.train.cuda_graph`) keep their activations allocated, and what happens
between steps needs memory beside them.

On an H200 (1.2555 B parameters, 16 x 2048 tokens, fused operators) 53.7 GiB were measured and 53.6 estimated in
bfloat16, 58.1 and 58.1 in float8; with whole instead of split masters 56.1 and 56.0, 60.5 and 60.5; with
FlashAttention 4 and QuACK 54.9 and 54.6. The other operators agree within 3 % with what torch saves for small models on
a CPU (tests/limits); recomputation and sharding have not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero2all.limits.floors import linear_shapes
from zero2all.limits.flops import recomputed_blocks
from zero2all.model.config import ModelConfig, parameter_counts
from zero2all.ops.footprint import Footprint, Sizes

GIB = 2**30
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by train.precision."""
BLOCK_OF_8BIT_MOMENTS = 256
"""Values with one float32 scale (`zero2all.train.optimizers.adamw_8bit`)."""
ALLOWANCE = 0.08
"""Share of a device's memory that is left free for what the estimate does not count."""


@dataclass(frozen=True)
class MemorySettings:
    """Everything beside the model's shape that decides the memory of a run."""

    seq_len: int
    micro_batch_samples: int
    operators: Mapping[str, Footprint]  # what each operator needs (`Ops.footprints`)
    precision: str = "bfloat16"
    optimizer: str = "adamw"  # optim.kind
    adafactor_momentum: bool = False  # optim.adafactor_beta1 above 0
    kahan: bool = False  # optim.bf16_rounding: kahan
    recompute: str = "none"
    recompute_every: int = 1
    documents: bool = False  # whether attention is masked at document boundaries
    processes: int = 1
    spread: str = "replicate"  # parallel.data
    accumulates: bool = False  # whether a step has more than one micro-batch

    @property
    def has_split_masters(self) -> bool:
        """Whether a bfloat16 weight is the upper half of its master: our AdamW (`zero2all.ops.split_master`)."""
        return self.precision == "bfloat16" and self.optimizer == "adamw" and self.operators["optimizer"].splits_masters

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_samples * self.seq_len

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
        )


@dataclass(frozen=True)
class MemoryPart:
    """One line of an estimate."""

    name: str
    bytes: float
    note: str


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run needs on one device, at its peak."""

    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(part.bytes for part in self.parts)

    @property
    def state(self) -> float:
        """Bytes in use between two steps."""
        return sum(part.bytes for part in self.parts if part.name in STATE_PARTS)

    def lines(self) -> list[str]:
        """The estimate as a table."""
        rows = [
            f"  {part.name:<14}{part.bytes / GIB:>8.2f} GiB  {part.note}"
            for part in self.parts
            if part.bytes >= GIB / 1e3
        ]
        return [*rows, f"  {'total':<14}{self.total / GIB:>8.2f} GiB"]


STATE_PARTS = ("weights", "masters", "gradients", "optimizer")


def estimate_memory(model: ModelConfig, settings: MemorySettings) -> MemoryEstimate:
    """The parts of the memory of a run, on the device that needs most."""
    parts = [*_state_parts(model, settings), *_gathered_parts(model, settings), *_float8_parts(model, settings)]
    saved = saved_bytes_per_token(model, settings)
    note = f"{saved / 1e3:.1f} KB per token, recompute {settings.recompute}"
    parts.append(MemoryPart("activations", settings.tokens * saved, note))
    head, block = _head_peak(model, settings), _block_peak(model, settings)
    what = "head and loss" if head >= block else "first block of the backward pass"
    parts.append(MemoryPart("working space", max(head, block), what))
    return MemoryEstimate(tuple(parts))


def optimizer_bytes(model: ModelConfig, kind: str, adafactor_momentum: bool = False, kahan: bool = False) -> float:
    """Bytes of the optimizer state for the whole model, beside float32 masters (adamw_bf16 has none)."""
    counts = parameter_counts(model)
    total, matrices = counts["total"], counts["matmul"] - counts["embedding"]
    if kind == "adamw":
        return 8.0 * total
    if kind in ("lion", "sgd"):
        return 4.0 * total
    if kind == "muon":
        return 4.0 * matrices + 8.0 * (total - matrices)
    if kind == "adamw_bf16":
        return (6.0 if kahan else 4.0) * total
    shapes = _matrix_shapes(model)
    vectors = total - sum(rows * columns for rows, columns in shapes)
    if kind == "adamw_8bit":
        scales = sum(rows * -(-columns // BLOCK_OF_8BIT_MOMENTS) for rows, columns in shapes)
        return 2.0 * (total - vectors) + 2 * 4.0 * scales + 8.0 * vectors
    if kind == "adafactor":
        factors = sum(rows + columns for rows, columns in shapes)
        return 4.0 * (factors + vectors) + (4.0 * total if adafactor_momentum else 0.0)
    raise AssertionError(f"unknown optimizer {kind!r}")


def _matrix_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Every weight of two dimensions, tables included."""
    tables = [(model.vocab_rows, model.hidden_size)] * (1 if model.tied_embeddings else 2)
    return [*linear_shapes(model).values()] * model.layers + tables


def _state_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    total, width = parameter_counts(model)["total"], WIDTHS[settings.precision]
    wide, sharded = max(4, width), settings.spread == "shard" and settings.processes > 1
    share = 1 / settings.processes if sharded else 1.0
    of = f", 1/{settings.processes} of them" if sharded else ""
    moments = optimizer_bytes(model, settings.optimizer, settings.adafactor_momentum, settings.kahan) * (wide / 4)
    optimizer = MemoryPart(
        "optimizer", moments * share, f"{moments / total:.2f} bytes a parameter, {settings.optimizer}"
    )
    if settings.optimizer == "adamw_bf16":
        return [
            MemoryPart("weights", 2.0 * total * share, f"bfloat16, no masters{of}"),
            MemoryPart("gradients", 2.0 * total * share, f"bfloat16{of}"),
            optimizer,
        ]
    keeps_copies = width < wide and not sharded  # FSDP makes the low-precision weights when it gathers
    split_masters = settings.has_split_masters and not sharded
    master_bytes = wide - width if split_masters else wide
    beside = " beside the weights" if split_masters else ""
    return [
        MemoryPart(
            "weights", float(width * total) if keeps_copies else 0.0, f"{settings.precision}, for the forward pass"
        ),
        MemoryPart("masters", master_bytes * total * share, f"{master_bytes} bytes a parameter{beside}{of}"),
        MemoryPart("gradients", wide * total * share, f"{wide} bytes a parameter{of}"),
        optimizer,
    ]


def _gathered_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """Unsharded weights on a rank of a sharded run: the tables all the time, blocks two at a time."""
    if settings.spread != "shard" or settings.processes == 1:
        return []
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    block, ends = counts["blocks"] / model.layers, counts["embedding"] + counts["head"]
    gathered = width * (ends + 2 * block)
    # Gradients are reduced only after the last micro-batch; until then each rank holds whole ones in float32.
    waiting = max(4, width) * counts["total"] if settings.accumulates else (width + 4) * (ends + block)
    note = (
        "whole gradients until the last micro-batch" if settings.accumulates else "gradients of a block and the tables"
    )
    return [
        MemoryPart("gathered", gathered, "whole weights of the tables and two blocks"),
        MemoryPart("unreduced", waiting, note),
    ]


def _float8_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    copy_bytes = settings.operators["linear"].weight_copy_bytes
    if not copy_bytes:
        return []
    counts = parameter_counts(model)
    values = counts["matmul"] - counts["embedding"]
    return [MemoryPart("float8", float(copy_bytes * values), "weights of the blocks, as they are and transposed")]


def saved_bytes_per_token(model: ModelConfig, settings: MemorySettings) -> float:
    """What all blocks and the last norm save for the backward pass."""
    recomputed = recomputed_blocks(model, settings.recompute, settings.recompute_every)
    whole = _saved_by_block(model, settings)
    less = _saved_by_recomputed_block(model, settings)
    return (model.layers - recomputed) * whole + recomputed * less + _saved_by_last_norm(model, settings)


def _saved_by_last_norm(model: ModelConfig, settings: MemorySettings) -> float:
    sizes = settings.sizes(model)
    return settings.operators["rms_norm"].saved(sizes) + sizes.value_bytes * sizes.hidden_size


def _saved_by_block(model: ModelConfig, settings: MemorySettings) -> float:
    """By one block that recomputes nothing; per token."""
    ops, sizes = settings.operators, settings.sizes(model)
    copy_bytes = ops["linear"].input_copy_bytes
    # The output of a norm is saved by the linear layer after it, as it is or as a copy.
    norms = 2 * (ops["rms_norm"].saved(sizes) + (copy_bytes or sizes.value_bytes) * sizes.hidden_size)
    # Attention saves its output, and the projection after it the same memory, or a copy.
    attention = ops["attention"].saved(sizes) + (sizes.value_bytes + copy_bytes) * sizes.query_size
    if ops["attention"].is_fused:  # plain matmuls save only what is counted with them
        attention += ops["rope"].saved(sizes)
    dropout = 2 * sizes.hidden_size if model.residual_dropout else 0
    return norms + attention + ops["feed_forward"].saved(sizes) + dropout


def _saved_by_recomputed_block(model: ModelConfig, settings: MemorySettings) -> float:
    """The inputs of the block, and under `selective` the results of its expensive operations; per token."""
    ops, sizes = settings.operators, settings.sizes(model)
    width, hidden = sizes.value_bytes, sizes.hidden_size
    inputs = float((sizes.residual_bytes + width) * hidden)  # the residual, and the branch not yet added to it
    if settings.recompute != "selective":
        return inputs
    saved = inputs + width * hidden + 2 * width * sizes.intermediate_size  # outputs of the out and gate-up projections
    if not ops["rope"].overwrites_input:
        saved += width * (sizes.query_size + 2 * sizes.kv_size)
    if ops["attention"].is_fused and not sizes.attention_dropout:
        saved += width * sizes.query_size + 4 * sizes.heads
    return saved


def _head_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """Logits, and the gradients of hidden states and head where they are computed in the forward pass."""
    head, sizes, tokens = settings.operators["linear_cross_entropy"], settings.sizes(model), settings.tokens
    hidden_states = float(tokens * model.hidden_size * sizes.value_bytes)
    if head.chunk_rows is None:
        return tokens * model.vocab_rows * head.logit_bytes(sizes) + 2 * hidden_states
    chunk = min(tokens, head.chunk_rows) * model.vocab_rows * head.logit_bytes(sizes)
    return chunk + hidden_states + model.vocab_rows * model.hidden_size * sizes.wide_bytes


def _block_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """The backward pass of the feed-forward of one block; a recomputed block also has its activations again."""
    linear, sizes = settings.operators["linear"], settings.sizes(model)
    width, hidden, inner = sizes.value_bytes, sizes.hidden_size, sizes.intermediate_size
    per_token = (sizes.residual_bytes + 2 * width) * hidden  # gradients of residual and branch, and one being computed
    per_token += 3 * width * inner  # gradients of gate, up and their product
    # For the weight gradient: the product computed again, or copies of the gradients of gate and up and transposes.
    per_token += 4 * linear.input_copy_bytes * inner if linear.input_copy_bytes else width * inner
    per_token -= int(_saved_by_last_norm(model, settings))  # freed by then
    if settings.recompute != "none":
        per_token += int(_saved_by_block(model, settings) - _shared_with_recomputed(model, settings))
    gradient = width * 2 * hidden * inner if linear.writes_weight_gradient else 0
    return float(settings.tokens * per_token + gradient)


def _shared_with_recomputed(model: ModelConfig, settings: MemorySettings) -> float:
    """Of the activations of a recomputed block, the part that was saved all along; per token."""
    if settings.recompute != "selective":
        return 0.0
    sizes = settings.sizes(model)
    inputs = (sizes.residual_bytes + 2 * sizes.value_bytes) * sizes.hidden_size
    return _saved_by_recomputed_block(model, settings) - inputs
