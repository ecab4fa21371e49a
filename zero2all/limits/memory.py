"""Memory of a training run, by arithmetic, before anything is allocated: on the device, in host memory, on disk.

All the time: weights, float32 masters, gradients, optimizer states. What one process holds of them, with n processes
along the shard axis, and bytes a parameter for AdamW in bfloat16:

                        zero 0   zero 1   zero 2           zero 3 (FSDP2)
    weights     2       all      all      all              the tables, and two blocks at a time
    masters     2 or 4  all      1/n      1/n              1/n, always 4
    gradients   4       all      all      1/n, buckets     1/n, and those not yet reduced
    states      8       all      1/n      1/n              1/n

    offload             none     optimizer         optimizer_disk    weights
    weights             device   device            device            host; two blocks and the tables on the device
    gradients           device   device            device            host; borrowed buckets on the device
    masters, states     device   host              disk              host

Masters take 2 bytes where a bfloat16 weight is the upper half of its master (`zero2all.ops.split_master`). In float32
the weights are the masters. Processes along the replicate axis hold the same.

During a step: what each block saves for the backward pass, times the tokens of a micro-batch, plus the larger of two
peaks: the head with its logits (end of the forward pass), or the first block of the backward pass with its gradients.

The operators state what they save (`zero2all.ops.footprint`). Not counted: what the CUDA context, NCCL and libraries
take, and what torch's allocator reserves without using it. With torch.compile the compiler decides what is saved,
mostly less than this. Passes in a CUDA graph (`zero2all.train.cuda_graph`) keep their activations allocated, and what
happens between steps needs memory beside them.

On an H200 (1.2555 B parameters, 16 x 2048 tokens, fused operators) 53.7 GiB were measured and 53.6 estimated in
bfloat16, 58.1 and 58.1 in float8; with whole instead of split masters 56.1 and 56.0, 60.5 and 60.5; with
FlashAttention 4 and QuACK 54.9 and 54.6. The other operators agree within 3 % with what torch saves for small models on
a CPU (tests/limits); recomputation, ZeRO and offload have not been measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.limits.floors import linear_shapes
from zero2all.limits.flops import recomputed_blocks
from zero2all.limits.held import HeldStage, expert_values, held_model
from zero2all.model.config import ModelConfig, ParameterKind, parameter_counts
from zero2all.ops.footprint import Footprint, Sizes

GIB = 2**30
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by train.precision."""
BLOCK_OF_8BIT_MOMENTS = 256
"""Values with one float32 scale (`zero2all.train.optimizers.adamw_8bit`)."""
ALLOWANCE = 0.08
"""Share of a device's memory that is left free for what the estimate does not count."""
INDEX_BYTES = 8
"""Of the number of an expert or a token."""
BORDER = 128
"""Flat buffers are cut at multiples of this many values."""
KINDS_APART: dict[str, tuple[ParameterKind, ...]] = {
    "muon": ("matrix", "expert"),
    "adamw_8bit": ("matrix", "expert", "router", "embedding", "head"),
    "adafactor": ("matrix", "expert", "router", "embedding", "head"),
}
"""The kinds of parameters that an optimizer gives other moments than the rest."""
BORROWED_BUCKETS = 3
"""With ZeRO-2, or gradients in host memory: one bucket is being filled, two are on their way."""
PIECE_VALUES, STAGED_PIECES = 1 << 24, 3
"""With offload: gradients and weights of one piece come, one is updated, one goes (`zero2all.train.offload`)."""
STREAMED_BLOCKS = 2
"""With offloaded weights: one block computes, one comes (`zero2all.train.streamed`)."""


def binary_size(count: float, digits: int = 1) -> str:
    """Bytes as GiB, or as MiB where that would be next to nothing."""
    return f"{count / GIB:.{digits}f} GiB" if count >= GIB / 10 else f"{count / 2**20:.{digits}f} MiB"


Place = Literal["device", "host", "disk"]
PLACE_OF_STATES: dict[str, Place] = {
    "none": "device",
    "optimizer": "host",
    "optimizer_disk": "disk",
    "weights": "host",
}
"""Where masters and optimizer states are kept, by parallel.offload."""


