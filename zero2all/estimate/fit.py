"""Which changes would make a run fit into the memory of a GPU: each is tried by the estimate, alone and then together.

A change is worth what it frees. What it costs is said in words, because memory is all that is known here: time is
`z2a perf plan`'s subject.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from zero2all.estimate.gpus import CONTEXT_BYTES, NCCL_BYTES, Card
from zero2all.estimate.memory import MemoryEstimate, estimate_memory
from zero2all.estimate.memory_settings import MemorySettings
from zero2all.model.config import ModelConfig

AGAIN = "the forward pass of the blocks is computed twice"
RECOMPUTATION = (
    ("selective", 1, ("none",), "norms, SwiGLU and rotary positions are computed twice"),
    ("full", 1, ("none", "selective", "every_n"), AGAIN),
    ("groups", 2, ("none", "selective", "every_n", "full"), AGAIN),
)
"""train.recompute, recompute_every, instead of which kinds it may need less, and what it costs."""


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


def process_bytes(estimate: MemoryEstimate, settings: MemorySettings) -> float:
    """What a process takes of a GPU: reserved memory, the CUDA context, and buffers of NCCL."""
    communicators = sum(
        size > 1 for size in (settings.replicate * settings.shard, settings.context, settings.tensor, settings.pipeline)
    )
    return estimate.reserved + CONTEXT_BYTES + communicators * NCCL_BYTES


def changes_that_help(model: ModelConfig, settings: MemorySettings, card: Card, ranks: int = 8) -> list[Change]:
    """The changes that need less memory than the settings do, cheapest first; those alone, and the first pair of cheap
    ones where none is enough alone. `ranks`: processes to assume for ZeRO where the run has one."""
    now = process_bytes(estimate_memory(model, settings), settings)
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
    needed = process_bytes(estimate, change.settings)
    return replace(change, process_bytes=needed, host_bytes=estimate.host, fits=needed <= card.memory_bytes)


def _changes(settings: MemorySettings, ranks: int) -> Iterator[Change]:
    """Only what the settings do not do yet, and what works with the rest of them."""
    samples = settings.micro_batch_samples

    def change(cost: str, fields: dict[str, object], **values: Any) -> Change:
        return Change(fields, replace(settings, **values), cost)

    for smaller in (samples // 2, 1):
        if 1 <= smaller < samples:
            passes = -(-settings.passes * samples // smaller)
            fields: dict[str, object] = {"train.micro_batch_samples": smaller}
            yield change("smaller matmuls, more passes", fields, micro_batch_samples=smaller, passes=passes)
    for kind, every, instead_of, cost in RECOMPUTATION:
        if settings.recompute in instead_of:
            fields = {"train.recompute": kind} | ({"train.recompute_every": every} if kind == "groups" else {})
            yield change(cost, fields, recompute=kind, recompute_every=every)
    if settings.optimizer == "adamw" and settings.offload == "none":
        if not settings.is_fsdp:
            cost = "masters and states on the host: gradients go there and weights come back every step"
            yield change(cost, {"parallel.offload": "optimizer"}, offload="optimizer")
        yield change("moments in 8 bits", {"optim.kind": "adamw_8bit"}, optimizer="adamw_8bit", owned=None)
        if settings.precision == "bfloat16":
            cost = "no float32 masters: weights are rounded at random"
            yield change(cost, {"optim.kind": "adamw_bf16"}, optimizer="adamw_bf16", owned=None)
    shard = settings.shard if settings.shard > 1 else ranks
    passes = max(1, settings.passes * settings.shard // shard)  # more processes share the step
    costs = (
        f"{shard} GPUs share the states",
        f"{shard} GPUs share states and gradients",
        f"{shard} GPUs share states, gradients and weights",
    )
    for zero in range(settings.zero + 1, 4 if settings.offload == "none" else 3):
        if settings.pipeline == 1:
            fields = {"parallel.zero": zero, "parallel.shard": shard}
            fields |= {"ranks": shard} if settings.processes == 1 else {}
            yield change(costs[zero - 1], fields, zero=zero, shard=shard, passes=passes, owned=None)
