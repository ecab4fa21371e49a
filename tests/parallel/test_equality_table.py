"""`make layouts`: every axis alone and in combinations against one process, and every layout resumed from every other.

In float64 only the order of sums differs, so losses and gradient norms agree to many digits. Every layout is run with

    plain       4 micro-batches of 2 rows, or fewer where rows are spread
    documents   attention masked at document borders, and a z loss
    tied        one matrix for embedding and head, blocks computed again; `-` where the layout refuses it
    7 rows      rows that do not divide: some processes have rows of padding
    qk_norm     query and key heads are normalised, with weights that every process has whole; so is the embedding
"""

import itertools
from typing import Any

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.layouts import MOE
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import ParallelConfig
from zero2all.parallel.world import World

pytestmark = pytest.mark.slow


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"documents": True, "z_loss": 1e-3},
    "tied": {"tied": True, "recompute": "full"},
    "7 rows": {"samples": 7},
    "qk_norm": {"qk_norm": True},
}
BIASES = {"attention_bias": "all", "mlp_bias": True}
ONE_KV_HEAD = {"kv_heads": 1}
SPECIAL: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tensor, biases, selective": {"tensor": 2, "model": BIASES, "recompute": "selective"},
        "tensor, padding rows of the vocabulary": {"tensor": 2, "model": {"vocab_size": 30}},
        "tensor, copied kv head": {"tensor": 2, "copy_kv_heads": True, "model": ONE_KV_HEAD},
        "tensor, offloaded optimizer": {"tensor": 2, "offload": "optimizer"},
        "tensor, muon": {"tensor": 2, "optimizer": "muon"},
        "ZeRO-3, muon": {"zero": 3, "optimizer": "muon"},
        "pipeline, 9 blocks, muon": {"pipeline": 2, "optimizer": "muon", "model": {"layers": 9}},
        "gather, one kv head, selective": {
            **{"context": 2, "context_method": "gather"},
            **{"model": ONE_KV_HEAD, "recompute": "selective"},
        },
        "tensor, copied kv head, qk_norm": {
            **{"tensor": 2, "copy_kv_heads": True, "recompute": "selective"},
            **{"model": {**ONE_KV_HEAD, "qk_norm": True, "init_std": None, "init_residual": "zero"}},
        },
        "expert, muon, ZeRO-2": {"expert": 2, "zero": 2, "optimizer": "muon", "model": {"moe": MOE}},
    },
    4: {
        "tensor 4, copied kv heads, muon": {"tensor": 4, "copy_kv_heads": True, "optimizer": "muon"},
        "replicate x tensor, muon": {"tensor": 2, "optimizer": "muon"},
        "ZeRO-1 x tensor, muon": {"zero": 1, "tensor": 2, "optimizer": "muon"},
        "ZeRO-2 x tensor, muon": {"zero": 2, "tensor": 2, "optimizer": "muon"},
        "ZeRO-3 x tensor, muon": {"zero": 3, "tensor": 2, "optimizer": "muon"},
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
    6: {
        "replicate 3 x tensor 2": {"tensor": 2},
        "ZeRO-1 over 3 x context 2": {"context": 2, "zero": 1},
        "pipeline 3 x tensor 2": {"pipeline": 3, "tensor": 2},
    },
}
"""Other models, other optimizers, odd numbers of processes."""
OF_ONE_PROCESS = ("optimizer", "model", "recompute")
RESUMED = [
    *("replicate", "ZeRO-2", "hybrid ZeRO-1", "hybrid ZeRO-3", "shard x context, ZeRO-3", "shard x context, ZeRO-1"),
    *("tensor", "shard x tensor, ZeRO-2", "shard x tensor, ZeRO-3", "pipeline, 1f1b"),
    *("shard x interleaved, ZeRO-1", "shard x pipeline, ZeRO-3"),
]
"""Twelve layouts of four processes."""
RESUMED_WITH_EXPERTS = [
    *("replicate", "ZeRO-3", "expert", "shard x expert, ZeRO-2", "hybrid x expert, ZeRO-1", "tensor x expert"),
    *("context x expert", "pipeline x expert"),
]


def model_of(layout: dict[str, Any]) -> dict[str, Any]:
    """With experts where they are spread."""
    return {"layers": 4, **({"moe": {**MOE, "experts": 16}} if "expert" in layout else {})}


