"""`make layouts`: every axis alone and in combinations against one process, every layout resumed from every other, and
random models on random meshes.

In float64 only the order of sums differs, so losses and gradient norms agree to many digits. Every layout is run with

    plain       4 micro-batches of 2 rows, or fewer where rows are spread
    documents   attention masked at document borders, and a z loss
    tied        one matrix for embedding and head, blocks computed again; `-` where the layout refuses it
    7 rows      rows that do not divide: some processes have rows of padding
    qk_norm     query and key heads are normalised, with weights that every process has whole; so is the embedding
"""

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.parallel import layouts
from tests.parallel.layouts import MOE
from zero2all.config import config_from_values
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.world import World

Case = dict[str, Any]
VARIANTS: dict[str, Case] = {
    "plain": {},
    "documents": {"documents": True, "z_loss": 1e-3},
    "tied": {"tied": True, "recompute": "full"},
    "7 rows": {"samples": 7},
    "qk_norm": {"qk_norm": True},
}
ONE_KV_HEAD, BIASES = {"kv_heads": 1}, {"attention_bias": "all", "mlp_bias": True}
GATHER = {"context": 2, "context_method": "gather"}
SPECIAL: dict[int, dict[str, Case]] = {
    2: {
        "tensor, biases, selective": {"tensor": 2, "recompute": "selective", "model": BIASES},
        "tensor, offloaded optimizer": {"tensor": 2, "offload": "optimizer"},
        "ZeRO-3, muon": {"zero": 3, "optimizer": "muon"},
        "pipeline, 9 blocks, muon": {"pipeline": 2, "optimizer": "muon", "model": {"layers": 9}},
        "gather, one kv head, selective": {**GATHER, "model": ONE_KV_HEAD, "recompute": "selective"},
        "tensor, copied kv head, qk_norm": {
            **{"tensor": 2, "copy_kv_heads": True, "recompute": "selective"},
            **{"model": {**ONE_KV_HEAD, "qk_norm": True, "init_std": None, "init_residual": "zero"}},
        },
    },
    4: {
        "tensor 4, copied kv heads, muon": {"tensor": 4, "copy_kv_heads": True, "optimizer": "muon"},
        "tensor x pipeline, muon": {"tensor": 2, "pipeline": 2, "optimizer": "muon", "model": {"layers": 4}},
        "ZeRO-3 x pipeline, muon": {"zero": 3, "pipeline": 2, "optimizer": "muon", "model": {"layers": 4}},
        "ZeRO-3, experts, muon": {"zero": 3, "optimizer": "muon", "model": {"moe": MOE}},
        "tensor x expert, muon": {"zero": 1, "tensor": 2, "expert": 4, "optimizer": "muon", "model": {"moe": MOE}},
        "context x ZeRO-1, muon": {"context": 2, "zero": 1, "optimizer": "muon"},
    },
    3: {
        "ZeRO-1 over 3": {"zero": 1},
        "expert 3, ZeRO-2": {"expert": 3, "zero": 2, "model": {"moe": MOE}},
        "pipeline of 3": {"pipeline": 3},
    },
    6: {"ZeRO-1 over 3 x context 2": {"context": 2, "zero": 1}, "pipeline 3 x tensor 2": {"pipeline": 3, "tensor": 2}},
}  # other models, other optimizers, odd numbers of processes
OF_ONE_PROCESS = ("optimizer", "model", "recompute")
RESUMED = [
    *("replicate", "ZeRO-2", "hybrid ZeRO-1", "hybrid ZeRO-3", "shard x context, ZeRO-3", "shard x context, ZeRO-1"),
    *("tensor", "shard x tensor, ZeRO-2", "shard x tensor, ZeRO-3", "pipeline, 1f1b"),
    *("shard x interleaved, ZeRO-1", "shard x pipeline, ZeRO-3"),
]
RESUMED_WITH_EXPERTS = [
    *("replicate", "ZeRO-3", "expert", "shard x expert, ZeRO-2", "hybrid x expert, ZeRO-1", "tensor x expert"),
    *("context x expert", "pipeline x expert"),
]


def model_of(layout: Case) -> Case:
    return {"layers": 4, **({"moe": {**MOE, "experts": 16}} if "expert" in layout else {})}


def is_refused(size: int, layout: Case, variant: Case) -> bool:
    parallel = ParallelConfig(**layout)
    config = layouts.run_config(parallel=parallel, tied_embeddings=variant.get("tied", False), **model_of(layout))
    return bool(spread_problems(config, parallel.sizes(size)))


def course_alone(known: dict[Any, Any], layout: Case, variant: str, **options: Any) -> Case:
    key = ("expert" in layout, variant)
    if key not in known:
        known[key] = layouts.course(World(), "adamw", model=model_of(layout), **VARIANTS[variant], **options)
    return known[key]


def difference(found: Case, alone: Case) -> float:
    figures = (itertools.chain(*course["figures"]) for course in (found, alone))
    return max(abs(mine - exact) / abs(exact) for mine, exact in zip(*figures, strict=True))


@pytest.fixture
def run(warm, tmp_path, monkeypatch):
    """Run cases in so many processes, which may take half an hour."""
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1800.0)
    return lambda size, cases: layouts.run(warm, tmp_path / str(size), size, cases)


