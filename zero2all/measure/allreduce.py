"""All-reduces of many sizes over real processes: gloo on the CPU, NCCL over the GPUs of a machine.

Bus bandwidth follows nccl-tests: 2 (n - 1) / n x bytes / time, the bytes that a ring sends over each link, so that
figures of any number of ranks can be compared with the speed of the link. The time is the slowest rank's. The ranks are
started as those of a run are (`zero2all.parallel.launch`); torchrun may start them too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zero2all.common.errors import UsageError
from zero2all.measure.clock import wait_for
from zero2all.parallel.device import local_rank, pick_device
from zero2all.parallel.rendezvous import open_store

CPU_SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24, 26))
GPU_SIZES = (*CPU_SIZES, 1 << 28, 1 << 30)
SAMPLES, LEAST_SAMPLES = 20, 5
INNER_SECONDS = 0.002
"""Small sizes are repeated until a sample lasts this long."""
JOIN_SECONDS = 180.0
BUCKET_BYTES = 128e6
"""The default of parallel.bucket_mb."""


@dataclass(frozen=True)
class Reduced:
    """All-reduces of one size."""

    bytes: int
    ranks: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second over each link of a ring."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.median

    @property
    def size(self) -> str:
        """In words: 64 KiB, 1 GiB."""
        for unit, bytes_of in (("GiB", 1 << 30), ("MiB", 1 << 20)):
            if self.bytes >= bytes_of:
                return f"{self.bytes // bytes_of} {unit}"
        return f"{self.bytes >> 10} KiB"

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds, bytes/s."""
        figures = {"median_seconds": self.median, "spread": self.spread, "bus_bandwidth": self.bus_bandwidth}
        return {"bytes": self.bytes, **figures, "samples": self.seconds}


def possible_ranks(device: str, ranks: int | None) -> tuple[str, int]:
    """The kind of the device, and how many ranks: None are one per GPU, or 2 on the CPU."""
    kind, gpus = pick_device(device, "--device").type, torch.cuda.device_count()
    ranks = ranks or (gpus if kind == "cuda" else 2)
    if kind == "cuda" and not 2 <= ranks <= gpus:
        raise UsageError(
            f"--ranks is {ranks}, but an all-reduce needs two ranks, NCCL takes one GPU for each, and this machine has "
            f"{gpus}. Use from 2 to {gpus}, or --device cpu."
        )
    return kind, ranks


def measure_allreduces(kind: str, seconds: float) -> list[Reduced]:
    """Be one of the ranks; no size is begun when the time is over."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", local_rank()) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=open_store(rank, JOIN_SECONDS), rank=rank, world_size=size)
    started, found = time.perf_counter(), []
    for count in GPU_SIZES if device.type == "cuda" else CPU_SIZES:
        # All ranks must take the same decision: rank 0's clock.
        is_over = torch.tensor([float(time.perf_counter() - started > seconds)], device=device)
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
        found.append(Reduced(count, size, _measure(count, device, seconds / 4)))
    dist.destroy_process_group()
    return found


def _measure(size: int, device: torch.device, seconds: float) -> list[float]:
    """Seconds of an all-reduce, several times, each the slowest rank's."""
    values = torch.zeros(size // 4, device=device)  # float32; zeros stay zeros however often they are summed
    _slowest(_timed(values, device, 2), device)  # the first one sets up connections
    once = _slowest(_timed(values, device, 2), device)
    inner = max(1, int(INNER_SECONDS / once))
    samples: list[float] = []
    while len(samples) < SAMPLES and (len(samples) < LEAST_SAMPLES or sum(samples) * inner < seconds):
        samples.append(_slowest(_timed(values, device, inner), device))  # equal on all ranks, as is the decision
    return samples


def _timed(values: torch.Tensor, device: torch.device, repeats: int) -> float:
    dist.barrier()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    wait_for(device)
    return (time.perf_counter() - started) / repeats


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


def allreduce_cells(found: Sequence[Reduced]) -> list[list[str]]:
    """A table with its heading."""
    rows = [
        [one.size, _time(one.median), f"±{50 * one.spread:.1f} %", f"{one.bus_bandwidth / 1e9:,.3g} GB/s"]
        for one in found
    ]
    return [["size", "median", "spread", "bus bandwidth"], *rows]


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"


def allreduce_advice(found: Sequence[Reduced]) -> str:
    """The message size from which half of the best bandwidth is reached: smaller messages should be joined."""
    best = max(found, key=lambda one: one.bus_bandwidth)
    half = next(one for one in found if one.bus_bandwidth >= best.bus_bandwidth / 2)
    top = best.bus_bandwidth / 1e9
    if half.bytes <= BUCKET_BYTES / 2:
        return (
            f"Half of the best, {top:.2f} GB/s at {best.size}, is reached from {half.size} on. parallel.bucket_mb "
            f"(default 128 MB) is well above that."
        )
    return (
        f"Half of the best, {top:.2f} GB/s at {best.size}, is reached from {half.size} on: raise parallel.bucket_mb "
        f"(default 128 MB) well above that."
    )
