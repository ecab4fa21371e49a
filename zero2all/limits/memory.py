"""Memory of a training run on one device, by arithmetic, before anything is allocated.

What is there all the time: weights, float32 masters, gradients, moments. What comes and goes: what each block keeps for
the backward pass, times the tokens of a micro-batch, and at the top of that the larger of two peaks: the head with its
logits (end of the forward pass), or the first block of the backward pass with its gradients.

The sizes of kept tensors are read off the operators (`zero2all.ops`), so they differ by implementation. Not counted:
what the CUDA context and libraries take, and what torch's allocator holds without using it. With torch.compile the
compiler decides what is kept, mostly less than this. A CUDA graph (`zero2all.train.cuda_graph`) keeps what
comes and goes to itself, and what happens between steps needs memory beside it.

Against an H200 (1.2555 B parameters, 16 x 2048 tokens, fused operators; most bytes torch had allocated):

                        split masters           whole masters
                       measured   estimate   measured   estimate
    bfloat16           53.7 GiB   53.6 GiB   56.1 GiB   56.0 GiB
    float8             58.1 GiB   58.1 GiB   60.5 GiB   60.5 GiB
    state              18.7 GiB   18.7 GiB   21.0 GiB   21.0 GiB

With FlashAttention 4 and QuACK 54.9 GiB were measured, where the estimate is 54.6, and 59.1 (58.9) with float8.

The other operators are held against what torch keeps for small models on a CPU, within 3 % (tests/limits);
recomputation and sharding have not been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero2all.limits.recompute import FUSED, recomputed_blocks
from zero2all.model.config import ModelConfig, parameter_counts

GIB = 2**30
WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a value by train.precision."""
HEAD_CHUNK_ROWS = {"chunked": 8192, "triton": 8192, "quack": 16384}
"""Tokens whose logits exist at once, where the head works in chunks (`zero2all.ops.linear_cross_entropy`)."""
BLOCK_OF_8BIT_MOMENTS = 256
"""Values with one float32 scale (`zero2all.train.optimizers.adamw_8bit`)."""
ALLOWANCE = 0.08
"""Share of a device's memory that an estimate leaves to what it does not count."""


@dataclass(frozen=True)
class MemorySettings:
    """Everything beside the model's shape that decides the memory of a run."""

    seq_len: int
    micro_batch_samples: int
    precision: str = "bfloat16"
    optimizer: str = "adamw"
    """optim.kind."""
    adafactor_momentum: bool = False
    """optim.adafactor_beta1 above 0."""
    kahan: bool = False
    """optim.bf16_rounding: kahan."""
    operators: Mapping[str, str] = field(default_factory=lambda: dict(FUSED, linear_cross_entropy="triton"))
    """The implementation of each operator (`Choice.got`)."""
    recompute: str = "none"
    recompute_every: int = 1
    documents: bool = False
    """Whether attention stops at the borders of documents."""
    processes: int = 1
    spread: str = "replicate"
    """parallel.data."""
    accumulates: bool = False
    """Whether a step has more than one micro-batch."""

    @property
    def has_split_masters(self) -> bool:
        """Whether a bfloat16 weight is the upper half of its master, as in `zero2all.ops.split_master`."""
        return (self.precision, self.optimizer, self.operators.get("optimizer")) == ("bfloat16", "adamw", "triton")


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
        """Bytes that are there between two steps."""
        return sum(part.bytes for part in self.parts if part.name in STATE_PARTS)

    def lines(self) -> list[str]:
        """The estimate as a table for a person."""
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
    tokens = settings.micro_batch_samples * settings.seq_len
    kept = kept_bytes_per_token(model, settings)
    parts.append(
        MemoryPart("activations", tokens * kept, f"{kept / 1e3:.1f} KB per token, recompute {settings.recompute}")
    )
    head, block = _head_peak(model, settings), _block_peak(model, settings)
    what = "head and loss" if head >= block else "first block of the backward pass"
    parts.append(MemoryPart("working space", max(head, block), what))
    return MemoryEstimate(tuple(parts))


# ---- what is there all the time --------------------------------------------------------------------------------------


