"""The simulated run against closed forms, against published runs, and against what must hold for any run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from zero2all.common.errors import BadInputError
from zero2all.estimate.failures import daly_interval
from zero2all.estimate.failures import goodput as closed_goodput
from zero2all.estimate.simulate import (
    DAY,
    HOUR,
    LLAMA3_FAILURES_PER_GPU_HOUR,
    PARTS,
    Plan,
    Slowness,
    band,
    simulate,
    slowdown_of_links,
)

LLAMA3_MEAN = 54 * DAY / 419
ROUGH = Plan(
    work_seconds=8 * DAY,
    nodes=512,
    failures_per_gpu_hour=6e-5,
    stall_seconds=2.0,
    repair_seconds=12 * HOUR,
    spare_nodes=3,
    memory_interval_seconds=60.0,
    slow_nodes=Slowness(0.002, 1.2, 6.0),
    slow_links=Slowness(0.001, 1.5, 3.0),
)
"""Everything that can go wrong does."""


def one_kind(mean: float, interval: float | None, save: float, restart: float, days: float) -> Plan:
    """What Daly's formula describes: one kind of failure, blocking saves, nodes that need no repair."""
    return Plan(
        work_seconds=days * DAY,
        nodes=100,
        failures_per_gpu_hour=HOUR / mean / 800,
        shares={"process": 1.0},
        hang_share=0.0,
        restart_seconds=restart,
        interval_seconds=interval,
        save_seconds=save,
    )


@pytest.mark.parametrize(
    ("mean", "save", "restart", "interval", "goodput"),
    [
        (LLAMA3_MEAN, 60.0, 600.0, 1116, 0.853),
        (LLAMA3_MEAN, 2.0, 300.0, 210, 0.955),
        (5 * DAY, 40.0, 900.0, 5852, 0.984),
    ],
)
def test_the_worked_examples_of_dalys_interval(mean, save, restart, interval, goodput):
    assert daly_interval(save, mean) == pytest.approx(interval, abs=0.5)
    assert closed_goodput(daly_interval(save, mean), save, restart, mean) == pytest.approx(goodput, abs=5e-4)


@pytest.mark.parametrize(
    ("mean", "save", "restart", "interval"),
    [(LLAMA3_MEAN, 60.0, 600.0, None), (LLAMA3_MEAN, 2.0, 300.0, None), (LLAMA3_MEAN, 300.0, 1800.0, 7200.0)],
)
def test_goodput_equals_the_closed_form(mean, save, restart, interval):
    plan = one_kind(mean, interval, save, restart, days=50)
    goodput = simulate(plan, 100).goodput
    expected = closed_goodput(plan.interval, save, restart, mean)
    assert goodput.mean() == pytest.approx(expected, abs=4 * goodput.std() / 10)
    assert goodput.mean() == pytest.approx(expected, rel=0.01)


def test_without_failures_only_saves_cost_time():
    plan = dataclasses.replace(one_kind(1e30, 3600.0, 60.0, 600.0, days=1), failures_per_gpu_hour=0.0)
    wall = simulate(plan, 3).wall_seconds
    assert wall == pytest.approx(np.full(3, DAY + 23 * 60))  # the 24th save is that of the end


def test_llama3_has_its_419_interruptions_in_54_days():
    plan = Plan(work_seconds=54 * DAY * 0.9, nodes=2048, restart_seconds=600.0, stall_seconds=2.0, spare_nodes=64)
    outcome = simulate(plan, 100)
    per_54_days = outcome.failures / outcome.wall_seconds * 54 * DAY
    assert band(per_54_days)[0] < 419 < band(per_54_days)[2]
    assert outcome.goodput.mean() > 0.9  # as published


def test_the_parts_sum_to_the_whole_and_the_work_is_done():
    outcome = simulate(ROUGH, 40)
    assert sum(outcome.parts.values()) == pytest.approx(outcome.wall_seconds)
    assert outcome.parts["useful"] == pytest.approx(np.full(40, ROUGH.work_seconds))
    assert tuple(outcome.parts) == PARTS
    assert all((spent >= 0).all() for spent in outcome.parts.values())
    assert sum(outcome.shares().values()) == pytest.approx(1.0)
    assert {name for name, spent in outcome.parts.items() if spent.sum() == 0} == {"fewer nodes"}


