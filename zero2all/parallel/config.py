"""Where a run computes, and how it is spread over processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zero2all.common.schema import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class ParallelConfig:
    """The devices of a run and the CPU threads it may use."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is a card, else the CPU."""
    processes: PositiveInt | Literal["auto"] = "auto"
    """Processes on this machine; auto: one per GPU, or one without a GPU. Under torchrun its own number is used."""
    data: Literal["replicate", "shard"] = "replicate"
    """replicate: every process has all weights; shard: each keeps a part of every weight and moment (FSDP2)."""
    expandable_segments: bool = True
    """Let segments of GPU memory grow instead of allocating new ones: less fragmentation with tensors of changing
    sizes. PYTORCH_ALLOC_CONF, where it is set, takes precedence."""
    timeout_seconds: PositiveFloat = 1800.0
    """How long a process waits for the others before it gives up."""
    cpu_threads: PositiveInt | None = None
    """CPU threads for the arithmetic. None takes all cores when a run starts, and the same number again on resume:
    float sums depend on the number of threads, so an exact resume needs the same one."""
