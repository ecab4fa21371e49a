"""`pin`, `numa` and `dataloader`: copies between host and GPU, from near and far memory, and our loader over packed
data with threads and processes as readers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zero2all.common.cores import allowed_cpus, cpu_numbers
from zero2all.measure.bench.samples import WITHIN_NOISE, Bench, Row, best_of, in_turn, is_faster, times_faster
from zero2all.measure.step_timer import device_name
from zero2all.packed.loader import Batch, Loader, LoaderOptions
from zero2all.packed.mixture import TrainingData
from zero2all.packed.transfer import batches_on

SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20)
NUMA_BYTES = 256 << 20
NODES = Path("/sys/devices/system/node")
NO_GPU = "It copies between host and GPU, and torch sees no GPU here."


def bench_pin(device: torch.device, seconds: float) -> Bench:
    """Copies from and to page-locked memory against ordinary memory, and what locking costs."""
    bench = Bench("pin", f"one copy at a time, {device_name(device)}; GB/s are 1e9 bytes")
    if device.type != "cuda":
        bench.left_out.append(NO_GPU)
        return bench
    for size in SIZES:
        pageable, there = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=device)
        pinned = pageable.pin_memory()
        cases: dict[str, Callable[[], object]] = {
            "pageable to GPU": partial(there.copy_, pageable),
            "pinned to GPU": partial(there.copy_, pinned, non_blocking=True),
            "GPU to pageable": partial(pageable.copy_, there),
            "GPU to pinned": partial(pinned.copy_, there, non_blocking=True),
            "locking new memory": partial(_lock, pageable),
        }
        times = in_turn(cases, seconds / len(SIZES), device)
        bench.rows += [Row(f"{name}, {size >> 10:,} KiB", took, size / 1e9, "GB/s") for name, took in times.items()]
    bench.advice = pin_advice(bench.rows)
    return bench


def _lock(host: torch.Tensor) -> None:
    """Lock memory and unlock it. (`pin_memory` would hand out what was locked before.)"""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)):
        raise RuntimeError("cudaHostRegister failed")
    runtime.cudaHostUnregister(host.data_ptr())


def pin_advice(rows: list[Row]) -> list[str]:
    """From the largest size, where the speed of the link shows."""
    pageable, pinned, _, back, locking = rows[-5:]
    if not is_faster(pinned, pageable):
        return ["Copies from pinned memory are not faster here beyond the noise: pinning gains nothing."]
    advice = [f"Pinned memory copies {times_faster(pinned, pageable)} times as fast, and our loader uses it already."]
    if is_faster(pinned, locking):
        copies = locking.median / pinned.median
        advice.append(f"Locking memory anew takes as long as {copies:.1f} copies: lock once and use it again.")
    if is_faster(pinned, back) or is_faster(back, pinned):
        advice.append(
            f"The two directions differ: {pinned.rate or 0:.1f} GB/s to the GPU, {back.rate or 0:.1f} GB/s back. A "
            f"checkpoint leaves at the second rate."
        )
    return advice


def numa_nodes(folder: Path = NODES) -> dict[str, set[int]]:
    """Nodes with the CPUs among theirs that this process may use; nodes without one are left out."""
    allowed = allowed_cpus()
    found = {}
    for node in sorted(folder.glob("node[0-9]*")):
        cpus = cpu_numbers((node / "cpulist").read_text().strip()) & allowed
        if cpus:
            found[node.name] = cpus
    return found


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Run this thread on these CPUs; memory that it touches first comes from their node."""
    before = allowed_cpus()
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bench_numa(device: torch.device, seconds: float) -> Bench:
    """Reading memory of each node with the first node's CPUs (one thread); with a GPU, copies from each to it."""
    bench = Bench("numa", f"{NUMA_BYTES >> 20} MiB; GB/s are 1e9 bytes read")
    nodes = numa_nodes()
    if len(nodes) < 2:
        bench.left_out.append("This process may use the CPUs of one memory node only, so there is nothing to compare.")
        return bench
    memory: dict[str, np.ndarray] = {}
    for name, cpus in nodes.items():
        with on_cpus(cpus):
            memory[name] = np.ones(NUMA_BYTES // 8, dtype=np.float64)  # touched here, so it lies on this node
    home, cpus = next(iter(nodes.items()))
    with on_cpus(cpus):
        reads: dict[str, Callable[[], object]] = {f"{home} reads {name}": values.sum for name, values in memory.items()}
        times = in_turn(reads, seconds / 2, torch.device("cpu"))
    bench.rows += [Row(name, took, NUMA_BYTES / 1e9, "GB/s") for name, took in times.items()]
    bench.advice = numa_advice(bench.rows, "A thread")
    if device.type != "cuda":
        bench.left_out.append("Copies from each node to a GPU: torch sees no GPU here.")
        return bench
    there = torch.empty(NUMA_BYTES, dtype=torch.uint8, device=device)
    pinned = {}
    for name, cpus in nodes.items():
        with on_cpus(cpus):
            pinned[name] = torch.zeros(NUMA_BYTES, dtype=torch.uint8).pin_memory()
    copies: dict[str, Callable[[], object]] = {
        f"{name} to GPU": partial(there.copy_, host, non_blocking=True) for name, host in pinned.items()
    }
    rows = [Row(name, took, NUMA_BYTES / 1e9, "GB/s") for name, took in in_turn(copies, seconds / 2, device).items()]
    bench.rows += rows
    bench.advice += numa_advice(rows, "The GPU")
    return bench


def numa_advice(rows: list[Row], who: str) -> list[str]:
    """Bind to a node only where the nodes differ."""
    fast, slow = min(rows, key=lambda row: row.median), max(rows, key=lambda row: row.median)
    if not is_faster(fast, slow):
        return [f"{who} reaches every node equally fast, within the noise: no binding is needed."]
    node = fast.what.split()[-1] if who == "A thread" else fast.what.split()[0]
    number = node.removeprefix("node")
    return [
        f"{who} reaches {node} {times_faster(fast, slow)} times as fast as the slowest node: start the process with "
        f"`numactl --cpunodebind={number} --membind={number}`."
    ]


# ---- the loader ------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[str, int]] = {
    "1 thread": ("thread", 1),
    "2 threads": ("thread", 2),
    "4 threads": ("thread", 4),
    "1 process": ("process", 1),
    "2 processes": ("process", 2),
}
TIMED_BATCHES = 8
STEPS = 100_000
LEAST_ROUNDS = 5


