"""Memory of a training run, by arithmetic, before anything is allocated: on the device and in host memory.

All the time: weights, float32 masters, gradients, optimizer states. What one process holds of them, with n processes
along the shard axis, and bytes a parameter for AdamW in bfloat16:

                        zero 0   zero 1   zero 2           zero 3 (FSDP2)
    weights     2       all      all      all              the tables, and two blocks at a time
    masters     2 or 4  all      1/n      1/n              1/n, always 4
    gradients   4       all      all      1/n, buckets     1/n, and those not yet reduced
    states      8       all      1/n      1/n              1/n

    offload             none     optimizer
    weights, gradients  device   device
    masters, states     device   host

Masters take 2 bytes where a bfloat16 weight is the upper half of its master (`zero2all.ops.split_master`). In float32
the weights are the masters. Processes along the replicate axis hold the same.

During a step: what each block saves for the backward pass, times the tokens of a micro-batch, and what is alive beside
it in the worst phase of the step (`estimate.pass_memory`). Peak = what is there all the time + the worst phase.

`MemoryEstimate.total` is what torch counts as allocated: also ids, tables of positions and cuBLAS workspaces. The
process needs more: what torch's allocator reserves without using it, and the CUDA context (`fit.process_bytes`).

With torch.compile the compiler decides what is saved, mostly less than this. Passes in a CUDA graph
(`zero2all.train.cuda_graph`) have workspaces of their own, and keep their memory reserved between steps.

Measured on an H200 (benchmarks/results) and estimated, peak allocated: tests/estimate/test_memory.py has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.estimate.floors import linear_shapes
from zero2all.estimate.memory_settings import PLACE_OF_STATES, WIDTHS, Place, expert_values
from zero2all.estimate.memory_settings import MemorySettings as MemorySettings
from zero2all.estimate.pass_memory import Phase, pass_memory
from zero2all.model.config import ModelConfig, ParameterKind, parameter_counts

GIB = 2**30
ALLOWANCE = 0.08
"""Share of a device's memory that is left free for what the estimate does not count."""
RESERVED_MARGIN = 1.05
"""Reserved over allocated, of what comes and goes in a step: the gaps that tensors of other sizes leave."""
SMALL_SEGMENTS = 24.0 * 2**20
"""Segments of the allocator that are begun and not full: 2 MiB for small tensors, 20 MiB for those up to 10 MiB."""
JOINED_VALUES = 1 << 25
"""Split masters are joined for a checkpoint in chunks of this many (`zero2all.train.weights`)."""
BYTES_TO_SPLIT = 13.0
"""Of a value when it is split again: three times 32 bits, and whether it is a number (`zero2all.ops.split_master`)."""
UPDATE_BYTES = 12.0
"""Temporaries of an update by an optimizer that takes one parameter after the other, per value of the largest one."""
NORM, UPDATE, SAVE = "gradient norm", "optimizer step", "checkpoint"
STATE_PARTS = ("weights", "masters", "gradients", "optimizer")


def binary_size(count: float, digits: int = 1) -> str:
    """Bytes as GiB, or as MiB where that would be next to nothing."""
    return f"{count / GIB:.{digits}f} GiB" if count >= GIB / 10 else f"{count / 2**20:.{digits}f} MiB"


