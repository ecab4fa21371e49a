"""`z2a perf memory`: where the memory of a run goes, phase by phase, on a GPU that need not be here.

The operators are those that a run would take on this machine, if the GPU asked about is here; else those that `auto`
takes on such a GPU without optional packages, which the report says.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from zero2all.common.language import translate as t
from zero2all.config import RunConfig
from zero2all.estimate.fit import Change, changes_that_help, process_bytes
from zero2all.estimate.gpus import CONTEXT_BYTES, GIB, NCCL_BYTES, Card
from zero2all.estimate.memory import MemoryEstimate, MemorySettings, binary_size, estimate_memory
from zero2all.ops.registry import TAKEN_ON_A_GPU, Ops, assume_gpu, resolve
from zero2all.packed.loader import rank_rows
from zero2all.parallel.check import check_spread
from zero2all.predict.batch import load_model_config, precision_notes, with_vocabulary
from zero2all.train.build import op_context
from zero2all.train.micro_batch import pass_sizes, stage_settings
from zero2all.train.state import DTYPES


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one process of a run, that which needs most."""

    config: RunConfig
    ranks: int
    card: Card
    operators: dict[str, str]
    settings: MemorySettings
    estimate: MemoryEstimate
    notes: list[str]
    changes: list[Change]

    @property
    def process_bytes(self) -> float:
        """What the process takes of the card."""
        return process_bytes(self.estimate, self.settings)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.process_bytes <= self.card.memory_bytes

    @property
    def outside(self) -> list[tuple[str, float, str]]:
        """Bytes that the process takes beyond torch's allocated peak."""
        estimate = self.estimate
        nccl = self.process_bytes - estimate.reserved - CONTEXT_BYTES
        rows = [
            ("reserved, unused", estimate.reserved - estimate.total, "a margin for gaps between tensors, not measured"),
            ("CUDA context", CONTEXT_BYTES, "with the kernels of a run, assumed"),
        ]
        return [*rows, ("NCCL", nccl, f"{nccl / NCCL_BYTES:.0f} communicators")] if nccl else rows


def memory_report(source: str, overrides: list[str], card: Card | None, ranks: int) -> MemoryReport:
    """The report on a config; `card` None: this machine's GPU, which must be there."""
    loaded, assumed = load_model_config(source, overrides)
    config, notes = with_vocabulary(loaded)
    notes = [*assumed, *precision_notes(config, source, overrides), *notes]
    sizes = check_spread(config, ranks)
    is_here = card is None
    card = card or card_here()
    ops, said = _operators(config, is_here)
    if said:
        notes.append(said)
    if config.ops.compile != "none":
        notes.append("ops.compile decides what is saved, mostly less than this")

    def of_stages(samples: int) -> tuple[MemoryEstimate, MemorySettings]:
        """Of the stage that needs most."""
        found = stage_settings(config, ops, sizes, samples, card.workspace_bytes)
        return max(((estimate_memory(config.model, each), each) for each in found), key=lambda pair: pair[0].total)

    asked = config.train.micro_batch_samples
    rows = rank_rows(config.samples_per_step, *config.batch_place(0, sizes.replicate * sizes.shard))[2]
    if asked == "auto":
        candidates = pass_sizes(rows)
        fitting = [number for number in candidates if process_bytes(*of_stages(number)) <= card.memory_bytes]
        samples = fitting[-1] if fitting else candidates[0]
        notes.append(f"train.micro_batch_samples is auto: the largest that fits, {samples} of {rows} samples")
    else:
        samples = min(int(asked), rows)
    estimate, settings = of_stages(samples)
    changes = changes_that_help(config.model, settings, card)
    return MemoryReport(config, ranks, card, ops.taken, settings, estimate, notes, changes)


def card_here() -> Card:
    """The GPU of this machine; the caller has checked that there is one."""
    properties = torch.cuda.get_device_properties(0)
    return Card(properties.name, float(properties.total_memory), properties.major)


