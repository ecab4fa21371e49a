"""`allreduce`: all-reduces of many sizes over real processes: gloo on the CPU, NCCL over the GPUs of this machine.

Bus bandwidth follows nccl-tests: 2 (n - 1) / n x bytes / time, the bytes that a ring sends over each link,
so that figures of any number of ranks can be compared with the speed of the link. The time is the slowest rank's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from zero2all.measure.bench.allreduce_rank import CPU_SIZES, GPU_SIZES, START_SECONDS
from zero2all.measure.bench.samples import Bench, Row

BUCKET_BYTES = 128e6
"""The default of parallel.bucket_mb."""


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
            *(
                sys.executable,
                "-m",
                "zero2all.measure.bench.allreduce_rank",
                "--rank",
                str(rank),
                "--ranks",
                str(ranks),
            ),
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
    reached = f"Half of it is reached from {half.what} on: join smaller messages"
    if int(half.more["bytes"].replace(",", "")) <= BUCKET_BYTES / 2:
        buckets = f"{reached}. parallel.bucket_mb (default 128 MB) is well above that."
    else:
        buckets = f"{reached}, and raise parallel.bucket_mb (default 128 MB) well above that."
    smallest = 1e6 * rows[0].median
    advice = [f"Best bus bandwidth {top:.2f} GB/s, at {best.what}; the smallest takes {smallest:,.0f} µs.", buckets]
    largest = rows[-1]
    if (largest.rate or 0.0) < 0.8 * top and largest.quartiles[0] / largest.median > 0.9:
        advice.append(f"At {largest.what} it falls to {largest.rate or 0:.2f} GB/s: larger buckets do not help.")
    return advice
