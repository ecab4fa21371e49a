"""Every way of spreading a model gives the run of one process; every layout resumes from every other."""

from __future__ import annotations

from functools import partial

import pytest

from tests.parallel import layouts
from zero2all.config import load_config
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.ops.footprint import Footprint
from zero2all.parallel.buckets import plan_buffers
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.world import World
from zero2all.train.optimizers.factory import cut_of
from zero2all.train.step_stats import SCALARS

SIX = ["replicate", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hybrid ZeRO-1", "hybrid ZeRO-3"]
"""Layouts that are saved and resumed."""
FOUR_OF_MUON = ["ZeRO-2", "tensor", "ZeRO-3 x tensor", "hybrid ZeRO-3"]
"""The same: in each of them another process owns a matrix."""
COLLECTIVES = {
    "all-reduce": {"allreduce": 1},
    "reduce-scatter": {"reduce_scatter": 1, "reduce": 1},
    "all-gather": {"allgather": 1, "broadcast": 0.5},
}
"""What each is made of, in two processes: where ranges differ in length, a reduce to each owner and a broadcast from
each, of which one of the two is this process's."""


def assert_like_one_process(found, optimizer, steps, tied=False):
    alone = layouts.course(World(), optimizer, tied, steps)
    layouts.assert_same_course(found, alone)


@pytest.fixture(scope="module")
def of_two(warm, tmp_path_factory):
    """A few layouts and optimizers in one group of two processes; the rest is in `make layouts`."""
    cases = {
        "replicate": {"optimizer": "adamw", "zero": 0},
        "ZeRO-1": {"optimizer": "adamw", "zero": 1},
        "ZeRO-2": {"optimizer": "muon", "zero": 2},
        "tied": {"optimizer": "muon", "zero": 1, "tied": True},
    }
    return layouts.run(warm, tmp_path_factory.mktemp("two"), 2, {n: {**c, "steps": 4} for n, c in cases.items()})


@pytest.mark.parametrize(
    ("case", "optimizer"), [("replicate", "adamw"), ("ZeRO-1", "adamw"), ("ZeRO-2", "muon"), ("tied", "muon")]
)
def test_two_processes_train_like_one(of_two, case, optimizer):
    assert_like_one_process(of_two[case], optimizer, 4, tied=case == "tied")


def test_states_are_cut_and_bytes_are_those_of_the_formula(of_two):
    table = layout_table(layouts.MODEL)
    for name, zero, kind in (("replicate", 0, "adamw"), ("ZeRO-1", 1, "adamw"), ("ZeRO-2", 2, "muon")):
        settings = MemorySettings(
            layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", zero=zero, optimizer=kind,
            replicate=1 if zero else 2, shard=2 if zero else 1, passes=2,
        )  # fmt: skip
        padded = plan_buffers(table, 2 if zero else 1, int(0.002e6) // 8, partial(cut_of, kind)).length
        figures = len(SCALARS) + 2 * layouts.CHANNELS + 2 * layouts.SAMPLES + 2 * 2  # two per rank
        expected: dict[str, float] = {}
        for one in communication_per_step(layouts.MODEL, settings, figures, {"cut": padded}):
            expected[one.collective] = expected.get(one.collective, 0) + one.given
        sent = of_two[name]["sent"]
        counted = {kind: sum(share * sent.get(of_torch, 0) for of_torch, share in parts.items())
                   for kind, parts in COLLECTIVES.items() if kind in expected}  # fmt: skip
        assert counted == expected, name
    whole = of_two["replicate"]["own_bytes_by_rank"]
    assert whole[0] == whole[1]
    assert sum(of_two["ZeRO-1"]["own_bytes_by_rank"]) == whole[0], "each moment once"


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_owners_of_the_1b_model_hold_about_the_same(optimizer, shards):
    config = load_config("z2all-1b", ["--model.vocab_size", "64000"]).model
    table = layout_table(config)
    plan = plan_buffers(table, shards, 32_000_000, lambda one: cut_of(optimizer, one))
    own = [sum(b.borders[r + 1] - b.borders[r] for b in plan.buckets) for r in range(shards)]
    assert sum(own) == plan.length
    equal = sum(one.numel for one in table) / shards
    tolerance = 1.02 if optimizer in ("adamw", "adamw_8bit") else 1.1  # matrices of 12 M values have one owner each
    assert max(own) <= tolerance * equal


def test_layouts_resume_from_each_other(warm, tmp_path):
    arguments = {"folder": str(tmp_path / "runs"), "layouts": SIX, "every": False}
    of_muon = {"folder": str(tmp_path / "muon"), "layouts": FOUR_OF_MUON, "every": False, "optimizer": "muon"}
    found = layouts.run(warm, tmp_path, 4, {"adamw": arguments, "muon": of_muon})
    pairs = {(kind, name): one for kind, of_kind in found.items() for name, one in of_kind.items() if "->" in name}
    assert len(pairs) == 6 + 4
    for name, (differ, loss) in pairs.items():
        assert differ == [], name
        assert loss < 1e-9, name