def _operators(config: RunConfig, is_here: bool) -> tuple[Ops, str]:
    """The implementation of every operator, and what was assumed."""
    if is_here:
        where = op_context(config, "cuda", DTYPES[config.train.precision], config.parallel.zero == 3)
        return resolve(config.ops, where), ""
    has_auto = any(getattr(config.ops, name) == "auto" for name in TAKEN_ON_A_GPU)
    said = "operators that are auto: those of a GPU with Triton, without FlashAttention 4 and QuACK"
    return assume_gpu(config.ops, config.data.document_mask), said if has_auto else ""


def parts_table(report: MemoryReport) -> list[list[str]]:
    """Every part of the peak, and what the process takes beside it."""
    estimate = report.estimate
    parts = [(part.name, part.bytes, part.note) for part in estimate.parts if part.place == "device" and part.bytes]
    parts += [("peak allocated", estimate.total, ""), *report.outside, ("process", report.process_bytes, "")]
    rows = [
        [t(name), f"{count / GIB:.3f}", f"{count / report.process_bytes:.1%}", t(note)] for name, count, note in parts
    ]
    return [["part", "GiB", "share", "what"], *rows]


def phases_table(report: MemoryReport) -> list[list[str]]:
    """The phases of a step; each total is what torch has allocated at its worst moment."""
    estimate = report.estimate
    rows = [["phase", "all the time", "saved", "working space", "total, GiB"]]
    for phase in estimate.phases:
        figures = (estimate.persistent, phase.saved, phase.working, estimate.persistent + phase.bytes)
        rows.append([t(phase.name), *(f"{figure / GIB:.3f}" for figure in figures)])
    return rows


def verdict(report: MemoryReport) -> str:
    """Whether it fits, in one sentence."""
    needed, there = binary_size(report.process_bytes), binary_size(report.card.memory_bytes)
    if report.fits:
        left = binary_size(report.card.memory_bytes - report.process_bytes)
        return f"It fits: a process takes {needed} of the {there} of {report.card.name}; {left} stay free."
    return f"It does not fit: a process takes {needed}, and {report.card.name} has {there}."


def changes_table(report: MemoryReport) -> list[list[str]]:
    """What would need less memory."""
    rows = [["change", "process, GiB", "saves", "fits", "host, GiB", "what it costs"]]
    for change in report.changes:
        saves = report.process_bytes - change.process_bytes
        host = f"{change.host_bytes / GIB:.1f}" if change.host_bytes else ""
        fits = t("yes") if change.fits else t("no")
        rows.append(
            [change.text, f"{change.process_bytes / GIB:.2f}", f"{saves / GIB:.2f}", fits, host, t(change.cost)]
        )
    return rows


def as_json(report: MemoryReport) -> dict[str, Any]:
    """All figures in bytes, of one process."""
    estimate, settings = report.estimate, report.settings
    return {
        "unit": "bytes, of the process that needs most",
        "card": dataclasses.asdict(report.card),
        "ranks": report.ranks,
        "micro_batch": {"samples": settings.micro_batch_samples, "seq_len": settings.seq_len},
        "operators": report.operators,
        "parts": [dataclasses.asdict(part) for part in estimate.parts],
        "phases": [
            {**phase._asdict(), "persistent": estimate.persistent, "total": estimate.persistent + phase.bytes}
            for phase in estimate.phases
        ],
        "worst_phase": estimate.worst.name,
        "persistent": estimate.persistent,
        "peak_allocated": estimate.total,
        "peak_of_step": estimate.step_peak,
        "reserved": estimate.reserved,
        "process": report.process_bytes,
        "host": estimate.host,
        "fits": report.fits,
        "notes": report.notes,
        "changes": [
            {"fields": one.fields, "process": one.process_bytes, "host": one.host_bytes, "fits": one.fits}
            | {"cost": one.cost}
            for one in report.changes
        ],
    }
