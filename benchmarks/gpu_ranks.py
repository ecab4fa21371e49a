"""Real NCCL ranks on one GPU: every way of spreading a model against one rank, with our kernels, in bf16 and fp8.

    python benchmarks/gpu_ranks.py --ranks 2,4            4 layers of z2all-100m, 12 steps each: minutes on an H200
    python benchmarks/gpu_ranks.py --ranks 2 --only ZeRO-1
    python benchmarks/gpu_ranks.py --axes --ranks 2,4,8 --result gpu_axes      tensor, pipeline, context, experts
    python benchmarks/gpu_ranks.py --axes --ranks 2,4 --config benchmarks/z2all-1b-adamw.yaml --batch 4x2048x8 \
        --only pipeline --result gpu_pipeline_ranks --model.layers 8      peaks of every rank beside its estimate

NCCL refuses two ranks on one card only when they claim the same host, so each process gets a host id of its own and
they are joined by sockets: a slow link, on which overlap shows. Losses are compared step by step with those of one
rank; step times with and without overlap; a trace of one step says how much communication lay under other kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

from benchmarks.machine import machine, save_result
from zero2all.common.files import read_json, write_json
from zero2all.config import RunConfig, load_config
from zero2all.estimate.memory import estimate_memory
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.mesh import make_mesh
from zero2all.parallel.parameter_table import draw
from zero2all.parallel.world import World, join_world
from zero2all.predict.batch import parse_batch
from zero2all.train.build import empty_state, op_context
from zero2all.train.micro_batch import memory_settings
from zero2all.train.state import DTYPES, TrainState
from zero2all.train.train_step import StepPlan, train_step

STEPS, ROWS, SEQ_LEN, MICRO, LEARNING_RATE = 12, 128, 2048, 32, 3e-5
FIGURES = ("step_seconds", "peak_gb", "estimated_gb")
OVERLAP_STEPS, OVERLAP_ROWS = 8, 256
CHECKED_STEPS = 4
TIMED_FROM = 3
SMALLER = ["--model.vocab_size", "16000", "--model.layers", "4", "--train.precision", "bfloat16"]
"""Less to send, because the link is slow."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {"zero": 0},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2": {"zero": 2},
    "ZeRO-3": {"zero": 3},
    "hybrid ZeRO-1": {"zero": 1, "shard": 2},
    "hybrid ZeRO-3": {"zero": 3, "shard": 2},
}
MOE = ["--model.moe.experts", "8", "--model.moe.expert_size", "512", "--model.moe.shared_experts", "1"]
AXES: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor": 2},
    "tensor 4": {"tensor": 4},
    "pipeline 2": {"pipeline": 2},
    "pipeline 2, interleaved": {"pipeline": 2, "schedule": "interleaved", "chunks": 2},
    "pipeline 2, zero_bubble": {"pipeline": 2, "schedule": "zero_bubble"},
    "pipeline 4": {"pipeline": 4},
    "pipeline 4, interleaved": {"pipeline": 4, "schedule": "interleaved", "chunks": 2},
    "pipeline 4, zero_bubble": {"pipeline": 4, "schedule": "zero_bubble"},
    "pipeline 4, gpipe": {"pipeline": 4, "schedule": "gpipe"},
    "context 2, ulysses": {"context": 2, "context_method": "ulysses"},
    "context 2, gather": {"context": 2, "context_method": "gather"},
    "context 4, ulysses": {"context": 4, "context_method": "ulysses"},
    "context 4, gather": {"context": 4, "context_method": "gather"},
    "expert 2": {"expert": 2, "zero": 1},
    "expert 4": {"expert": 4, "zero": 1},
    "tensor 2 x pipeline 2 x shard 2": {"tensor": 2, "pipeline": 2, "zero": 1},
}
LINEARS: tuple[Literal["auto", "fp8"], ...] = ("auto", "fp8")


