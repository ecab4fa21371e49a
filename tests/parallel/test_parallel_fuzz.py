"""Layout fuzz (`make layouts`): 200 random models on random meshes, with random schedules and micro-batches. Each is
refused with the rule that it breaks, or trains like one process."""

import itertools
import random
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.parallel import layouts
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig, config_from_values
from zero2all.parallel.check import check_spread
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.world import World

COUNT = 200
STEPS = 2
PROCESSES = (1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 8)
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


def outcome(world: World, values: Case, processes: int) -> Case:
    """Why it was refused, or the losses and gradient norms of a few steps."""
    try:
        config = config_from_values(values, "of a test")
        check_spread(config, processes)
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


def test_cases_are_the_same_for_a_seed_and_reach_every_axis():
    cases = draw_cases(COUNT)
    assert cases == draw_cases(COUNT)
    for axis in ("pipeline", "context", "tensor", "expert"):
        sizes = {case["values"]["parallel"][axis] for case in cases.values()}
        assert sizes >= {1, 2, 4}, axis


@pytest.mark.slow
def test_every_random_combination_is_equal_to_one_process_or_refused_by_a_rule(warm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1800.0)
    cases = draw_cases(COUNT)
    counts: Counter[str] = Counter()
    worst = 0.0
    for size in sorted(set(PROCESSES)):
        of_size = {name: case for name, case in cases.items() if case["processes"] == size}
        found = layouts.run(warm, tmp_path / str(size), size, of_size)
        assert found.keys() == of_size.keys()
        for name, outcome in found.items():
            if "refused" in outcome:
                assert "1. " in outcome["refused"], f"no rule: {outcome['refused']}"
                counts["refused"] += 1
                continue
            counts["equal"] += 1
            exact = alone(of_size[name])
            for mine, theirs in zip(itertools.chain(*outcome["figures"]), itertools.chain(*exact), strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9), (name, of_size[name])
                worst = max(worst, abs(mine - theirs) / abs(theirs))
    with capsys.disabled():
        print(f"\n{COUNT} random layouts: {dict(counts)}, largest relative difference {worst:.1e}")
    assert counts["equal"] >= COUNT // 4
