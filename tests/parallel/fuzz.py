"""Random models on random meshes: each is refused with the rule that it breaks, or trains like one process.

`main` runs in each process of a group; all cases of one number of processes share it.
"""

from __future__ import annotations

import json
import random
import resource
import sys
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parallel import layouts
from tests.processes import Program, WarmProcess
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig, config_from_values
from zero2all.parallel.check import check_spread
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.world import World

STEPS = 2
PROCESSES = (1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 8)
CODE = "from tests.parallel import fuzz; fuzz.main()"
SECONDS = 120
"""How long a process waits for another, which may have failed."""
Case = dict[str, Any]


def draw_case(rng: random.Random) -> Case:
    """One combination. Most sizes divide, so that about half of the cases break no rule."""
    heads = rng.choice((2, 4, 4, 6))
    model: Case = {
        "vocab_size": rng.choice((40, 60, 100)),
        "hidden_size": heads * rng.choice((4, 8)),
        "heads": heads,
        "kv_heads": rng.choice([kv for kv in (1, 2, 3, 4) if heads % kv == 0]),
        "intermediate_size": rng.choice((12, 16, 24)),
        "layers": rng.randint(1, 6),
        "tied_embeddings": rng.random() < 0.2,
        "attention_bias": rng.choice(("none", "none", "qkv", "all")),
    }
    if rng.random() < 0.3:
        model["moe"] = {
            "experts": rng.choice((2, 4, 6)),
            "experts_per_token": rng.choice((1, 2)),
            "expert_size": 8,
            "shared_experts": rng.choice((0, 1)),
            "dense_layers": rng.choice((0, 0, 1)),
        }
    processes = rng.choice(PROCESSES)
    train = {"micro_batch_samples": rng.randint(1, 4), "recompute": rng.choice(("none", "none", "full", "selective"))}
    optimizer = rng.choice(("adamw", "adamw", "adamw", "muon"))
    documents = rng.random() < 0.3
    parallel = draw_parallel(rng, processes)
    if "moe" not in model and rng.random() < 0.95:
        parallel["expert"] = 1
    if parallel["pipeline"] > 1 and rng.random() < 0.8:
        model["tied_embeddings"] = False
    if parallel["tensor"] > 1 and rng.random() < 0.8:
        optimizer = "adamw"
    return {
        "processes": processes,
        "values": {
            "data": {"seq_len": layouts.SEQ_LEN, "document_mask": documents},
            "model": {"max_seq_len": layouts.SEQ_LEN, **model},
            "train": {**train, "tokens_per_step": layouts.SAMPLES * layouts.SEQ_LEN, "precision": "float64", "seed": 3},
            "optim": {"kind": optimizer},
            "parallel": parallel,
        },
    }


def draw_parallel(rng: random.Random, processes: int) -> Case:
    """A mesh: every axis that the config has."""
    left, found = processes, {}
    for axis in rng.sample(("pipeline", "context", "tensor"), 3):
        fitting = [size for size in (1, 1, 2, 2, 3, 4) if left % size == 0]
        found[axis] = rng.choice(fitting if rng.random() < 0.95 else (2, 3))
        left = max(1, left // found[axis])
    zero = rng.choice((0, 1, 1, 2, 3))
    schedule = rng.choice(("gpipe", "1f1b", "interleaved", "zero_bubble"))
    found |= {
        "zero": zero,
        "shard": rng.choice(("auto", *(size for size in (1, 2, 4) if left % size == 0))) if zero else "auto",
        "expert": rng.choice((1, 1, 1, 2, 4)),
        "schedule": schedule,
        "chunks": 2 if schedule == "interleaved" else 1,
        "context_method": rng.choice(("auto", "ulysses", "gather")),
        "copy_kv_heads": rng.random() < 0.5,
        "bucket_mb": 0.002,
    }
    known = {field.name for field in fields(ParallelConfig)}
    return {name: value for name, value in found.items() if name in known}


def draw_cases(count: int, seed: int = 0) -> dict[str, Case]:
    """The same cases for the same seed."""
    rng = random.Random(seed)
    return {str(number): draw_case(rng) for number in range(count)}


def outcome(case: Case, world: World) -> Case:
    """Why it was refused, or the losses and gradient norms of a few steps."""
    try:
        config = config_from_values(case["values"], "of a test")
        check_spread(config, world.size)
    except UsageError as error:
        return {"refused": str(error)}
    return {"figures": figures_of(config, world)}


def figures_of(config: RunConfig, world: World) -> list[tuple[float, float]]:
    """Losses and gradient norms."""
    world = layouts.world_of(world, config.parallel)
    state = layouts.make_state(world, config)
    state.micro_batch_samples = int(config.train.micro_batch_samples)
    return [layouts.step_on(state, world, config, step) for step in range(STEPS)]


def alone(case: Case) -> list[tuple[float, float]]:
    """The same of one process."""
    config = config_from_values({**case["values"], "parallel": {}}, "of a test")
    return figures_of(replace(config, parallel=ParallelConfig()), World())


def main() -> None:
    """RANK SIZE STORE OUT CASES (a file with cases by name)."""
    rank, size, store, out, cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    torch.set_num_threads(1)
    # Every case makes groups, and DTensor keeps their names, so none is destroyed before the end.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wait = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=wait)
    world = World(rank, size, control=dist.group.WORLD)
    found: dict[str, Case] = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        try:
            found[name] = outcome(case, world)
        except Exception as error:  # the group may be broken now: what is left of the cases is not tried
            print(f"case {name}: {json.dumps(case)}", flush=True)
            raise error
        finally:
            if rank == 0:
                Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def run(warm: WarmProcess, folder: Path, size: int, cases: dict[str, Case]) -> dict[str, Case]:
    """The outcomes of cases of one number of processes."""
    folder.mkdir(parents=True, exist_ok=True)
    asked, out = folder / "cases.json", folder / "out.json"
    asked.write_text(json.dumps(cases))
    words = [str(size), str(folder / "store"), str(out), str(asked)]
    programs = [Program(warm, CODE, [str(rank), *words], folder / f"{rank}.txt") for rank in range(size)]
    codes = [program.wait() for program in programs]
    assert codes == [0] * size, "\n".join(program.text() for program in programs)
    found: dict[str, Case] = json.loads(out.read_text())
    return found