def main() -> None:
    """Parse, start the ranks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="z2all-100m")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes")
    parser.add_argument("--only", default="", help="layouts whose name has this, or `overlap`")
    parser.add_argument("--batch", default="2x512x4", help="with --axes: samples of a pass x tokens x passes")
    parser.add_argument("--axes", action="store_true", help="tensor, pipeline, context and experts, in bf16")
    parser.add_argument("--result", default="gpu_ranks")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.rank_of:
        run_rank(arguments, overrides)
        return
    counts = [*([] if arguments.only == "overlap" else [1]), *(int(word) for word in arguments.ranks.split(","))]
    results = {str(count): start_ranks(count) for count in counts}
    rows = table(results)
    for row in rows:
        print("  ".join(f"{value!s:>14}" for value in row))
    save_result(arguments.result, {"machine": machine(), "steps": STEPS, "results": results})


def start_ranks(count: int) -> dict[str, Any]:
    """Run this program in `count` processes; what rank 0 wrote."""
    out = Path(os.environ.get("OUT", ".")) / f"ranks-{count}.json"
    out.unlink(missing_ok=True)  # of an earlier call
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    shared |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, *sys.argv, "--rank-of", str(out)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"})
        for rank in range(count)
    ]
    codes = [process.wait() for process in processes]
    found = read_json(out) if out.exists() else {}  # --only may leave this number of ranks no case
    return {"failed": codes, **found} if any(codes) else dict(found)


def run_rank(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """All cases of one number of ranks, in one process of them."""
    config = load_config(arguments.config, [*SMALLER, "--parallel.bucket_mb", "16"])
    found: dict[str, Any] = {}

    def note(name: str, values: dict[str, Any]) -> None:
        found[name] = values
        if world.is_first:
            print(world.size, name, {key: value for key, value in values.items() if key != "losses"}, flush=True)
            write_json(Path(arguments.rank_of), found)

    with join_world(torch.device("cuda", 0), config.parallel) as world:
        if arguments.axes:
            for name, fields in AXES.items() if world.size > 1 else [("one", {}), ("one, experts", {})]:
                asked = math.prod(fields.get(axis, 1) for axis in ("tensor", "pipeline", "context"))
                asked *= fields.get("expert", 2 if "zero" in fields else 1)
                if (asked == world.size or world.size == 1) and (arguments.only in name or world.size == 1):
                    words = [*SMALLER[:2], "--train.precision", "bfloat16", *(MOE if "expert" in name else [])]
                    of_axes = load_config(arguments.config, [*words, "--parallel.bucket_mb", "16", *overrides])
                    batch = parse_batch(arguments.batch)
                    rows = batch.samples * batch.accumulation
                    of_axes = spread(of_axes, "auto", fields, batch.seq_len, rows)
                    note(name, train(of_axes, world, STEPS, batch.samples, rows))
            return
        layouts = {name: fields for name, fields in LAYOUTS.items() if fields.get("shard", 1) < world.size}
        for linear in LINEARS:
            for name, fields in layouts.items() if world.size > 1 else [("one", {})]:
                is_asked = arguments.only in name or world.size == 1  # one rank is what the others are compared with
                if is_asked and not (fields.get("zero") == 3 and linear == "fp8"):
                    note(f"{name}, {linear}", train(spread(config, linear, fields), world))  # ZeRO-3 refuses fp8
        if world.size == 2 and arguments.only in ("", "overlap"):
            for overlap in (True, False):
                case = spread(config, "auto", {"zero": 0, "overlap": overlap})
                one_pass = OVERLAP_ROWS // world.size
                note(f"overlap {overlap}", train(case, world, OVERLAP_STEPS, one_pass, OVERLAP_ROWS, overlap))
            torch.use_deterministic_algorithms(True)
            for overlap in (True, False):
                case = spread(config, "auto", {"zero": 1, "overlap": overlap})
                note(f"deterministic, overlap {overlap}", train(case, world, CHECKED_STEPS))
            same = found["deterministic, overlap True"]["losses"] == found["deterministic, overlap False"]["losses"]
            note("deterministic", {"same bits with and without overlap": same})


def spread(
    config: RunConfig,
    linear: Literal["auto", "fp8"],
    fields: dict[str, Any],
    seq_len: int = SEQ_LEN,
    rows: int = ROWS,
) -> RunConfig:
    """The config with other operators, spread another way."""
    parallel, ops = dataclasses.replace(config.parallel, **fields), dataclasses.replace(config.ops, linear=linear)
    data = dataclasses.replace(config.data, seq_len=seq_len, document_mask=False)
    batch = dataclasses.replace(config.train, tokens_per_step=rows * seq_len)
    return dataclasses.replace(config, parallel=parallel, ops=ops, data=data, train=batch)


def train(
    config: RunConfig,
    world: World,
    steps: int = STEPS,
    micro: int = MICRO,
    rows: int = ROWS,
    is_traced: bool = False,
) -> dict[str, Any]:
    """Some steps, on the same tokens for every layout."""
    if world.size > 1:
        mesh = make_mesh(config.parallel.sizes(world.size))
        world = dataclasses.replace(world, mesh=mesh)
    dtype, is_sharded = DTYPES[config.train.precision], config.parallel.zero == 3 and world.size > 1
    ops = resolve(config.ops, op_context(config, "cuda", dtype, is_sharded))
    state = empty_state(config, world, ops)
    state.micro_batch_samples = micro
    with state.weights.masters_between_steps() as masters:
        draw(masters, state.model.config, 1)
    state.weights.publish_masters()
    torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        losses.append(one_step(state, config, world, step, rows))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    estimate = estimate_memory(config.model, memory_settings(config, ops, world.mesh, micro)).step_peak
    peaks, estimates = world.gather(torch.cuda.max_memory_allocated()), world.gather(estimate)
    found: dict[str, Any] = {
        "losses": losses,
        "step_seconds": round(statistics.median(seconds[TIMED_FROM:]), 4),
        "peak_gb": round(max(peaks) / 1e9, 2),
        "estimated_gb": round(max(estimates) / 1e9, 2),
        "peaks": [round(peak / 1e9, 4) for peak in peaks],  # of every rank, and its own estimate
        "estimates": [round(each / 1e9, 4) for each in estimates],
    }
    if is_traced:
        found["trace"] = traced(state, config, world, rows)
    del state
    torch.cuda.empty_cache()
    return found


def one_step(state: TrainState, config: RunConfig, world: World, step: int, rows: int) -> float:
    """One optimizer step on this rank's rows; the loss of all."""
    axis = world.mesh.batch
    batch = batch_of(step, rows, config.data.seq_len, config.model.vocab_ids, axis.rank, axis.size)
    return train_step(state, batch, 1, config, world, StepPlan(LEARNING_RATE)).result().loss


