"""Real NCCL ranks on one GPU: every way of spreading a model against one rank, with our kernels, in bf16 and fp8.

    python benchmarks/gpu_ranks.py --ranks 2,4            4 layers of z2all-100m, 12 steps each: minutes on an H200
    python benchmarks/gpu_ranks.py --ranks 2 --only ZeRO-1
    python benchmarks/gpu_ranks.py --axes --ranks 2,4,8 --result gpu_axes      tensor, pipeline, context, experts
    python benchmarks/gpu_ranks.py --axes --ranks 2,4 --config benchmarks/z2all-1b-adamw.yaml --batch 4x2048x8 \
        --only pipeline --result gpu_pipeline_ranks --model.layers 8      peaks of every rank beside its estimate
    python benchmarks/gpu_ranks.py --inference --result inference_ranks       the engine: tensor 2, 4 and pipeline 2
    python benchmarks/gpu_ranks.py --inference --device cpu --result inference_ranks_cpu        the same on CPU ranks

NCCL refuses two ranks on one card only when they claim the same host, so each process gets a host id of its own and
they are joined by sockets: a slow link, on which overlap shows. Losses are compared step by step with those of one
rank; step times with and without overlap; a trace of one step says how much communication lay under other kernels.

With --inference a model with random weights, large enough that it has preferences, is written as a run; each layout
reads its checkpoint and continues the same prompts greedily. In float32 the texts have to be those of one process; in
bfloat16, where sums over ranks are rounded in another order, the equal ones are counted. The memory of every rank is
compared with the estimate that `z2a generate --parallel.tensor 2` prints: on a GPU the peak of what torch allocated; on
a CPU, in float32 alone, how much the resident memory has grown, with every page of the cache touched, and with a malloc
that gives back at once what is freed. A small model goes before, so that libraries are in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import psutil
import torch

from benchmarks.machine import machine, save_result
from zero2all.common.files import read_json, write_json
from zero2all.common.progress import show_log
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, load_config
from zero2all.estimate.memory import estimate_memory
from zero2all.exchange import export_run, import_folder
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Job, Request
from zero2all.infer.load import READY_OPS, LoadedModel, empty_model, load_model
from zero2all.infer.spread import RankMemory, SpreadEngine, follow, make_engine, rank_memory
from zero2all.model.config import ModelConfig
from zero2all.ops.registry import resolve
from zero2all.packed.loader import Batch, rank_rows
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.device import pick_device, set_cpu_threads
from zero2all.parallel.mesh import make_mesh
from zero2all.parallel.parameter_table import draw, init_weights
from zero2all.parallel.world import World, join_world
from zero2all.predict.batch import parse_batch
from zero2all.tokenizer import load_tokenizer, train_tokenizer
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
    parser.add_argument("--inference", action="store_true", help="the engine over ranks, against one process")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="with --inference")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--layout", default="", help=argparse.SUPPRESS)
    arguments, overrides = parser.parse_known_args()
    if arguments.rank_of and arguments.inference:
        write_texts(arguments)
        return
    if arguments.inference:
        sys.exit(compare_inference(arguments))
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
    codes = [process.wait() for process in ranks_of(count, [*sys.argv, "--rank-of", str(out)])]
    found = read_json(out) if out.exists() else {}  # --only may leave this number of ranks no case
    return {"failed": codes, **found} if any(codes) else dict(found)


def ranks_of(count: int, words: list[str], on_cpu: bool = False) -> list[subprocess.Popen[bytes]]:
    """`count` processes of one group, which run this program with these words."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    shared |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    shared |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_ARENA_MAX": "1"} if on_cpu else {}
    own = [{"RANK": str(rank), "NCCL_HOSTID": f"host{rank}"} for rank in range(count)]
    if on_cpu:
        own = [{**each, "LOCAL_RANK": each["RANK"], "LOCAL_WORLD_SIZE": str(count)} for each in own]
    return [subprocess.Popen([sys.executable, *words], env={**os.environ, **shared, **each}) for each in own]


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


