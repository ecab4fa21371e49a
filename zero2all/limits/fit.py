"""Which changes would make a run fit into the memory of a GPU: each is tried by the estimate, alone and then together.

A change is worth what it frees. What it costs is said in words, because memory is all that is known here: time is
`z2a perf plan`'s subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero2all.limits.cards import NCCL_BYTES, Card
from zero2all.limits.memory import MemoryEstimate, estimate_memory
from zero2all.limits.memory_settings import MemorySettings
from zero2all.model.config import ModelConfig


@dataclass(frozen=True)
class Change:
    """One change of the settings, and what the run needs with it."""

    fields: dict[str, object]  # of the config, as in --section.field
    settings: MemorySettings
    cost: str
    process_bytes: float = 0.0
    host_bytes: float = 0.0
    fits: bool = False

    @property
    def text(self) -> str:
        """As it is written on a command line."""
        return " ".join(f"--{name} {value}" for name, value in self.fields.items())


def process_bytes(estimate: MemoryEstimate, settings: MemorySettings, card: Card) -> float:
    """What a process takes of the card: reserved memory, the CUDA context, and buffers of NCCL."""
    communicators = sum(
        size > 1 for size in (settings.replicate * settings.shard, settings.context, settings.tensor, settings.pipeline)
    )
    return estimate.process_bytes(card.context_bytes) + communicators * NCCL_BYTES


def changes_that_help(model: ModelConfig, settings: MemorySettings, card: Card, ranks: int = 8) -> list[Change]:
    """The changes that need less memory than the settings do, cheapest first; those alone, and the first pair of cheap
    ones where none is enough alone. `ranks`: processes to assume for ZeRO where the run has one."""
    now = process_bytes(estimate_memory(model, settings), settings, card)
    tried = [_tried(change, model, card) for change in _changes(settings, ranks)]
    useful = [change for change in tried if change.process_bytes < now]
    if not any(change.fits for change in useful):
        useful += [
            both
            for change in _changes(settings, ranks)
            for second in _changes(change.settings, ranks)
            if change.fields.keys().isdisjoint(second.fields)
            and (
                both := _tried(
                    replace(second, fields=change.fields | second.fields, cost=f"{change.cost}; {second.cost}"),
                    model,
                    card,
                )
            ).fits
        ][:3]
    return useful


def _tried(change: Change, model: ModelConfig, card: Card) -> Change:
    estimate = estimate_memory(model, change.settings)
    needed = process_bytes(estimate, change.settings, card)
    return replace(change, process_bytes=needed, host_bytes=estimate.host, fits=needed <= card.memory_bytes)


def _changes(settings: MemorySettings, ranks: int) -> Iterator[Change]:
    """Only what the settings do not do yet, and what works with the rest of them."""
    samples = settings.micro_batch_samples
    for smaller in (samples // 2, 1):
        if 1 <= smaller < samples:
            passes = -(-settings.passes * samples // smaller)
            yield Change(
                {"train.micro_batch_samples": smaller},
                replace(settings, micro_batch_samples=smaller, passes=passes),
                "smaller matmuls, more passes",
            )
    if settings.recompute == "none":
        yield Change(
            {"train.recompute": "selective"},
            replace(settings, recompute="selective"),
            "norms, SwiGLU and rotary positions are computed twice",
        )
    if settings.recompute != "full":
        yield Change(
            {"train.recompute": "full"},
            replace(settings, recompute="full", recompute_every=1),
            "the forward pass of the blocks is computed twice",
        )
    if settings.optimizer == "adamw" and settings.offload == "none":
        if not settings.is_fsdp:
            yield Change(
                {"parallel.offload": "optimizer"},
                replace(settings, offload="optimizer"),
                "masters and states on the host: gradients go there and weights come back every step",
            )
        yield Change(
            {"optim.kind": "adamw_8bit"}, replace(settings, optimizer="adamw_8bit", owned=None), "moments in 8 bits"
        )
        if settings.precision == "bfloat16":
            yield Change(
                {"optim.kind": "adamw_bf16"},
                replace(settings, optimizer="adamw_bf16", owned=None),
                "no float32 masters: weights are rounded at random",
            )
    shard = settings.shard if settings.shard > 1 else ranks
    passes = max(1, settings.passes * settings.shard // shard)  # more processes share the step
    for zero in range(settings.zero + 1, 4 if settings.offload == "none" else 3):
        if settings.pipeline == 1 and settings.offload != "weights":
            fields: dict[str, object] = {"parallel.zero": zero, "parallel.shard": shard}
            if settings.processes == 1:
                fields["ranks"] = shard
            yield Change(
                fields,
                replace(settings, zero=zero, shard=shard, passes=passes, owned=None),
                (
                    f"{shard} GPUs share the states",
                    f"{shard} GPUs share states and gradients",
                    f"{shard} GPUs share states, gradients and weights",
                )[zero - 1],
            )
    if settings.optimizer == "adamw" and settings.offload in ("none", "optimizer") and settings.zero == 0:
        yield Change(
            {"parallel.offload": "weights"},
            replace(settings, offload="weights"),
            "weights, gradients and states on the host: every pass waits for the copies",
        )
