"""`allreduce`: all-reduces of many sizes over real processes: gloo on the CPU, NCCL over the GPUs of this machine.

    python -m zero2all.perf.bench.allreduce --rank 0 --ranks 2 --store FILE …

is one rank. Bus bandwidth follows nccl-tests: 2 (n - 1) / n x bytes / time, the bytes that a ring sends over each link,
so that figures of any number of ranks can be compared with the speed of the link. The time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero2all.perf.bench.samples import Bench, Row
from zero2all.perf.measure import wait_for

CPU_SIZES = tuple(1 << power for power in (10, 13, 16, 18, 20, 22, 24, 26))
GPU_SIZES = (*CPU_SIZES, 1 << 28, 1 << 30)
SAMPLES, LEAST_SAMPLES = 20, 5
INNER_SECONDS = 0.002
"""Small sizes are repeated until a sample lasts this long."""
START_SECONDS = 60.0


def bench_allreduce(ranks: int, device: str, seconds: float) -> Bench:
    """Start the ranks and collect the figures of rank 0; ended ranks and time limits lose only what is missing."""
    sizes = GPU_SIZES if device == "cuda" else CPU_SIZES
    backend = "nccl" if device == "cuda" else "gloo"
    bench = Bench(
        "allreduce", f"{backend}, {ranks} ranks on this machine; bus bandwidth = 2 (n - 1) / n x bytes / time"
    )
    if ranks < 2:
        gpus = torch.cuda.device_count()
        bench.left_out.append(f"An all-reduce needs two ranks, and NCCL one GPU for each; this machine has {gpus}.")
        return bench
    with tempfile.TemporaryDirectory() as folder:
        lines, problem = _run_ranks(ranks, device, seconds, Path(folder))
    factor = 2 * (ranks - 1) / ranks
    for line in lines:
        size = int(line["bytes"])
        latency = {"bytes": f"{size:,}"}
        bench.rows.append(Row(_size(size), line["seconds"], factor * size / 1e9, "GB/s", latency))
    if len(lines) < len(sizes):
        missing = ", ".join(_size(size) for size in sizes[len(lines) :])
        bench.left_out.append(f"{missing}: {problem or 'the time was over (--seconds)'}")
    bench.advice = allreduce_advice(bench.rows)
    return bench


def _run_ranks(ranks: int, device: str, seconds: float, folder: Path) -> tuple[list[dict[str, Any]], str]:
    processes = []
    logs = []
    for rank in range(ranks):
        command = [
            *(sys.executable, "-m", "zero2all.perf.bench.allreduce", "--rank", str(rank), "--ranks", str(ranks)),
            *("--store", str(folder / "store"), "--device", device, "--seconds", str(seconds)),
        ]
        log = open(folder / f"rank{rank}", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        logs.append(log)
        errors = open(folder / f"errors{rank}", "w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        logs.append(errors)
        processes.append(subprocess.Popen(command, stdout=log, stderr=errors, stdin=subprocess.DEVNULL))
    until = time.monotonic() + START_SECONDS + 2 * seconds
    problem = ""
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > until:
                problem = (
                    f"rank {failed[0]} failed" if failed else f"not finished after {START_SECONDS + 2 * seconds:g} s"
                )
                break
            time.sleep(0.02)
        else:
            failed = [rank for rank, process in enumerate(processes) if process.returncode]
            problem = f"rank {failed[0]} failed" if failed else ""
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    if "failed" in problem:
        words = (folder / f"errors{problem.split()[1]}").read_text(errors="replace").strip().splitlines()
        problem = f"{problem}: {words[-1][:200] if words else 'no message'}"
    text = (folder / "rank0").read_text(encoding="utf-8", errors="replace")
    return [
        json.loads(line) for line in text.splitlines() if line.startswith('{"bytes"') and line.endswith("}")
    ], problem


def _size(size: int) -> str:
    for unit, bytes_of in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= bytes_of:
            return f"{size // bytes_of} {unit}"
    return f"{size >> 10} KiB"


def allreduce_advice(rows: list[Row]) -> list[str]:
    """From which size on half of the best bandwidth is reached: smaller messages should be joined."""
    if len(rows) < 3:
        return []
    best = max(rows, key=lambda row: row.rate or 0.0)
    top = best.rate or 0.0
    half = next(row for row in rows if (row.rate or 0.0) >= top / 2)
    advice = [
        f"Best bus bandwidth {top:.2f} GB/s, at {best.what}; the smallest takes {1e6 * rows[0].median:,.0f} µs.",
        f"Half of it is reached from {half.what} on: join smaller messages. parallel.bucket_mb (default 128 MB) "
        f"{'is' if int(half.more['bytes'].replace(',', '')) <= 64e6 else 'should be'} well above that.",
    ]
    largest = rows[-1]
    if (largest.rate or 0.0) < 0.8 * top and largest.quartiles[0] / largest.median > 0.9:
        advice.append(f"At {largest.what} it falls to {largest.rate or 0:.2f} GB/s: larger buckets do not help.")
    return advice


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


if __name__ == "__main__":
    sys.exit(main())
