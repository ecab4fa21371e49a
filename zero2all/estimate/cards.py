"""GPUs by name: the memory that a process can have of one, and what it loses to the driver and to libraries.

`memory_bytes` is what torch reports as the device's total memory, which is less than the data sheet says. The context
is what a process takes before its first tensor, with the kernels of a training run loaded lazily; it was not measured
on every card, so half a gibibyte stands for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zero2all.common.errors import UsageError
from zero2all.estimate.gpus import GPUS

GIB = 2**30
CONTEXT_BYTES = 0.5 * GIB
"""CUDA context and loaded kernels of one process."""
NCCL_BYTES = 0.5e9
"""Buffers of one NCCL communicator, outside of torch's memory."""
HOPPER = 9


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    memory_bytes: float
    generation: int  # major compute capability

    @property
    def workspace_bytes(self) -> float:
        """See `cublas_workspace`."""
        return cublas_workspace(self.generation)

    @property
    def context_bytes(self) -> float:
        """What a process takes beside torch's memory."""
        return CONTEXT_BYTES


def cublas_workspace(generation: int) -> float:
    """Bytes that torch allocates for cuBLAS: one workspace for the thread of the forward pass, one for that of the
    backward pass; 32 MiB each from Hopper on, 8.125 MiB before."""
    return 2.0 * (32 * 2**20 if generation >= HOPPER else 8.125 * 2**20)


CARDS = {name: Card(name, gpu.torch_gib * GIB, gpu.generation) for name, gpu in GPUS.items() if gpu.torch_gib}


def named_card(name: str) -> Card:
    """The card of this name, `rtx 4090` and `4090` alike; an unknown one gets no guess."""
    short = re.sub(r"^(nvidia )?(geforce )?rtx[ -]?", "", name.lower())
    if short not in CARDS:
        raise UsageError(
            f"The memory of a GPU named {name} is not known. Known are {', '.join(CARDS)}. `z2a perf "
            f"memory --memory-gib N` computes for any other."
        )
    return CARDS[short]