def optimizer_bytes(model: ModelConfig, kind: str, adafactor_momentum: bool = False, kahan: bool = False) -> float:
    """Bytes an optimizer remembers about the whole model, with float32 masters (adamw_bf16: without any)."""
    counts = parameter_counts(model)
    total, matrices = counts["total"], _matrix_values(model) * model.layers
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
    hidden, heads = model.hidden_size, model.heads * model.head_size
    of_a_block = [
        (heads + 2 * model.kv_heads * model.head_size, hidden),
        (hidden, heads),
        (2 * model.intermediate_size, hidden),
        (hidden, model.intermediate_size),
    ]
    tables = [(model.vocab_rows, hidden)] * (1 if model.tied_embeddings else 2)
    return of_a_block * model.layers + tables


def _matrix_values(model: ModelConfig) -> int:
    """Values in the matrices of one block."""
    tables = 1 if model.tied_embeddings else 2
    return sum(rows * columns for rows, columns in _matrix_shapes(model)[:-tables]) // model.layers


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
    """What a process of a sharded run has of whole weights: the tables all the time, blocks two at a time."""
    if settings.spread != "shard" or settings.processes == 1:
        return []
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    block, ends = counts["blocks"] / model.layers, counts["embedding"] + counts["head"]
    gathered = width * (ends + 2 * block)
    # Without an exchange after each micro-batch, whole gradients wait for the last one, in float32.
    waiting = max(4, width) * counts["total"] if settings.accumulates else (width + 4) * (ends + block)
    note = (
        "whole gradients until the last micro-batch" if settings.accumulates else "gradients of a block and the tables"
    )
    return [
        MemoryPart("gathered", gathered, "whole weights of the tables and two blocks"),
        MemoryPart("unreduced", waiting, note),
    ]


def _float8_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    if settings.operators.get("linear") != "fp8":
        return []
    return [MemoryPart("float8", 2.0 * _matrix_values(model) * model.layers, "weights of the blocks, both ways round")]


# ---- what a micro-batch needs ----------------------------------------------------------------------------------------


def kept_bytes_per_token(model: ModelConfig, settings: MemorySettings) -> float:
    """What all blocks and the last norm keep for the backward pass."""
    recomputed = recomputed_blocks(model, settings.recompute, settings.recompute_every)
    whole = _kept_by_block(model, settings)
    less = _kept_by_recomputed_block(model, settings)
    return (model.layers - recomputed) * whole + recomputed * less + _last_norm_keeps(model, settings)


def _last_norm_keeps(model: ModelConfig, settings: MemorySettings) -> float:
    return _norm_keeps(model, settings) + WIDTHS[settings.precision] * model.hidden_size


def _kept_by_block(model: ModelConfig, settings: MemorySettings) -> float:
    """Of one block that recomputes nothing; per token. Each operator's file says what it keeps and why."""
    taken, width = settings.operators, WIDTHS[settings.precision]
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.heads * model.head_size
    float8 = taken.get("linear") == "fp8"
    linear_input = 1 if float8 else width
    norms = 2 * (_norm_keeps(model, settings) + linear_input * hidden)
    # A fused attention keeps its output for itself; the projection behind it keeps the same memory, or a float8 copy.
    attention = _attention_keeps(model, settings) + width * heads + (heads if float8 else 0)
    if taken.get("swiglu") in ("triton", "quack") and taken.get("linear") in ("fp32_wgrad", "fp8"):
        feed_forward = 2 * width * inner + (inner if float8 else 0)
    else:
        # gate and up, what the formula makes of them, and the product, which the projection behind it keeps
        in_between = {"torch": 1, "eager": 2}.get(taken.get("swiglu", "torch"), 0)
        feed_forward = (2 + in_between) * width * inner + linear_input * inner
    dropout = 2 * hidden if model.residual_dropout else 0
    return norms + attention + feed_forward + dropout


def _norm_keeps(model: ModelConfig, settings: MemorySettings) -> float:
    """Beside its output, which the linear layer behind it keeps."""
    width, hidden = WIDTHS[settings.precision], model.hidden_size
    residual = max(4, width) if model.fp32_residual else width
    kind = settings.operators.get("rms_norm", "eager")
    if kind == "triton_lean":
        return 4.0
    if kind == "eager":
        return max(4, width) * hidden + width * hidden + max(4, width)  # the sum, widened, and the sum normalised
    return (residual if kind == "triton" else width) * hidden + 4.0