def is_refused(size: int, layout: dict[str, Any], variant: dict[str, Any]) -> bool:
    """Whether the rules forbid it."""
    parallel = ParallelConfig(**layout)
    config = layouts.run_config(parallel=parallel, tied_embeddings=variant.get("tied", False), **model_of(layout))
    return bool(spread_problems(config, parallel.sizes(size)))


def course_alone(known: dict[Any, Any], layout: dict[str, Any], variant: str, **options: Any) -> dict[str, Any]:
    """The same in one process."""
    key = ("expert" in layout, variant)
    if key not in known:
        known[key] = layouts.course(World(), "adamw", model=model_of(layout), **VARIANTS[variant], **options)
    return known[key]


def difference(found: dict[str, Any], alone: dict[str, Any]) -> float:
    """The largest relative difference of a loss or a norm."""
    figures = (itertools.chain(*course["figures"]) for course in (found, alone))
    return max(abs(mine - exact) / abs(exact) for mine, exact in zip(*figures, strict=True))


@pytest.mark.parametrize("size", layouts.LAYOUTS)
def test_every_layout_trains_like_one_process(warm, tmp_path, size, capsys, monkeypatch):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1800.0)
    cases = {
        f"{name} | {variant}": {"optimizer": "adamw", "model": model_of(layout), **layout, **VARIANTS[variant]}
        for (name, layout), variant in itertools.product(layouts.LAYOUTS[size].items(), VARIANTS)
        if not is_refused(size, layout, VARIANTS[variant])
    }
    found = layouts.run(warm, tmp_path, size, cases)
    known: dict[Any, Any] = {}
    lines = [f"{f'{size} processes, float64, {layouts.STEPS} steps':38}" + "".join(f"{name:>11}" for name in VARIANTS)]
    for name, layout in layouts.LAYOUTS[size].items():
        line = f"{name:38}"
        for variant in VARIANTS:
            course = found.get(f"{name} | {variant}")
            error = None if course is None else difference(course, course_alone(known, layout, variant))
            line += f"{'-' if error is None else f'{error:.1e}':>11}"
            assert error is None or error < 1e-9, f"{name}, {variant}: {error}"
            if course is not None:
                exact = known["expert" in layout, variant]["tensors"]
                assert course["tensors"].keys() == exact.keys()
                for tensor, value in exact.items():
                    torch.testing.assert_close(course["tensors"][tensor], value, rtol=1e-9, atol=1e-9, msg=tensor)
        lines.append(line)
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.parametrize("size", SPECIAL)
def test_other_models_optimizers_and_odd_numbers_of_processes(warm, tmp_path, size, capsys, monkeypatch):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1200.0)
    cases = {name: {"optimizer": "adamw", **case} for name, case in SPECIAL[size].items()}
    found = layouts.run(warm, tmp_path, size, cases)
    for name, case in cases.items():
        options = {key: value for key, value in case.items() if key in OF_ONE_PROCESS}
        error = difference(found[name], layouts.course(World(), **options))
        with capsys.disabled():
            print(f"\n{size} processes: {name:40}{error:.1e}", end="")
        assert error < 1e-9, name


@pytest.mark.parametrize("size", [2, 4])
def test_in_float32_they_agree_to_its_digits(warm, tmp_path, size, capsys, monkeypatch):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1200.0)
    options = {"dtype": "float32", "steps": 5}
    cases = {
        name: {"optimizer": "adamw", "model": model_of(layout), **layout, **options}
        for name, layout in layouts.LAYOUTS[size].items()
    }
    found = layouts.run(warm, tmp_path, size, cases)
    known: dict[Any, Any] = {}
    errors = {
        name: difference(found[name], course_alone(known, layouts.LAYOUTS[size][name], "plain", **options))
        for name in cases
    }
    with capsys.disabled():
        print(f"\n{size} processes, float32, 5 steps: at most {max(errors.values()):.1e}")
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_every_layout_resumes_from_every_other(warm, tmp_path, monkeypatch, experts, optimizer):
    monkeypatch.setattr("tests.processes.LONG_SECONDS", 1200.0)
    names = RESUMED_WITH_EXPERTS if experts else RESUMED
    model = {"layers": 4, **({"moe": MOE} if experts else {})}
    arguments = {"folder": str(tmp_path / "runs"), "layouts": names, "every": True, "model": model}
    found = layouts.run(warm, tmp_path, 4, {"pairs": {**arguments, "optimizer": optimizer}})["pairs"]
    del found["own_bytes_by_rank"]
    assert len(found) == len(names) ** 2
    assert all(differ == [] and loss < 1e-9 for differ, loss in found.values()), found