@dataclass(frozen=True)
class MemoryEstimate:
    """What one process of a run needs at its peak."""

    parts: tuple[MemoryPart, ...]
    phases: tuple[Phase, ...] = ()
    """Of a step, in order; each beside what is there all the time."""

    @property
    def persistent(self) -> float:
        """Bytes on the device that are there in every phase."""
        return self.total - max((phase.bytes for phase in self.phases), default=0.0)

    @property
    def worst(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def step_peak(self) -> float:
        """Bytes on the device at the peak of a step that saves no checkpoint: what a benchmark of steps measures."""
        return self.persistent + max(phase.bytes for phase in self.phases if phase.name != SAVE)

    @property
    def reserved(self) -> float:
        """Bytes that torch's allocator takes from the driver. The large flat buffers fit their segments; what comes and
        goes in a step leaves gaps. A margin, not a measurement: see RESERVED_MARGIN."""
        return self.persistent + RESERVED_MARGIN * self.worst.bytes + SMALL_SEGMENTS

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

    def lines(self) -> list[str]:
        """The estimate as a table: the device, then host memory where something lies there."""
        lines = self._rows("device")
        if self.host:
            lines += [f"  {t('in host memory:')}", *self._rows("host")]
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


def estimate_memory(model: ModelConfig, settings: MemorySettings) -> MemoryEstimate:
    """The parts of the memory of a run, in the process that needs most; in a pipeline, in one of `settings.stage`.

    Takes about half a millisecond. Many micro-batches of one model: `zero2all.estimate.pass_memory` has the lines they
    lie on.
    """
    model = settings.held(model)
    parts, lines, tokens = state_parts(model, settings), pass_memory(model, settings), settings.tokens
    parts.append(MemoryPart("inputs", lines.input_bytes(tokens), "ids, weights of tokens, tables of positions"))
    if settings.workspace_bytes:
        parts.append(MemoryPart("libraries", settings.workspace_bytes, "workspaces of cuBLAS"))
    phases = (*lines.phases(tokens), *_phases_after_passes(model, settings))
    worst = max(phases, key=lambda phase: phase.bytes)
    saved, in_flight = lines.saved_per_token, settings.stage.in_flight if settings.stage else 1.0
    note = f"{saved / 1e3:.1f} KB per token, recompute {settings.recompute}"
    if settings.stage:
        note = f"{note}, {in_flight:g} micro-batches in flight"
    activations = min(tokens * in_flight * saved, worst.bytes)
    parts.append(MemoryPart("activations", activations, note))
    parts.append(MemoryPart("working space", worst.bytes - activations, worst.name))
    return MemoryEstimate(tuple(parts), phases)


def _phases_after_passes(model: ModelConfig, settings: MemorySettings) -> tuple[Phase, ...]:
    """What the parts of a step need that hold no activations."""
    values, ops = settings.trained(model), settings.operators
    largest = min(largest_parameter(model), values)
    update = 0.0
    if settings.offload == "none" and settings.optimizer == "adamw" and not settings.is_fsdp:
        update = ops["optimizer"].update_bytes_per_value * values / settings.state_ranks
        update += ops["optimizer"].update_bytes_of_largest * largest
    elif settings.offload == "none":  # one parameter after the other
        update = UPDATE_BYTES * largest / (settings.shard if settings.is_fsdp else 1)
    joined = BYTES_TO_SPLIT * min(JOINED_VALUES, values) if settings.has_split_masters else 0.0
    return Phase(NORM, 0.0, 0.0), Phase(UPDATE, 0.0, update), Phase(SAVE, 0.0, joined)


# ---- what is there all the time: weights, masters, gradients, states, buffers ---------------------------------------


BLOCK_OF_8BIT_MOMENTS = 256
"""Values with one float32 scale (`zero2all.train.optimizers.rounding`)."""
BORDER = 128
"""Flat buffers are cut at multiples of this many values."""
KINDS_APART: dict[str, tuple[ParameterKind, ...]] = {
    "muon": ("matrix", "expert"),
    "adamw_8bit": ("matrix", "expert", "router", "embedding", "head"),
}
"""The kinds of parameters that an optimizer gives other moments than the rest."""
BORROWED_BUCKETS = 3
"""With ZeRO-2: one bucket is being filled, two are on their way."""
PIECE_VALUES, STAGED_PIECES = 1 << 24, 3
"""With offload: gradients and weights of one piece come, one is updated, one goes (`zero2all.train.offload`)."""


@dataclass(frozen=True)
class MemoryPart:
    """One line of an estimate."""

    name: str
    bytes: float
    note: str
    place: Place = "device"


def state_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """The parts; `model` is as held by the process (`MemorySettings.held`)."""
    sent = MemoryPart("sent copy", 2.0 * settings.trained(model), "of the gradients, in bfloat16")
    return [
        _weights(model, settings),
        _masters(model, settings),
        _gradients(model, settings),
        _optimizer(model, settings),
        *_fsdp_parts(model, settings),
        *_borrowed_parts(model, settings),
        *_staging_parts(model, settings),
        *_float8_parts(model, settings),
        *([sent] if settings.compress != "none" else []),
    ]


# ---- what is there all the time --------------------------------------------------------------------------------------


def _weights(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    """What the forward pass reads. FSDP makes it from the masters when it gathers a block."""
    total, width = parameter_counts(model)["total"], WIDTHS[settings.precision]
    if settings.lora.rank:
        width, ranks = (max(4, width), settings.shard) if settings.is_fsdp else (width, 1)
        note = _shared(f"{settings.precision}, frozen, and {settings.trained(model) / 1e6:.1f} M of adapters", ranks)
        return MemoryPart("weights", float(width * (total + settings.trained(model)) / ranks), note)
    if settings.is_fsdp:
        width = width if settings.optimizer == "adamw_bf16" else 0
        note = _shared("bfloat16, no masters", settings.shard)
        return MemoryPart("weights", width * total / settings.shard, note)
    has_masters = _master_bytes(settings) > 0
    note = f"{settings.precision}, for the forward pass" if has_masters else f"{settings.precision}, no masters"
    return MemoryPart("weights", float(width * total), note)


def _master_bytes(settings: MemorySettings) -> int:
    """Of the master of one parameter, beside its weight; 0 where the weight is the master."""
    width, is_kept_elsewhere = WIDTHS[settings.precision], settings.offload == "optimizer"
    wide = _saved_width(settings.optimizer, settings.precision)
    if settings.is_fsdp:
        return 0 if settings.optimizer == "adamw_bf16" else wide
    if settings.has_split_masters:
        return wide - width
    return wide if wide > width or is_kept_elsewhere else 0


def _saved_width(optimizer: str, precision: str) -> int:
    """Bytes of one parameter as it is updated and saved: a master of at least 32 bits, but for adamw_bf16."""
    return WIDTHS[precision] if optimizer == "adamw_bf16" else max(4, WIDTHS[precision])


def checkpoint_bytes(model: ModelConfig, optimizer: str, precision: str, kahan: bool = False) -> float:
    """Bytes of a checkpoint of a run, on all its processes: masters and the optimizer's state."""
    widen = 2 if precision == "float64" else 1
    kahan = kahan and precision == "bfloat16"  # wider weights need no compensation
    moments = widen * optimizer_bytes(model, optimizer, kahan)
    return _saved_width(optimizer, precision) * parameter_counts(model)["total"] + moments


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
    return MemoryPart("gradients", size * values, note)


def _optimizer(model: ModelConfig, settings: MemorySettings) -> MemoryPart:
    kind, kahan = settings.optimizer, settings.kahan
    widen = 2 if settings.precision == "float64" else 1
    matrices, others = _fullest_rank(model, settings, settings.state_ranks)
    of_matrix, of_other = _moment_bytes(model, kind, kahan)
    each = widen * optimizer_bytes(model, kind, kahan) / parameter_counts(model)["total"]
    note = _shared(f"{each:.2f} bytes per parameter, {kind}", settings.state_ranks)
    size = widen * (of_matrix * matrices + of_other * others)
    return MemoryPart("optimizer", size, note, PLACE_OF_STATES[settings.offload])


def optimizer_bytes(model: ModelConfig, kind: str, kahan: bool = False) -> float:
    """Bytes of the optimizer state for the whole model, beside float32 masters (adamw_bf16 has none)."""
    matrices = _values(_matrices_apart(model, kind))
    of_matrix, of_other = _moment_bytes(model, kind, kahan)
    return of_matrix * matrices + of_other * (parameter_counts(model)["total"] - matrices)


def _moment_bytes(model: ModelConfig, kind: str, kahan: bool) -> tuple[float, float]:
    """Bytes of the moments of one value: of a matrix that the optimizer treats apart, and of any other parameter."""
    shapes = _matrices_apart(model, kind)
    if kind == "adamw_8bit":
        scales = sum(rows * -(-columns // BLOCK_OF_8BIT_MOMENTS) for rows, columns in shapes)
        return 2.0 + 2 * 4.0 * scales / _values(shapes), 8.0
    if kind == "adamw_bf16":
        return (6.0, 6.0) if kahan else (4.0, 4.0)
    if kind == "muon":  # a momentum, and a mean square for each line along the longer side
        return 4.0 + 4.0 * sum(max(shape) for shape in shapes) / _values(shapes), 8.0
    assert kind == "adamw", f"the states of optim.kind {kind} are not known"
    return 8.0, 8.0


def _matrices_apart(model: ModelConfig, kind: str) -> list[tuple[int, int]]:
    """The matrices whose moments are of another kind than those of the other parameters."""
    kinds = KINDS_APART.get(kind, ())
    shapes = linear_shapes(model)
    rows, columns = shapes["qkv"]
    shared = model.kv_heads * model.head_size
    attention = [(rows - 2 * shared, columns), (shared, columns), (shared, columns), shapes["out"]]

    def feed_forward(width: int) -> list[tuple[int, int]]:
        pairs = [(width, columns)] * 2 if kind == "muon" else [(2 * width, columns)]  # Muon takes gate and up apart
        return [*pairs, (columns, width)]

    blocks = attention * model.layers
    blocks += feed_forward(model.intermediate_size) * (model.layers - model.expert_layers)
    for width, count in ((model.moe.expert_size, model.moe.experts), (model.shared_size, int(model.shared_size > 0))):
        blocks += feed_forward(width) * count * model.expert_layers
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
    bucket more, and Muon, whose matrices have one owner each, as much as the owners are uneven. FSDP cuts every
    parameter between rows, at most one row too many.
    """
    matrices = 0 if settings.lora.rank else _values(_matrices_apart(model, settings.optimizer))
    others = settings.trained(model) - matrices
    if ranks == 1:
        return float(matrices), float(others)
    if settings.owned is not None and not settings.is_fsdp:
        return settings.owned
    experts, owners = 0 if settings.lora.rank else expert_values(model), settings.expert_shard
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
    waiting = (
        max(4, width) * settings.trained(model)
        if accumulates
        else (width + 4) * min(ends + block, settings.trained(model))
    )
    note = "whole gradients until the last micro-batch" if accumulates else "gradients of a block and the tables"
    return [
        MemoryPart("gathered", gathered, "whole weights of the tables and two blocks"),
        MemoryPart("unreduced", waiting, note),
    ]


def _borrowed_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """Gradients of a pass on their way to the process that keeps them."""
    is_cut = settings.gradient_ranks > 1 and not settings.is_fsdp
    if not is_cut:
        return []
    table = settings.gradient_bytes * parameter_counts(model)["embedding"]
    size = BORROWED_BUCKETS * _bucket_bytes(model, settings) + table
    size = min(size, settings.gradient_bytes * settings.trained(model))
    return [MemoryPart("buckets", size, f"gradients in flight: {BORROWED_BUCKETS} buckets and a table")]


def largest_parameter(model: ModelConfig) -> int:
    """Values of the largest parameter of a model (as held): a table, or the stacked experts of a block."""
    return max(_largest_of_blocks(model), model.vocab_rows * model.hidden_size)


def _largest_of_blocks(model: ModelConfig) -> int:
    largest = max(rows * columns for rows, columns in linear_shapes(model).values())
    return max(largest, 2 * model.moe.experts * model.moe.expert_size * model.hidden_size)


def _bucket_bytes(model: ModelConfig, settings: MemorySettings) -> float:
    """Of the largest bucket of a block; a bucket has at least one whole weight. Each table is a bucket of its own."""
    return max(settings.bucket_bytes, float(settings.gradient_bytes * _largest_of_blocks(model)))


def _staging_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    """What offload needs on the way between the device and the host."""
    if settings.offload == "none":
        return []
    counts, width = parameter_counts(model), WIDTHS[settings.precision]
    piece = min(PIECE_VALUES, counts["total"]) * (settings.gradient_bytes + width)
    return [MemoryPart("staging", float(STAGED_PIECES * piece), f"{STAGED_PIECES} pieces, pinned", "host")]


def _float8_parts(model: ModelConfig, settings: MemorySettings) -> list[MemoryPart]:
    copy_bytes = settings.operators["linear"].weight_copy_bytes
    if not copy_bytes:
        return []
    counts = parameter_counts(model)
    chosen = 3 * model.hidden_size * model.moe.experts_per_token * model.moe.expert_size * model.expert_layers
    values = counts["matmul"] - counts["embedding"] - chosen  # experts have none
    return [MemoryPart("float8", float(copy_bytes * values), "weights of the blocks, plain and transposed")]