def _attention_keeps(model: ModelConfig, settings: MemorySettings) -> float:
    """Rotary positions and attention, without the output."""
    width, length = WIDTHS[settings.precision], settings.seq_len
    heads, shared = model.heads * model.head_size, model.kv_heads * model.head_size
    kind = settings.operators.get("attention", "sdpa")
    masks_whole = settings.documents and (kind == "math" or kind.startswith("sdpa"))
    if kind == "math":
        kept = 3.0 * width * heads  # query, and keys and values repeated for each query head
        kept += (
            model.heads * length * (max(4, width) + (width if width < 4 else 0))
        )  # the weights; as a matmul reads them
        kept += model.heads * length * (1 + width) if model.attention_dropout else 0.0
        return kept + (length if masks_whole else 0)
    kept = float(width * (heads + 2 * shared))  # the qkv projection: query, key and value lie in it, or value alone
    if settings.operators.get("rope") != "triton":
        kept += width * (heads + shared)  # turned copies of query and key
        kept += width * heads  # the output lies as the query does, head by head, and is copied for the projection
    return kept + 4 * model.heads + (length * (1 + width) if masks_whole else 0)  # 4: logsumexp


def _kept_by_recomputed_block(model: ModelConfig, settings: MemorySettings) -> float:
    """What goes into the block, and under `selective` the results of its dear operations; per token."""
    width, hidden, heads = WIDTHS[settings.precision], model.hidden_size, model.heads * model.head_size
    residual = max(4, width) if model.fp32_residual else width
    ends = float((residual + width) * hidden)  # the residual, and the branch still to be added to it
    if settings.recompute != "selective":
        return ends
    taken = settings.operators
    kept = ends + width * hidden + 2 * width * model.intermediate_size  # outputs of the out and gate-up projections
    if taken.get("rope") != "triton":
        kept += width * (heads + 2 * model.kv_heads * model.head_size)
    if taken.get("attention") != "math" and not model.attention_dropout:
        kept += width * heads + 4 * model.heads
    return kept


def _head_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """Logits, and the gradients of hidden states and head where they are made in the forward pass."""
    width, tokens = WIDTHS[settings.precision], settings.micro_batch_samples * settings.seq_len
    wide, table = max(4, width), model.vocab_rows * model.hidden_size
    kind = settings.operators.get("linear_cross_entropy", "triton")
    widened = wide if width < wide else 0
    if kind == "off":
        in_place = settings.operators.get("cross_entropy") in ("triton", "liger")
        per_logit = width if in_place else width + widened + 2 * wide  # log-probabilities and their gradient
        return float(tokens * model.vocab_rows * per_logit) + 2.0 * tokens * model.hidden_size * width
    per_logit = width + widened + 2 * wide if kind == "chunked" else width
    chunk = float(min(tokens, HEAD_CHUNK_ROWS.get(kind, HEAD_CHUNK_ROWS["chunked"])) * model.vocab_rows * per_logit)
    return chunk + tokens * model.hidden_size * width + table * wide


def _block_peak(model: ModelConfig, settings: MemorySettings) -> float:
    """The backward pass of the feed-forward of one block; a recomputed block has its activations back besides."""
    width, tokens = WIDTHS[settings.precision], settings.micro_batch_samples * settings.seq_len
    hidden, inner = model.hidden_size, model.intermediate_size
    residual = max(4, width) if model.fp32_residual else width
    per_token = (residual + 2 * width) * hidden  # gradients of the residual and of the branch, and one in the making
    per_token += 3 * width * inner  # gradients of gate, up and their product
    # The product once more, for the weight's gradient; or gradients of gate and up in float8, both ways round.
    per_token += 4 * inner if settings.operators.get("linear") == "fp8" else width * inner
    per_token -= int(_last_norm_keeps(model, settings))  # given back by then
    if settings.recompute != "none":
        per_token += int(_kept_by_block(model, settings) - _shared_with_recomputed(model, settings))
    gradient = width * 2 * hidden * inner if settings.operators.get("linear") == "plain" else 0
    return float(tokens * per_token + gradient)


def _shared_with_recomputed(model: ModelConfig, settings: MemorySettings) -> float:
    """Of what a block has back, the part that was never given up; per token."""
    width, hidden = WIDTHS[settings.precision], model.hidden_size
    if settings.recompute != "selective":
        return 0.0
    residual = max(4, width) if model.fp32_residual else width
    return _kept_by_recomputed_block(model, settings) - (residual + 2 * width) * hidden