@pytest.mark.slow
@pytest.mark.parametrize("size", layouts.LAYOUTS)
def test_every_layout_trains_like_one_process(run, size, capsys):
    cases = {
        f"{name} | {variant}": {"optimizer": "adamw", "model": model_of(layout), **layout, **VARIANTS[variant]}
        for (name, layout), variant in itertools.product(layouts.LAYOUTS[size].items(), VARIANTS)
        if not is_refused(size, layout, VARIANTS[variant])
    }
    found = run(size, cases)
    known: dict[Any, Any] = {}
    lines = [f"{f'{size} processes, float64, {layouts.STEPS} steps':38}" + "".join(f"{name:>11}" for name in VARIANTS)]
    for name, layout in layouts.LAYOUTS[size].items():
        line = f"{name:38}"
        for variant in VARIANTS:
            course = found.get(f"{name} | {variant}")
            if course is not None:
                exact = course_alone(known, layout, variant)
                layouts.assert_same_course(course, exact)
            line += f"{'-':>11}" if course is None else f"{difference(course, exact):>11.1e}"
        lines.append(line)
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.slow
@pytest.mark.parametrize("size", SPECIAL)
def test_other_models_optimizers_and_odd_numbers_of_processes(run, size):
    found = run(size, {name: {"optimizer": "adamw", **case} for name, case in SPECIAL[size].items()})
    for name, case in SPECIAL[size].items():
        options = {"optimizer": "adamw"} | {key: value for key, value in case.items() if key in OF_ONE_PROCESS}
        assert difference(found[name], layouts.course(World(), **options)) < 1e-9, name


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_in_float32_they_agree_to_its_digits(run, size):
    options = {"dtype": "float32", "steps": 5}
    of_size = layouts.LAYOUTS[size].items()
    found = run(size, {name: {"optimizer": "adamw", "model": model_of(one), **one, **options} for name, one in of_size})
    known: dict[Any, Any] = {}
    for name, layout in of_size:
        assert difference(found[name], course_alone(known, layout, "plain", **options)) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_every_layout_resumes_from_every_other(run, tmp_path, experts, optimizer):
    names = RESUMED_WITH_EXPERTS if experts else RESUMED
    model = {"layers": 4, **({"moe": MOE} if experts else {})}
    arguments = {"folder": str(tmp_path / "runs"), "layouts": names, "every": True, "model": model}
    found = run(4, {"pairs": {**arguments, "optimizer": optimizer}})["pairs"]
    del found["own_bytes_by_rank"]
    assert len(found) == len(names) ** 2
    assert all(differ == [] and loss < 1e-9 for differ, loss in found.values()), found


COUNT = 200
PROCESSES = (1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 8)


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
        "tied_embeddings": rng.random() < 0.1,
        "attention_bias": rng.choice(("none", "none", "qkv", "all")),
        "max_seq_len": layouts.SEQ_LEN,
    }
    processes = rng.choice(PROCESSES)
    parallel = draw_parallel(rng, processes)
    if rng.random() < 0.3:
        parallel["expert"] = rng.choice((1, 1, 1, 2, 4))
        model["moe"] = {
            **{"experts": rng.choice((2, 4, 6)), "experts_per_token": rng.choice((1, 2)), "expert_size": 8},
            **{"shared_experts": rng.choice((0, 1)), "dense_layers": rng.choice((0, 0, 1))},
        }
    train = {"micro_batch_samples": rng.randint(1, 4), "recompute": rng.choice(("none", "none", "full", "selective"))}
    tokens = layouts.SAMPLES * layouts.SEQ_LEN
    values = {
        "data": {"seq_len": layouts.SEQ_LEN, "document_mask": rng.random() < 0.3},
        "model": model,
        "train": {**train, "tokens_per_step": tokens, "precision": "float64", "seed": 3},
        "optim": {"kind": rng.choice(("adamw", "adamw", "adamw", "muon"))},
        "parallel": parallel,
    }
    return {"processes": processes, "values": values}


def draw_parallel(rng: random.Random, processes: int) -> Case:
    left, found = processes, {}
    for axis in rng.sample(("pipeline", "context", "tensor"), 3):
        fitting = [size for size in (1, 1, 2, 2, 3, 4) if left % size == 0]
        found[axis] = rng.choice(fitting if rng.random() < 0.95 else (2, 3))
        left = max(1, left // found[axis])
    zero = rng.choice((0, 1, 1, 2, 3))
    schedule = rng.choice(("gpipe", "1f1b", "interleaved", "zero_bubble"))
    return found | {
        "zero": zero,
        "shard": rng.choice(("auto", *(size for size in (1, 2, 4) if left % size == 0))) if zero else "auto",
        "schedule": schedule,
        "chunks": 2 if schedule == "interleaved" else 1,
        "context_method": rng.choice(("auto", "ulysses", "gather")),
        "copy_kv_heads": rng.random() < 0.5,
        "bucket_mb": 0.002,
    }


def alone(case: Case) -> list[tuple[float, float]]:
    config = config_from_values({**case["values"], "parallel": {}}, "of a test")
    return layouts.figures_of(replace(config, parallel=ParallelConfig()), World())


@pytest.mark.slow
def test_every_random_combination_is_equal_to_one_process_or_refused_by_a_rule(run, capsys):
    rng = random.Random(0)
    cases = {str(number): draw_case(rng) for number in range(COUNT)}
    for axis in ("pipeline", "context", "tensor"):
        assert {case["values"]["parallel"][axis] for case in cases.values()} >= {1, 2, 4}, axis
    counts: Counter[str] = Counter()
    for size in sorted(set(PROCESSES)):
        of_size = {name: case for name, case in cases.items() if case["processes"] == size}
        found = run(size, of_size)
        assert found.keys() == of_size.keys()
        for name, outcome in found.items():
            counts["refused" if "refused" in outcome else "equal"] += 1
            if "refused" in outcome:
                assert "1. " in outcome["refused"], f"no rule: {outcome['refused']}"
            else:
                assert difference(outcome, {"figures": alone(of_size[name])}) < 1e-9, (name, of_size[name])
    with capsys.disabled():
        print(f"\n{COUNT} random layouts: {dict(counts)}")
    assert counts["equal"] >= COUNT // 4