# The engine over ranks.


INFERENCE = {"one process": (1, 1), "tensor 2": (2, 1), "tensor 4": (4, 1), "pipeline 2": (1, 2)}
MODELS = {
    "cpu": {"hidden_size": 768, "intermediate_size": 3072, "layers": 12, "heads": 12, "kv_heads": 4},
    "cuda": {"hidden_size": 1536, "intermediate_size": 4096, "layers": 16, "heads": 12, "kv_heads": 4},
}
CACHE_BYTES = {"cpu": 600_000_000, "cuda": 3_000_000_000}
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, MOST_OFF = 8, 48, 64, 0.03
RUN, SMALL_RUN = "random", "small"
SMALL = {"hidden_size": 96, "intermediate_size": 128, "layers": 4, "heads": 12, "kv_heads": 4}


def compare_inference(arguments: argparse.Namespace) -> int:
    """Write the model, start every layout, compare; all at once on a GPU."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="z2a-ranks-") as place:
        work = Path(place)
        write_random_run(work, SMALL, SMALL_RUN)
        parameters = write_random_run(work, MODELS[arguments.device], RUN)
        print(f"{parameters / 1e6:.0f} M parameters written after {time.perf_counter() - started:.0f} s", flush=True)
        codes: dict[str, list[int]] = {}
        waiting: dict[str, list[subprocess.Popen[bytes]]] = {}
        for name, (tensor, pipeline) in INFERENCE.items():
            out = str(work / f"{tensor}-{pipeline}.json")
            words = [*sys.argv, "--rank-of", out, "--layout", f"{tensor},{pipeline},{work}"]
            waiting[name] = ranks_of(tensor * pipeline, words, arguments.device == "cpu")
            if arguments.device == "cpu":
                codes[name] = [process.wait() for process in waiting[name]]
        codes |= {name: [process.wait() for process in processes] for name, processes in waiting.items()}
        if any(map(any, codes.values())):
            print(f"failed: {codes}")
            return 1
        found = {name: read_json(work / f"{tensor}-{pipeline}.json") for name, (tensor, pipeline) in INFERENCE.items()}
    is_right = True
    for name, of_layout in found.items():
        for dtype, case in of_layout.items():
            texts = found["one process"][dtype]["texts"]
            case["equal"] = sum(one == other for one, other in zip(case["texts"], texts, strict=True))
            off = [peak / sum(estimate) - 1 for peak, estimate in zip(case["peaks"], case["estimates"], strict=True)]
            case["off"] = max(off, key=abs)
            print(f"{name:12} {dtype:9} greedy texts equal: {case['equal']} of {PROMPTS}", end="; ")
            print(f"GB of a rank {[round(peak / 1e9, 4) for peak in case['peaks']]}, estimated", end=" ")
            print(f"{[round(sum(each) / 1e9, 4) for each in case['estimates']]}: {100 * case['off']:+.1f} %", end="; ")
            print(f"{case['seconds']:.1f} s")
            is_right &= dtype != "float32" or case["equal"] == PROMPTS
            is_right &= name == "one process" or abs(case["off"]) <= MOST_OFF
    for of_layout in found.values():
        for case in of_layout.values():
            del case["texts"]
    facts = {"parameters": parameters, "prompts": PROMPTS, "new": NEW_TOKENS, "cache": CACHE_BYTES[arguments.device]}
    save_result(arguments.result, {**facts, "right": is_right, "layouts": found})
    print(f"{'right' if is_right else 'WRONG'}, {time.perf_counter() - started:.0f} s in all")
    return 0 if is_right else 1


def write_random_run(work: Path, shape: dict[str, Any], name: str) -> int:
    """A run with random weights, five times as large as usual; returns its parameters."""
    tokenizer_folder, exported = work / "tokenizer", work / f"exported-{name}"
    texts = [f"hello world, {number} 中国的首都是北京。def f(x):" for number in range(200)]
    train_tokenizer(texts, 300, tokenizer_folder, RUN)
    tokenizer = load_tokenizer(tokenizer_folder)
    config = ModelConfig(4096, **shape, max_seq_len=512, init_std=0.1)
    model = empty_model(config, READY_OPS, torch.device("cpu"), torch.float32)
    init_weights(model, 1)
    with torch.no_grad():
        model.head_weight[list(tokenizer.end_ids)] = 0  # no text ends early
    loaded = LoadedModel(name, 0, model, tokenizer)
    export_run(loaded, tokenizer_folder, exported)
    import_folder(exported, Workspace(work / "workspace"), name)
    shutil.rmtree(exported)
    return loaded.parameters


def write_texts(arguments: argparse.Namespace) -> None:
    """A rank: the greedy texts, and its memory beside the estimate, in each dtype."""
    words = arguments.layout.split(",", 2)
    tensor, pipeline, work = int(words[0]), int(words[1]), Path(words[2])
    on_gpu = arguments.device == "cuda"
    config = ParallelConfig(tensor=tensor, pipeline=pipeline, device=arguments.device)
    set_cpu_threads(None, None)
    draw_ids = np.random.default_rng(7)
    prompts = [draw_ids.integers(10, 300, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    # Few rows at a time: the working space of a long prompt would be most of the memory of so small a model.
    settings = EngineSettings(max_batch=PROMPTS, cache_bytes=CACHE_BYTES[arguments.device], prefill_tokens=64)
    found: dict[str, Any] = {}
    with join_world(pick_device(arguments.device), config) as world:
        several = world if world.size > 1 else None
        cases = [(SMALL_RUN, "float32"), (RUN, "float32"), *([(RUN, "bfloat16")] if on_gpu else [])]
        for name, dtype in cases:
            memory = Memory(world.device)
            started = time.perf_counter()
            source = Workspace(work / "workspace")
            loaded = load_model(name, source, device=world.device, dtype=dtype, world=several)
            texts: list[list[int]] = []
            if world.is_first:
                engine = make_engine(loaded, settings)
                jobs = [engine.submit(Request(ids, NEW_TOKENS)) for ids in prompts]
                while not all(job.finish for job in jobs):
                    engine.step()
                texts = [job.new_ids for job in jobs]
                world.broadcast(None) if several else None
            else:
                follow(loaded)
            peaks, estimates = world.gather(memory.grown), world.gather(memory.estimates)
            by_stage = [estimates[0][rank // tensor] for rank in range(world.size)]
            seconds = time.perf_counter() - started
            found[dtype] = {"texts": texts, "peaks": peaks, "estimates": by_stage, "seconds": round(seconds, 1)}
            memory.restore()
            del loaded
            engine = None  # type: ignore[assignment]
            torch.cuda.empty_cache() if on_gpu else None
        if world.is_first:
            write_json(Path(arguments.rank_of), found)


class Memory:
    """How much the memory of this process grows until the last step of its engine, and what was estimated."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._step, self.grown = device, Engine.step, 0
        self.estimates: list[RankMemory] = []
        torch.nn.functional.linear(torch.ones(64, 512), torch.ones(512, 512))  # threads and libraries are there
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._before = self._now()

        def step(engine: Engine) -> list[Job]:
            if not self.estimates:
                sizes = loaded_sizes(engine)
                self.estimates = [rank_memory(engine, sizes, stage) for stage in range(sizes.pipeline)]
                engine.blocks.keys.zero_()  # a CPU takes pages when they are first written
                engine.blocks.values.zero_()
            grown = self._step(engine)
            self.grown = max(self.grown, self._now() - self._before)
            return grown

        Engine.step = step  # type: ignore[method-assign, assignment]

    def restore(self) -> None:
        """Steps are not looked at any more."""
        Engine.step = self._step  # type: ignore[method-assign]

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return int(psutil.Process().memory_info().rss)


def loaded_sizes(engine: Engine) -> MeshSizes:
    """The layout of an engine."""
    return engine._mesh.sizes if isinstance(engine, SpreadEngine) else MeshSizes()


if __name__ == "__main__":
    show_log()
    main()
