"""`z2a perf plan`: the best layout, why, and a config that a run accepts."""

import dataclasses
import random

import pytest

from zero2all.common.errors import BadInputError, UsageError
from zero2all.config import config_yaml, load_config
from zero2all.estimate.gpus import named_card
from zero2all.estimate.machine import named_cluster
from zero2all.measure.verify import measure_candidates
from zero2all.parallel.check import check_spread
from zero2all.predict import layout_search
from zero2all.predict.batch import load_measured_config
from zero2all.predict.layout_search import LayoutPlan, Row, config_of, enumerate_layouts, plan_layouts
from zero2all.predict.memory_report import memory_report


@pytest.fixture(scope="module")
def plan() -> LayoutPlan:
    config, _ = load_measured_config("z2all-100m", [])
    return plan_layouts(config, 4, named_cluster("h100"), wanted=5)


def test_the_fastest_comes_first_and_all_fit(plan: LayoutPlan):
    seconds = [one.time.estimate for one in plan.candidates]
    assert seconds == sorted(seconds)
    assert all(one.memory <= plan.room for one in plan.candidates)
    assert len(layout_search.plan_cells(plan.candidates)) == 6
    assert layout_search.plan_json(plan)["candidates"][0]["seconds"] == seconds[0]
    # and it says why
    assert any(line.startswith("tensor 2: its best layout is ") for line in plan.alternatives)
    assert any(line.startswith("recompute full") for line in plan.alternatives)
    assert all(" +" in line for line in plan.alternatives if "slower" in line), "the part that grows"
    assert "faster" in layout_search.compare(plan.candidates[0], plan.candidates[-1])
    assert any(rule.startswith("does not fit into") for rule in plan.rejected)


def rows_of(gpus: int, *words: str, most_tensor: int = 8) -> list[Row]:
    config, _ = load_measured_config("z2all-1b", list(words))
    return enumerate_layouts(config, gpus, most_tensor, layout_search.held_columns(config, words))[0]


def test_what_a_run_accepts_is_among_the_layouts():
    for gpus, words, layout in (
        (7, [], {"replicate": 7}),
        (12, [], {"zero": 2, "shard": 4, "replicate": 3}),
        (16, ["--parallel.copy_kv_heads", "true"], {"tensor": 16}),
        (8, ["--data.seq_len", "1032", "--train.tokens_per_step", "528384"], {"context": 8}),
        (4, ["--train.tokens_per_step", "8192"], {"pipeline": 4}),
    ):
        fields = [word for name, value in layout.items() for word in (f"--parallel.{name}", str(value))]
        check_spread(load_config("z2all-1b", [*words, *fields]), gpus)  # a run does
        rows = rows_of(gpus, *words, most_tensor=16)
        assert any(all(row[name] == value for name, value in layout.items()) for row in rows)


@pytest.mark.parametrize(("source", "gpus"), [("z2all-1b", 24), ("z2all-moe", 8)])
def test_what_is_among_the_layouts_a_run_accepts(source: str, gpus: int):
    config, _ = load_measured_config(source, [])
    rows, rejected = enumerate_layouts(config, gpus, 8, {})
    for row in random.Random(5).sample(rows, 25):
        check_spread(config_of(config, row), gpus)
    assert len({tuple(row.items()) for row in rows}) == len(rows)
    assert any("parallel.zero 2 does not work with parallel.pipeline 2" in text for text in rejected)


def test_what_the_user_sets_holds_and_is_said(z2a):
    words = ["--parallel.tensor", "2", "--parallel.zero", "1", "--train.recompute", "full"]
    plan = ["perf", "plan", "z2all-100m", "--gpus", "4", "--cluster", "h100"]
    shown = "As you set it, in all of them: --parallel.tensor 2, --parallel.zero 1, --train.recompute full"
    assert shown in z2a.done(*plan, *words)
    assert {(row["tensor"], row["zero"], row["recompute"]) for row in rows_of(4, *words)} == {(2, 1, "full")}
    assert "pipeline x context x tensor = 3 must divide 4" in z2a.refused(2, *plan, "--parallel.tensor", "3")
    assert {row["zero"] for row in rows_of(1, "--parallel.zero=1")} == {1}
    assert {row["samples"] for row in rows_of(8, "--train.micro_batch_samples", "5")} == {5}


def test_the_search_finds_what_predicting_all_finds(plan: LayoutPlan):
    rows, _ = enumerate_layouts(plan.config, 4, 8, {})
    search = layout_search.Search(plan.config, plan.machine, rows)
    seconds = [search._predicted(row).estimate for row in rows]
    fitting = sorted(each for row, each in zip(rows, seconds, strict=True) if search._memory(row) is not None)
    assert [one.time.estimate for one in plan.candidates] == pytest.approx(fitting[:5])
    least = [search._least_seconds(row) * (1 - 1e-9) for row in rows]
    assert all(each >= bound for each, bound in zip(seconds, least, strict=True))
    assert plan.tried < len(rows) / 2


def test_configs_of_the_best_load_and_can_be_spread_and_need_what_z2a_perf_memory_says(plan: LayoutPlan, tmp_path):
    for one in plan.candidates:
        path = tmp_path / "layout.yaml"
        path.write_text(config_yaml(config_of(plan.config, one.row)))
        config = load_config(str(path), [])
        assert (check_spread(config, 4).processes, config.train.micro_batch_samples) == (4, one.row["samples"])
        report = memory_report(str(path), [], named_card("h100"), 4)
        assert one.memory == pytest.approx(report.estimate.total, rel=1e-6)


def test_what_fits_nowhere_is_refused_with_the_rules_it_breaks_and_measuring_needs_one_gpu(plan: LayoutPlan):
    config, _ = load_measured_config("z2all-1b", ["--train.tokens_per_step", "4096"])
    small = dataclasses.replace(named_cluster("h100"), memory_bytes=2.0**30)
    with pytest.raises(BadInputError, match="does not fit into"):
        plan_layouts(config, 2, small)
    with pytest.raises(UsageError, match="--gpus is 4"):
        measure_candidates(plan, 1, 1.0, 10.0)