def bench_dataloader(data: TrainingData, tokens_per_step: int, device: torch.device, seconds: float) -> Bench:
    """Tokens per second that reach the device while nothing is trained."""
    bench = Bench(
        "dataloader",
        f"batches of {tokens_per_step:,} tokens to {device_name(device)}, files in the page cache",
    )
    with ExitStack() as stack:
        loaders = {}
        for name, (kind, readers) in CASES.items():
            options = LoaderOptions(readers=readers, reader_kind=kind, prefetch_steps=max(2, readers))
            loaders[name] = batches_on(device, data, tokens_per_step, 0, STEPS, options)
            stack.callback(loaders[name].close)
        batches = {name: iter(loader) for name, loader in loaders.items()}
        times: dict[str, list[float]] = {name: [] for name in loaders}
        started = time.perf_counter()
        while len(times[next(iter(times))]) < LEAST_ROUNDS or time.perf_counter() - started < seconds:
            for name, loader in loaders.items():
                times[name].append(_timed(loader, batches[name]))
            if time.perf_counter() - started > 3 * seconds:
                break
    amount = TIMED_BATCHES * tokens_per_step
    bench.rows = [Row(name, took[1:] or took, amount / 1e6, "M tokens/s") for name, took in times.items()]
    bench.advice = loader_advice(bench.rows)
    return bench


def _timed(loader: Loader, batches: Iterator[Batch]) -> float:
    """Seconds of some batches. Those that were read ahead while others had their turn are not counted."""
    for _ in range(loader.options.prefetch_steps):
        next(batches)
    started = time.perf_counter()
    for _ in range(TIMED_BATCHES):
        next(batches)
    return time.perf_counter() - started


def loader_advice(rows: list[Row]) -> list[str]:
    """More readers only where they read more; and what one reader is enough for."""
    first, best = rows[0], best_of(rows)
    enough = (
        f"One reading thread, the default, delivers {(first.rate or 0) * 1e6:,.0f} tokens/s: enough for slower runs."
    )
    if best is None:
        return [enough, WITHIN_NOISE]
    kind, readers = CASES[best.what]
    setting = f"--data.readers {readers} --data.reader_kind {kind}"
    return [enough, f"A faster run wants `{setting}`: {times_faster(best, first)} times as many tokens/s here."]
