"""Experts spread over processes train like one process, with the same routing; and what cannot be spread is refused."""

from __future__ import annotations

import dataclasses

from tests.parallel import layouts
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.ops.footprint import Footprint
from zero2all.parallel import expert
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.world import World

MOE = {
    "experts": 12,
    "experts_per_token": 2,
    "expert_size": 8,
    "shared_experts": 1,
    "dense_layers": 1,
    "balance_rate": 0.01,
}
MODEL = {"moe": MOE}


def assert_like_one_process(found, alone):
    assert found["loads"] == alone["loads"], "the routing differs"
    layouts.assert_same_course(found, alone)


def test_two_processes_with_half_of_the_experts_each_train_like_one(warm, tmp_path):
    cases = {
        "ZeRO-1, recompute": {"optimizer": "adamw", "zero": 1, "expert": 2, "recompute": "full"},
        "ZeRO-2": {"optimizer": "muon", "zero": 2, "expert": 2},
    }
    given = {name: {**case, "steps": 3, "model": MODEL} for name, case in cases.items()}
    found = layouts.run(warm, tmp_path, 2, given)
    for name, case in cases.items():
        assert_like_one_process(found[name], layouts.course(World(), case["optimizer"], steps=3, model=MODEL))
    biases = [name for name in found["ZeRO-2"]["tensors"] if name.endswith("router.bias")]
    assert len(biases) == 2, "each block with experts has one in the checkpoint"
    assert all(found["ZeRO-2"]["tensors"][name].abs().max() > 0 for name in biases)
    for name, zero, recompute in (("ZeRO-1, recompute", 1, "full"), ("ZeRO-2", 2, "none")):
        assert_tokens_are_sent_by_formula(found[name], zero, recompute)


def assert_tokens_are_sent_by_formula(found, zero, recompute):
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", zero=zero, shard=2, expert=2,
        recompute=recompute, passes=2,
    )  # fmt: skip
    model = layouts.run_config(**MODEL).model
    per_process = [one.given for one in communication_per_step(model, settings) if one.axis == "expert"]
    assert sum(sent["alltoall"] for sent in found["sent_by_rank"]) == 2 * sum(per_process)


def problems_of(experts=12, zero=1, **axes):
    parallel = ParallelConfig(zero=zero, **axes)
    config = layouts.run_config(parallel=parallel, moe={**MOE, "experts": experts} if experts else {})
    sizes = dataclasses.replace(MeshSizes(), shard=4, **{name: size for name, size in axes.items() if name != "zero"})
    return expert.problems(config, sizes)


def test_what_cannot_be_spread_is_refused_in_words():
    assert problems_of(expert=4) == []
    assert problems_of(experts=0) == []
    assert problems_of(zero=3) == []
    assert "parallel.expert is 2, but the model has no experts" in problems_of(experts=0, expert=2)[0]
    assert "model.moe.experts (10) is not a multiple of parallel.expert (4)" in problems_of(experts=10, expert=4)[0]
    assert "parallel.zero 3 gathers whole experts" in problems_of(zero=3, expert=2)[0]
