"""`dataloader`: our loader over packed data, with threads and processes as readers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import torch

from zero2all.packed.loader import Batch, Loader, LoaderOptions
from zero2all.packed.mixture import TrainingData
from zero2all.packed.transfer import batches_on
from zero2all.perf.bench.samples import WITHIN_NOISE, Bench, Row, best_of, times_faster
from zero2all.perf.measure import device_name

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
