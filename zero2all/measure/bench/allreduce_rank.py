"""One rank of `z2a perf bench allreduce`. It imports torch only, so that it starts soon.

python -m zero2all.measure.bench.allreduce_rank --rank 0 --ranks 2 --store FILE --device cpu --seconds 10
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

CPU_SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24, 26))
GPU_SIZES = (*CPU_SIZES, 1 << 28, 1 << 30)
SAMPLES, LEAST_SAMPLES = 20, 5
INNER_SECONDS = 0.002
"""Small sizes are repeated until a sample lasts this long."""
START_SECONDS = 180.0


def main(words: list[str] | None = None) -> int:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    device = torch.device("cuda", asked.rank) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(asked.store, asked.ranks)
    limit = timedelta(seconds=START_SECONDS)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=asked.rank, world_size=asked.ranks, timeout=limit
    )
    started = time.perf_counter()
    for size in GPU_SIZES if device.type == "cuda" else CPU_SIZES:
        # All ranks must take the same decision: rank 0's clock.
        is_over = torch.tensor([float(time.perf_counter() - started > asked.seconds)], device=device)
        dist.broadcast(is_over, 0)
        if is_over.item():
            break
        seconds = _measure(size, device, asked.seconds / 4)
        if asked.rank == 0:
            print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    dist.destroy_process_group()
    return 0


def _measure(size: int, device: torch.device, seconds: float) -> list[float]:
    """Seconds of an all-reduce, several times, each the slowest rank's."""
    values = torch.zeros(size // 4, device=device)  # float32; zeros stay zeros however often they are summed
    once = _slowest(_timed(values, device, 2), device)  # the first one sets up connections
    once = _slowest(_timed(values, device, 2), device)
    inner = max(1, int(INNER_SECONDS / once))
    samples: list[float] = []
    while len(samples) < SAMPLES and (len(samples) < LEAST_SAMPLES or sum(samples) * inner < seconds):
        samples.append(_slowest(_timed(values, device, inner), device))  # equal on all ranks, as is the decision
    return samples


def _timed(values: torch.Tensor, device: torch.device, repeats: int) -> float:
    dist.barrier()
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values)
    _wait_for(device)
    return (time.perf_counter() - started) / repeats


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


if __name__ == "__main__":
    sys.exit(main())