def test_the_same_seed_gives_the_same_figures():
    assert (simulate(ROUGH, 5, seed=3).wall_seconds == simulate(ROUGH, 5, seed=3).wall_seconds).all()
    assert (simulate(ROUGH, 5, seed=3).wall_seconds != simulate(ROUGH, 5, seed=4).wall_seconds).any()


@pytest.mark.parametrize(
    "worse",
    [
        {"failures_per_gpu_hour": 2e-4},
        {"restart_seconds": 1200.0},
        {"hang_seconds": 7200.0},
        {"save_seconds": 900.0, "stall_seconds": 900.0},
        {"memory_interval_seconds": None, "interval_seconds": 4 * HOUR},
        {"spare_nodes": 0},
        {"slow_nodes": Slowness(0.02, 1.2, 6.0)},
        {"slow_links": Slowness(0.001, 3.0, 3.0)},
    ],
)
def test_a_worse_machine_takes_longer(worse):
    better, changed = simulate(ROUGH, 20), simulate(dataclasses.replace(ROUGH, **worse), 20)
    assert changed.wall_seconds.mean() > better.wall_seconds.mean()


def test_an_elastic_run_goes_on_where_another_waits():
    without_spares = dataclasses.replace(ROUGH, spare_nodes=0, repair_seconds=48 * HOUR)
    waits = simulate(without_spares, 20)
    elastic = simulate(dataclasses.replace(without_spares, least_nodes=256), 20)
    assert waits.parts["waiting for nodes"].mean() > 10 * elastic.parts["waiting for nodes"].mean()
    assert (elastic.parts["fewer nodes"] > 0).all()
    assert elastic.wall_seconds.mean() < waits.wall_seconds.mean()


def test_a_memory_copy_loses_less_and_a_second_one_survives_a_lost_node():
    rare = dataclasses.replace(ROUGH, interval_seconds=2 * HOUR)
    disk = simulate(dataclasses.replace(rare, memory_interval_seconds=None), 20).parts["lost work"].mean()
    one = simulate(rare, 20).parts["lost work"].mean()
    two = simulate(dataclasses.replace(rare, memory_copies=2), 20).parts["lost work"].mean()
    assert one == pytest.approx(disk * 0.2, rel=0.3)  # only the 20 % node failures still go back to the disk
    assert two < one / 10


def test_a_write_in_the_background_counts_only_when_it_is_done():
    plan = one_kind(HOUR, 600.0, 600.0, 60.0, days=8)
    quick = dataclasses.replace(plan, save_seconds=1.0, stall_seconds=1.0)
    late = dataclasses.replace(plan, save_seconds=601.0, stall_seconds=1.0)
    lost = [simulate(each, 30).parts["lost work"].mean() for each in (quick, late)]
    assert lost[1] == pytest.approx(3 * lost[0], rel=0.15)  # a whole interval more than half of one


def test_the_goodput_is_best_near_dalys_interval():
    best = one_kind(LLAMA3_MEAN, None, 60.0, 600.0, days=25)
    means = [
        simulate(dataclasses.replace(best, interval_seconds=best.interval * factor), 60).goodput.mean()
        for factor in (0.25, 1.0, 4.0)
    ]
    assert max(means) == means[1]


def test_the_slowdown_of_links():
    assert slowdown_of_links(0.2, 0.5) == pytest.approx(1.2)
    assert slowdown_of_links(0.0, 0.1) == 1.0


def test_all_problems_of_a_plan_are_named_at_once():
    plan = Plan(
        -1.0,
        4,
        shares={"process": 0.5},
        least_nodes=9,
        stall_seconds=90.0,
        slow_nodes=Slowness(1.0, 0.5),
        memory_copies=3,
    )
    with pytest.raises(BadInputError) as caught:
        simulate(plan)
    for words in (
        "sum to 0.5",
        "at most 4 nodes; got 9",
        "stalls training for 90 s",
        "which is faster",
        "work must be",
    ):
        assert words in str(caught.value)


def test_a_run_that_cannot_progress_is_refused():
    with pytest.raises(BadInputError, match=r"hardly progress.*Save more often"):
        simulate(Plan(DAY, 100_000, failures_per_gpu_hour=1e-3, restart_seconds=900.0))


def test_the_rate_of_llama3():
    assert pytest.approx(1.973e-5, rel=1e-3) == LLAMA3_FAILURES_PER_GPU_HOUR