@dataclass(frozen=True)
class MemorySettings:
    """Everything that determines the memory of a run, except the shape of the model."""

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
    offload: str = "none"  # parallel.offload
    one_step_late: bool = False  # parallel.offload_one_step_late
    bucket_bytes: float = 128e6  # of gradients (parallel.bucket_mb)
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
    def place_of_weights(self) -> Place:
        """Where weights and gradients are kept."""
        return "host" if self.offload == "weights" else "device"

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
        )


@dataclass(frozen=True)
class MemoryPart:
    """One line of an estimate."""

    name: str
    bytes: float
    note: str
    place: Place = "device"


@dataclass(frozen=True)
class MemoryEstimate:
    """What one process of a run needs at its peak."""

    parts: tuple[MemoryPart, ...]

    @property
    def total(self) -> float:
        """Bytes on the device, at the peak."""
        return self._at("device")

    @property
    def state(self) -> float:
        """Bytes in use on the device between two steps."""
        return sum(part.bytes for part in self.parts if part.place == "device" and part.name in STATE_PARTS)

    @property
    def host(self) -> float:
        """Bytes that offload takes in host memory."""
        return self._at("host")

    @property
    def disk(self) -> float:
        """Bytes that offload takes on disk."""
        return self._at("disk")

    def lines(self) -> list[str]:
        """The estimate as a table: the device, then host memory and disk where something lies there."""
        lines = self._rows("device")
        for place, heading in (("host", "in host memory:"), ("disk", "on disk:")):
            if self._at(place):
                lines += [f"  {t(heading)}", *self._rows(place)]
        return lines

    def _at(self, place: str) -> float:
        return sum(part.bytes for part in self.parts if part.place == place)

    def _rows(self, place: str) -> list[str]:
        total = self._at(place)
        rows = [
            f"  {padded(t(part.name), 14)}{binary_size(part.bytes, 2):>12}  {t(part.note)}"
            for part in self.parts
            if part.place == place and part.bytes >= total / 1e4
        ]
        return [*rows, f"  {padded(t('total'), 14)}{binary_size(total, 2):>12}"]


STATE_PARTS = ("weights", "masters", "gradients", "optimizer")


def estimate_memory(model: ModelConfig, settings: MemorySettings) -> MemoryEstimate:
    """The parts of the memory of a run, in the process that needs most; in a pipeline, in one of `settings.stage`."""
    model = settings.held(model)
    parts = [
        _weights(model, settings),
        _masters(model, settings),
        _gradients(model, settings),
        _optimizer(model, settings),
        *_fsdp_parts(model, settings),
        *_borrowed_parts(model, settings),
        *_staging_parts(model, settings),
        *_float8_parts(model, settings),
    ]
    saved, in_flight = saved_bytes_per_token(model, settings), settings.stage.in_flight if settings.stage else 1.0
    note = f"{saved / 1e3:.1f} KB per token, recompute {settings.recompute}"
    if settings.stage:
        note = f"{note}, {in_flight:g} micro-batches in flight"
    parts.append(MemoryPart("activations", settings.tokens * in_flight * saved, note))
    has_head = settings.stage is None or settings.stage.has_head
    head, block = _head_peak(model, settings) if has_head else 0.0, _block_peak(model, settings)
    what = "head and loss" if head >= block else "first block of the backward pass"
    parts.append(MemoryPart("working space", max(head, block), what))
    return MemoryEstimate(tuple(parts))


# ---- what is there all the time --------------------------------------------------------------------------------------


