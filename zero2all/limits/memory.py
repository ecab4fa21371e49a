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

During a step: what each block saves for the backward pass, times the tokens of a micro-batch, and what is alive beside
it in the worst phase of the step (`zero2all.limits.pass_memory`). Peak = what is there all the time + the worst phase.

`MemoryEstimate.total` is what torch counts as allocated: also ids, tables of positions and cuBLAS workspaces. The
process needs more: what torch's allocator reserves without using it, and the CUDA context (`process_bytes`).

With torch.compile the compiler decides what is saved, mostly less than this. Passes in a CUDA graph
(`zero2all.train.cuda_graph`) have workspaces of their own, and keep their memory reserved between steps.

Measured on an H200 (benchmarks/results) and estimated, peak allocated: tests/limits/test_memory.py has the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.limits.memory_settings import WIDTHS, MemorySettings
from zero2all.limits.pass_memory import Phase, pass_memory, saved_bytes_per_token
from zero2all.limits.state_memory import KINDS_APART, MemoryPart, largest_parameter, optimizer_bytes, state_parts
from zero2all.model.config import ModelConfig, parameter_counts

__all__ = [
    "ALLOWANCE",
    "GIB",
    "KINDS_APART",
    "WIDTHS",
    "MemoryEstimate",
    "MemoryPart",
    "MemorySettings",
    "Phase",
    "binary_size",
    "estimate_memory",
    "optimizer_bytes",
    "saved_bytes_per_token",
]

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
STATE_PARTS = ("weights", "masters", "gradients", "optimizer", "compression")


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

    def process_bytes(self, context_bytes: float) -> float:
        """What the process takes of a GPU whose CUDA context, with its kernels, has `context_bytes`."""
        return self.reserved + context_bytes

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


def estimate_memory(model: ModelConfig, settings: MemorySettings) -> MemoryEstimate:
    """The parts of the memory of a run, in the process that needs most; in a pipeline, in one of `settings.stage`.

    Takes about half a millisecond. Many micro-batches of one model: `zero2all.limits.pass_memory` has the lines they
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
    if lines.host_per_token:
        swapped = tokens * in_flight * lines.host_per_token
        parts.append(MemoryPart("activations", swapped, "swapped, pinned", "host"))
    parts.append(MemoryPart("working space", worst.bytes - activations, worst.name))
    return MemoryEstimate(tuple(parts), phases)


def _phases_after_passes(model: ModelConfig, settings: MemorySettings) -> tuple[Phase, ...]:
    """What the parts of a step need that hold no activations."""
    values, ops = parameter_counts(model)["total"], settings.operators
    update = 0.0
    if settings.offload == "none" and settings.optimizer == "adamw" and not settings.is_fsdp:
        update = ops["optimizer"].update_bytes_per_value * values / settings.state_ranks
        update += ops["optimizer"].update_bytes_of_largest * largest_parameter(model)
    elif settings.offload == "none":  # one parameter after the other
        update = UPDATE_BYTES * largest_parameter(model) / (settings.shard if settings.is_fsdp else 1)
    joined = BYTES_TO_SPLIT * min(JOINED_VALUES, values) if settings.has_split_masters else 0.0
    return Phase(NORM, 0.0, 0.0), Phase(UPDATE, 0.0, update), Phase(SAVE, 0.0, joined)
