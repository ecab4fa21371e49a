"""What a step's control costs: host time of planning a step and of judging it, in every process of a real run.

    python benchmarks/control.py            4 processes over gloo, 8 rows a step, about half a minute
    python benchmarks/control.py --rows 64

Measured are `Trainer.plan` (limits, flags), `Guards.observe` (the guards) and the look at the flags; the
reduction of the step is not among them. Where the machine has fewer cores than processes, wall time holds turns of the
others, so CPU time is what counts, and beside it how often the thread waited for something (voluntary context
switches): control that waits for another process does. The median is an ordinary step; shards are judged by 64 rows at
a time, which only the mean shows. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.machine import save_result

WARMUP_STEPS = 100
MOST_MS = 0.2
"""What the median step may take in the slowest process."""


def main() -> None:
    """Run it, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="of the global batch")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--worker", type=Path, nargs=3, metavar=("CONFIG", "WORK", "OUTPUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), arguments.processes, arguments.rows, arguments.steps)
    for rank, figures in enumerate(found):
        print(f"rank {rank}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    slowest = {name: max(each[name] for each in found) for name in found[0]}
    is_kept = slowest["cpu_ms_median"] <= MOST_MS and slowest["waits_median"] == 0
    print(
        f"control of a step, {arguments.processes} processes, {arguments.rows} rows, slowest rank: median "
        f"{slowest['cpu_ms_median']:.3f} ms of CPU time, {slowest['waits_median']:g} waits (at most {MOST_MS} and 0: "
        f"{'yes' if is_kept else 'NO'}), mean {slowest['cpu_ms_mean']:.3f} ms and {slowest['waits_mean']:.2f} waits; "
        f"median of wall time {slowest['wall_ms_median']:.3f} ms"
    )
    sizes = {"processes": arguments.processes, "rows": arguments.rows, "steps": arguments.steps}
    save_result("control", {**sizes, "most_ms": MOST_MS, "is_kept": is_kept, "slowest": slowest, "ranks": found})
    sys.exit(0 if is_kept else 1)


def measure(folder: Path, processes: int, rows: int, steps: int) -> list[dict[str, float]]:
    """Train in processes of their own; the figures of each rank."""
    from zero2all.common.workspace import open_workspace
    from zero2all.config import config_from_values, config_yaml

    work = open_workspace(folder / "work", create=True)
    write_data(work)
    values = {
        "model": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "max_seq_len": 32,
        },
        "data": {"seq_len": 32, "mixture": {"one": 3, "two": 1}},
        "train": {"name": "run", "steps": steps, "tokens_per_step": 32 * rows, "micro_batch_samples": 16},
        "schedule": {"warmup_steps": 10},
        "checkpoint": {"every_steps": 0},
        "validation": {"every_steps": 0, "tokens_per_source": 128},
        "parallel": {"device": "cpu", "cpu_threads": 1},
    }
    config = folder / "config.yaml"
    config.write_text(config_yaml(config_from_values(values, "of the benchmark")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = []
    for rank in range(processes):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment = {**os.environ, **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--worker", str(config), str(work.root), str(folder / f"{rank}.json")]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in started]
    if any(codes):
        sys.exit("a process of the run has failed")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def write_data(work: Any) -> None:
    """Two sources of random words, packed into shards of 2,000 tokens."""
    from zero2all.corpus import BuildOptions, Source, build_corpus
    from zero2all.packed.writer import PackOptions, pack_corpus
    from zero2all.tokenizer.config import TokenizerConfig
    from zero2all.tokenizer.stage import train_on_corpus

    rng = random.Random(0)
    work.raw.mkdir()
    sources = []
    for name in ("one", "two"):
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(200)]
        texts = [" ".join(rng.choices(words, k=rng.randint(30, 90))) for _ in range(400)]
        path = work.raw / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(Source(name, path, "en"))
    build_corpus(work.corpus, sources, BuildOptions(valid_share=0.1, rules="none"))
    train_on_corpus(work.corpus, work.tokenizer, TokenizerConfig(vocab_size=400))
    pack_corpus(work.corpus, work.tokenizer, work.packed, PackOptions(shard_tokens=2000))


def worker(config: Path, work: Path, output: Path) -> None:
    """In a process of its own: one rank of the run, with its control timed."""
    from zero2all.common.workspace import Workspace
    from zero2all.config import load_config
    from zero2all.train.hooks.anneal import Anneal
    from zero2all.train.hooks.guards import Guards
    from zero2all.train.run import train
    from zero2all.train.trainer import Trainer

    steps: list[list[float]] = []

    def timed(owner: type, name: str, begins_step: bool = False) -> None:
        method: Callable[..., Any] = getattr(owner, name)

        def measured(*arguments: Any) -> Any:
            if begins_step:
                steps.append([0.0, 0.0, 0.0])
            before = counters()
            try:
                return method(*arguments)
            finally:
                steps[-1] = [sum(each) for each in zip(steps[-1], spent(before, counters()), strict=True)]

        setattr(owner, name, measured)

    timed(Trainer, "plan", begins_step=True)
    timed(Guards, "observe")
    timed(Anneal, "has_news")
    train(load_config(config), Workspace(work))
    figures = {}
    for name, values in zip(("cpu_ms", "wall_ms", "waits"), zip(*steps[WARMUP_STEPS:], strict=True), strict=True):
        figures[f"{name}_median"] = statistics.median(values)
        figures[f"{name}_mean"] = statistics.mean(values)
        figures[f"{name}_p99"] = statistics.quantiles(values, n=100)[98]
    output.write_text(json.dumps(figures))


def counters() -> tuple[float, float, float]:
    """Of this thread: milliseconds of CPU time and of wall time, and how often it waited."""
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 1e3 * time.thread_time(), 1e3 * time.perf_counter(), float(waits)


def spent(before: tuple[float, ...], after: tuple[float, ...]) -> list[float]:
    """The difference of two readings."""
    return [end - start for start, end in zip(before, after, strict=True)]


if __name__ == "__main__":
    main()