def batch_of(step: int, rows: int, seq_len: int, vocabulary: int, rank: int, ranks: int) -> Batch:
    """Tokens of which few are frequent, so that there is something to learn."""
    drawn = np.random.default_rng(step).pareto(1.2, (rows, seq_len + 1)) * 20
    tokens = np.minimum(drawn.astype(np.int64), vocabulary - 1)
    first, own, _ = rank_rows(rows, rank, ranks)
    channels = np.zeros(own, dtype=np.int64)
    return Batch(tokens[first : first + own], channels, channels, 0, step_samples=rows, samples=own, first_row=first)


def traced(state: TrainState, config: RunConfig, world: World, rows: int) -> dict[str, Any]:
    """Of one step: when each collective ran, and how much of that lay under other kernels of the backward pass."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        one_step(state, config, world, STEPS, rows)
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.time_range.end > event.time_range.start
    ]
    sent = sorted((start, end, name) for start, end, name in kernels if "ncclDevKernel" in name)
    others = [(start, end) for start, end, name in kernels if "nccl" not in name.lower() and "Memcpy" not in name]
    # Large ones: counts and figures are sums of a few numbers. The update begins after the last gradient has arrived.
    large = [each for each in sent if each[1] - each[0] > 500]
    each = []
    for start, end, name in large:
        share = _covered(start, end, others) / (end - start)
        each.append({"name": name[:40], "milliseconds": round((end - start) / 1e3, 2), "share": round(share, 2)})
    total = sum(one["milliseconds"] for one in each)
    under = sum(one["milliseconds"] * one["share"] for one in each)
    return {
        "collectives": len(each),
        "milliseconds": total,
        "share_under_kernels": round(under / max(total, 1e-9), 3),
        "each": each,
    }


def _covered(start: float, end: float, others: list[tuple[float, float]]) -> float:
    """How much of a span lies under other kernels."""
    total, at = 0.0, start
    for first, last in sorted(others):
        first, last = max(first, at), min(last, end)
        if last > first:
            total, at = total + last - first, last
    return total


def table(results: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Layout by layout: the largest difference of the loss to one rank, the step time, and peak memory."""
    rows: list[tuple[Any, ...]] = [("ranks", "layout", "loss differs", "step s", "peak GB", "estimated")]
    alone = results.get("1", {})
    for count, cases in results.items():
        for name, each in ((name, each) for name, each in cases.items() if name != "failed"):
            reference = alone.get(f"one, {name.rpartition(', ')[2]}") or alone.get(
                "one, experts" if "expert" in name else "one"
            )
            if reference is not None and "losses" in each:
                differs = max(abs(a - b) / b for a, b in zip(each["losses"], reference["losses"], strict=True))
                rows.append((count, name, f"{differs:.1e}", *(each[key] for key in FIGURES)))
    return rows


if __name__ == "__main__":
    main()