def _weights(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    """What the forward pass reads. FSDP makes it from the masters when it gathers a block."""
    total, width = parameter_counts(model)["total"], WIDTHS[settings.precision]
    if settings.is_fsdp:
        width = width if settings.optimizer == "adamw_bf16" else 0
        note = _shared("bfloat16, no masters", settings.shard)
        return MemoryPart("weights", width * total / settings.shard, note)
    if _master_bytes(settings) > 0:
        note = f"{settings.precision}, for the forward pass"
    else:
        note = f"{settings.precision}, no masters"
    return MemoryPart("weights", float(width * total), note, settings.place_of_weights)


def _master_bytes(settings: MemorySettings) -> int:
    """Of the master of one parameter, beside its weight; 0 where the weight is the master."""
    width, is_kept_elsewhere = WIDTHS[settings.precision], settings.offload in ("optimizer", "optimizer_disk")
    wide = width if settings.optimizer == "adamw_bf16" else max(4, width)
    if settings.is_fsdp:
        return 0 if settings.optimizer == "adamw_bf16" else wide
    if settings.has_split_masters:
        return wide - width
    return wide if wide > width or is_kept_elsewhere else 0


def _masters(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    size, values = _master_bytes(settings), sum(_fullest_rank(model, settings, settings.state_ranks))
    if settings.has_split_masters:
        note = f"{size} bytes per parameter in addition to the weights"
    else:
        note = f"{size} bytes per parameter"
    note = _shared(note, settings.state_ranks)
    return MemoryPart("masters", size * values, note, PLACE_OF_STATES[settings.offload])


def _gradients(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    """The gradients that are kept until the update."""
    size, values = settings.gradient_bytes, sum(_fullest_rank(model, settings, settings.gradient_ranks))
    note = _shared(f"{size} bytes per parameter", settings.gradient_ranks)
    return MemoryPart("gradients", size * values, note, settings.place_of_weights)


def _optimizer(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    kind, momentum, kahan = settings.optimizer, settings.adafactor_momentum, settings.kahan
    widen = 2 if settings.precision == "float64" else 1
    matrices, others = _fullest_rank(model, settings, settings.state_ranks)
    of_matrix, of_other = _moment_bytes(model, kind, momentum, kahan)
    each = widen * optimizer_bytes(model, kind, momentum, kahan) / parameter_counts(model)["total"]
    note = _shared(f"{each:.2f} bytes per parameter, {kind}", settings.state_ranks)
    size = widen * (of_matrix * matrices + of_other * others)
    return MemoryPart("optimizer", size, note, PLACE_OF_STATES[settings.offload])


def optimizer_bytes(model: ModelConfig, kind: str, adafactor_momentum: bool = False, kahan: bool = False) -> float:
    """Bytes of the optimizer state for the whole model, beside float32 masters (adamw_bf16 has none)."""
    matrices = _values(_matrices_apart(model, kind))
    of_matrix, of_other = _moment_bytes(model, kind, adafactor_momentum, kahan)
    return of_matrix * matrices + of_other * (parameter_counts(model)["total"] - matrices)


def _moment_bytes(model: ModelConfig, kind: str, adafactor_momentum: bool, kahan: bool) -> tuple[float, float]:
    """Bytes of the moments of one value: of a matrix that the optimizer treats apart, and of any other parameter."""
    shapes = _matrices_apart(model, kind)
    if kind == "adamw_8bit":
        scales = sum(rows * -(-columns // BLOCK_OF_8BIT_MOMENTS) for rows, columns in shapes)
        return 2.0 + 2 * 4.0 * scales / _values(shapes), 8.0
    if kind == "adafactor":
        momentum, factors = 4.0 if adafactor_momentum else 0.0, sum(rows + columns for rows, columns in shapes)
        return 4.0 * factors / _values(shapes) + momentum, 4.0 + momentum
    if kind == "adamw_bf16":
        return (6.0, 6.0) if kahan else (4.0, 4.0)
    return {"adamw": (8.0, 8.0), "lion": (4.0, 4.0), "sgd": (4.0, 4.0), "muon": (4.0, 8.0)}[kind]


def _matrices_apart(model: ModelConfig, kind: str) -> list[tuple[int, int]]:
    """The matrices whose moments are of another kind than those of the other parameters."""
    kinds = KINDS_APART.get(kind, ())
    shapes = linear_shapes(model)
    rows, columns = shapes.pop("qkv")
    shared = model.kv_heads * model.head_size
    attention = [(rows - 2 * shared, columns), (shared, columns), (shared, columns), shapes.pop("out")]
    blocks = attention * model.layers + [*shapes.values()] * (model.layers - model.expert_layers)
    for width, count in ((model.moe.expert_size, model.moe.experts), (model.shared_size, int(model.shared_size > 0))):
        blocks += [(2 * width, model.hidden_size), (model.hidden_size, width)] * count * model.expert_layers
    if "router" in kinds and model.moe.experts:
        blocks += [(model.router_rows, model.hidden_size)] * model.expert_layers
    tables = [(model.vocab_rows, model.hidden_size)] * (1 if model.tied_embeddings else 2)
    return [*(blocks if "matrix" in kinds else []), *(tables if "embedding" in kinds else [])]


def _values(shapes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _shared(note: str, ranks: int) -> str:
    """The note, with the share of one of `ranks` processes."""
    return f"{note}, 1/{ranks} of the parameters" if ranks > 1 else note


def _fullest_rank(model: ModelConfig, settings: MemorySettings, ranks: int) -> tuple[float, float]:
    """Values of the matrices that are treated apart, and of the other parameters, in the fullest of `ranks` processes.

    `settings.owned` says it where the cut is known. Else: equal shares, up to multiples of 128. That is exact but for
    the padding of buckets where flat values are cut; 8-bit moments, which are cut between rows, may take a row of each
    bucket more, and Muon and Adafactor, whose matrices have one owner each, as much as the owners are uneven. FSDP cuts
    every parameter between rows, at most one row too many.
    """
    matrices = _values(_matrices_apart(model, settings.optimizer))
    others = parameter_counts(model)["total"] - matrices
    if ranks == 1:
        return float(matrices), float(others)
    if settings.owned is not None and not settings.is_fsdp:
        return settings.owned
    experts, owners = expert_values(model), settings.expert_shard
    if "expert" in KINDS_APART.get(settings.optimizer, ()):
        return _share(matrices - experts, ranks) + _share(experts, owners), _share(others, ranks)
    return _share(matrices, ranks), _share(others - experts, ranks) + _share(experts, owners)


def _share(values: int, ranks: int) -> float:
    return float(min(values, -(-values // (ranks * BORDER)) * BORDER))


# ---- what is there for a while ---------------------------------------------------------------------------------------


def _fsdp_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """Unsharded weights on a rank of a sharded run: the tables all the time, blocks two at a time."""
    if not settings.is_fsdp:
        return []
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    block, ends = counts["blocks"] / model.layers, counts["embedding"] + counts["head"]
    gathered = width * (ends + 2 * block)
    # Gradients are reduced only after the last micro-batch; until then each rank holds whole ones in float32.
    accumulates = settings.passes > 1
    waiting = max(4, width) * counts["total"] if accumulates else (width + 4) * (ends + block)
    note = "whole gradients until the last micro-batch" if accumulates else "gradients of a block and the tables"
    return [
        MemoryPart("gathered", gathered, "whole weights of the tables and two blocks"),
        MemoryPart("unreduced", waiting, note),
    ]


def _borrowed_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """Gradients of a pass on their way to the process or the memory that keeps them."""
    is_cut = settings.gradient_ranks > 1 and not settings.is_fsdp
    if not is_cut and settings.place_of_weights == "device":
        return []
    table = settings.gradient_bytes * parameter_counts(model)["embedding"]
    size = BORROWED_BUCKETS * _bucket_bytes(model, settings) + table
    size = min(size, settings.gradient_bytes * parameter_counts(model)["total"])
    return [MemoryPart("buckets", size, f"gradients in flight: {BORROWED_BUCKETS} buckets and a table")]


def _bucket_bytes(model: ModelConfig, settings: MemorySettings) -> float:
    """Of the largest bucket of a block; a bucket has at least one whole weight. Each table is a bucket of its own."""
    largest = max(rows * columns for rows, columns in linear_shapes(model).values())
    largest = max(largest, 2 * model.moe.experts * model.moe.expert_size * model.hidden_size)
    return max(settings.bucket_bytes, float(settings.gradient_bytes * largest))


def _staging_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """What offload needs on the way between the device and the place of the states; late and streamed weights."""
    if settings.offload == "none":
        return []
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    piece = min(PIECE_VALUES, counts["total"]) * (settings.gradient_bytes + width)
    parts = [MemoryPart("staging", float(STAGED_PIECES * piece), f"{STAGED_PIECES} pieces, pinned", "host")]
    if settings.one_step_late:
        values = sum(_fullest_rank(model, settings, settings.state_ranks))
        note = "new weights, until the next step has ended"
        parts.append(MemoryPart("late weights", width * values, note, PLACE_OF_STATES[settings.offload]))
    if settings.offload == "weights":
        streamed = min(1.0, STREAMED_BLOCKS / model.layers) * counts["blocks"] + counts["embedding"] + counts["head"]
        note = f"weights of {STREAMED_BLOCKS} blocks and the tables"
        parts.append(MemoryPart("streamed", width * streamed, note))
    return parts


def _float8_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    copy_bytes = settings.operators["linear"].weight_copy_bytes
    if not copy_bytes:
        return []
    counts = parameter_counts(model)
    chosen = 3 * model.hidden_size * model.moe.experts_per_token * model.moe.expert_size * model.expert_layers
    values = counts["matmul"] - counts["embedding"] - chosen  # experts have none
    if settings.offload == "weights":
        values = values * min(STREAMED_BLOCKS, model.layers) // model.layers
    return [MemoryPart("float8", float(copy_bytes * values), "weights of the blocks, plain and transposed")]


# ---- what a pass needs -----------------------------------------------------------------------------------------------


def saved_bytes_per_token(model: ModelConfig, settings: MemorySettings) -> float:
    """What all blocks and the last norm save for the backward pass."""
    recomputed = recomputed_blocks(model, settings.recompute, settings.recompute_every)
    whole = _saved_by_block(model, settings)
    less = _saved_by_recomputed_block(model, settings)
    return (model.layers - recomputed) * whole + recomputed * less + _saved_by_last_norm(model, settings)


def _saved_by_last_norm(model: ModelConfig, settings: MemorySettings) -> float:
    if settings.stage is not None and not settings.stage.has_head:
        return 0.0
    sizes = settings.sizes(model)
    # Tensor ranks share the tokens of the norm, but the head reads all of them.
    return settings.operators["rms_norm"].saved(sizes) / settings.tensor + sizes.value_bytes * sizes.hidden_size


def _saved_by_block(model: ModelConfig, settings: MemorySettings) -> float:
    """By one block that recomputes nothing; per token, of which a tensor rank has 1/tensor in the residual and in the
    norms, but all of them inside of attention and feed-forward."""
    ops, sizes = settings.operators, settings.sizes(model)
    copy_bytes = ops["linear"].input_copy_bytes
    # The output of a norm is saved by the linear layer after it, as it is or as a copy.
    norms = 2 * (ops["rms_norm"].saved(sizes) / settings.tensor)
    norms += 2 * (copy_bytes or sizes.value_bytes) * sizes.hidden_size
    # Attention saves its output, and the projection after it the same memory, or a copy.
    attention = ops["attention"].saved(sizes) + (sizes.value_bytes + copy_bytes) * sizes.query_size
    attention += 2 * sizes.value_bytes * sizes.kv_size * (settings.kv_copies(model) - 1)
    if ops["attention"].is_fused:  # plain matmuls save only what is counted with them
        attention += ops["rope"].saved(sizes)
    dropout = 2 * sizes.hidden_size / settings.tensor if model.residual_dropout else 0
    return norms + attention + _saved_by_feed_forward(model, settings) + dropout


def _saved_by_feed_forward(model: ModelConfig, settings: MemorySettings) -> float:
    """Of a model with experts: the mean over its blocks. Experts see the tokens that a tensor rank has in the
    residual."""
    ops, sizes, moe = settings.operators, settings.sizes(model), model.moe
    dense = ops["feed_forward"].saved(sizes)
    if not model.expert_layers:
        return dense
    width, chosen = sizes.value_bytes, moe.experts_per_token * moe.expert_size
    saved = float(sizes.wide_bytes * model.router_rows)  # the scores
    saved += moe.experts_per_token * (4 * INDEX_BYTES + 3 * sizes.wide_bytes)  # who is chosen, in which order; gates
    saved += width * moe.experts_per_token * sizes.hidden_size  # the tokens, sorted by expert
    saved += 2 * width * chosen  # gates and ups
    if not ops["feed_forward"].is_fused:  # and their product, as it is and times the gate of the expert
        saved += 2 * width * chosen + ops["swiglu"].saved(replace(sizes, intermediate_size=chosen))
    if moe.shared_experts:
        saved += ops["feed_forward"].saved(replace(sizes, intermediate_size=model.shared_size))
    return dense + (saved / settings.tensor - dense) * model.expert_layers / model.layers


def _saved_by_recomputed_block(model: ModelConfig, settings: MemorySettings) -> float:
    """The inputs of the block, and under `selective` the results of its expensive operations; per token."""
    ops, sizes = settings.operators, settings.sizes(model)
    width, hidden = sizes.value_bytes, sizes.hidden_size
    # The residual, and the branch not yet added to it.
    inputs = float((sizes.residual_bytes + width) * hidden) / settings.tensor
    if settings.recompute != "selective":
        return inputs
    saved = inputs + width * hidden + _gates_and_ups(model, settings)  # outputs of the out and gate-up projections
    if not ops["rope"].overwrites_input:
        saved += width * (sizes.query_size + 2 * sizes.kv_size)
    if ops["attention"].is_fused and not sizes.attention_dropout:
        saved += width * sizes.query_size + 4 * sizes.heads
    return saved


def _gates_and_ups(model: ModelConfig, settings: MemorySettings) -> float:
    """Bytes of what the gate-up projections return; with experts also of what they and the router do."""
    sizes, moe, share = settings.sizes(model), model.moe, model.expert_layers / model.layers
    of_experts = moe.experts_per_token * (2 * moe.expert_size + sizes.hidden_size) + 2 * model.shared_size
    of_router = sizes.wide_bytes * model.router_rows
    dense = 2 * sizes.value_bytes * sizes.intermediate_size
    return (1 - share) * dense + share * (sizes.value_bytes * of_experts + of_router) / settings.tensor


def _head_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """Logits, and the gradients of hidden states and head where they are computed in the forward pass."""
    head, sizes, tokens = settings.operators["linear_cross_entropy"], settings.sizes(model), settings.tokens
    hidden_states = float(tokens * model.hidden_size * sizes.value_bytes)  # of all tensor ranks
    if head.chunk_rows is None:
        return tokens * model.vocab_rows * head.logit_bytes(sizes) + 2 * hidden_states
    chunk = min(tokens, head.chunk_rows) * model.vocab_rows * head.logit_bytes(sizes)
    return chunk + hidden_states + model.vocab_rows * model.hidden_size * sizes.wide_bytes


def _block_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """The backward pass of the feed-forward of one block; a recomputed block also has its activations again."""
    linear, sizes = settings.operators["linear"], settings.sizes(model)
    width, hidden, inner, moe = sizes.value_bytes, sizes.hidden_size, sizes.intermediate_size, model.moe
    gradient = width * 2 * hidden * inner if linear.writes_weight_gradient else 0
    if model.expert_layers:
        inner = (moe.experts_per_token * moe.expert_size + model.shared_size) // settings.tensor
        gradient = width * moe.experts * 2 * moe.expert_size * hidden  # autograd has it before it is added up
    # Gradients of residual and branch, and one being computed; tensor ranks share the tokens of the first two.
    per_token = (sizes.residual_bytes + width) * hidden // settings.tensor + width * hidden
    per_token += 3 * width * inner  # gradients of gate, up and their product
    if model.expert_layers:  # gradients of what experts get and return
        per_token += 2 * width * moe.experts_per_token * hidden // settings.tensor
    # For the weight gradient: the product computed again, or copies of the gradients of gate and up and transposes.
    per_token += 4 * linear.input_copy_bytes * inner if linear.input_copy_bytes else width * inner
    per_token -= int(_saved_by_last_norm(model, settings))  # freed by then
    if settings.recompute != "none":
        per_token += int(_saved_by_block(model, settings) - _shared_with_recomputed(model, settings))
    return float(settings.tokens * per_token + gradient)


def _shared_with_recomputed(model: ModelConfig, settings: MemorySettings) -> float:
    """Of the activations of a recomputed block, the part that was saved all along; per token."""
    if settings.recompute != "selective":
        return 0.0
    sizes = settings.sizes(model)
    inputs = (sizes.residual_bytes + sizes.value_bytes) * sizes.hidden_size / settings.tensor
    inputs += sizes.value_bytes * sizes.hidden_size
    return _saved_by_recomputed_block(model, settings) - inputs
