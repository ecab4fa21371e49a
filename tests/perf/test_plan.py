"""`z2a perf plan`: the best layout, why, and a config that a run accepts."""

from __future__ import annotations

import dataclasses

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import config_yaml, load_config
from zero2all.limits.machine import named_cluster
from zero2all.parallel.check import check_spread
from zero2all.perf.batch import load_measured_config
from zero2all.perf.plan import LayoutPlan, compare, config_of, measure_candidates, plan_cells, plan_json, plan_layouts


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    config, _ = load_measured_config("z2all-100m", [])
    return plan_layouts(config, 4, named_cluster("h100"), wanted=5)


def test_the_fastest_comes_first_and_all_fit(plan: LayoutPlan):
    seconds = [one.time.estimate for one in plan.candidates]
    assert seconds == sorted(seconds)
    assert all(one.memory <= plan.room for one in plan.candidates)
    assert len(plan_cells(plan.candidates)) == 6
    assert plan_json(plan)["candidates"][0]["seconds"] == seconds[0]


def test_the_config_of_the_best_loads_and_can_be_spread(plan: LayoutPlan, tmp_path):
    written = tmp_path / "planned.yaml"
    written.write_text(config_yaml(config_of(plan.config, plan.candidates[0].row)))
    config = load_config(str(written), [])
    assert check_spread(config, 4).processes == 4
    assert config.train.micro_batch_samples == plan.candidates[0].row["samples"]


def test_it_says_why(plan: LayoutPlan):
    assert any(line.startswith("tensor 2: its best layout is ") for line in plan.alternatives)
    assert any(line.startswith("recompute full") for line in plan.alternatives)
    assert "faster" in compare(plan.candidates[0], plan.candidates[-1])
    assert any(rule.startswith("does not fit into") for rule in plan.rejected)


def test_what_fits_nowhere_is_refused_with_the_rules_it_breaks():
    config, _ = load_measured_config("z2all-1b", ["--train.tokens_per_step", "4096"])
    small = dataclasses.replace(named_cluster("h100"), memory_bytes=2.0**30)
    with pytest.raises(BadInputError, match="does not fit into"):
        plan_layouts(config, 2, small)


def test_measuring_needs_one_gpu(plan: LayoutPlan):
    with pytest.raises(UsageError, match="--gpus is 4"):
        measure_candidates(plan, 1, 1.0, 10.0)
