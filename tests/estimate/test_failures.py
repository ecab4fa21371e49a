"""What failures cost: closed forms, the calculator, and the simulated run of `benchmarks/long_run.py` beside them."""

import dataclasses

import numpy as np
import pytest

from benchmarks.long_run import DAY, HOUR, PARTS, Plan, Slowness, simulate
from zero2all.common.errors import BadInputError, UsageError
from zero2all.estimate.run_calculators import LLAMA3_FAILURES_PER_GPU_HOUR, failures
from zero2all.estimate.run_calculators import goodput as closed_goodput

LLAMA3_MEAN = 54 * DAY / 419
ROUGH = Plan(  # everything that can go wrong does
    **{"work_seconds": 8 * DAY, "nodes": 512, "failures_per_gpu_hour": 6e-5, "stall_seconds": 2.0, "spare_nodes": 3},
    **{"repair_seconds": 12 * HOUR, "memory_interval_seconds": 60.0},
    **{"slow_nodes": Slowness(0.002, 1.2, 6.0), "slow_links": Slowness(0.001, 1.5, 3.0)},
)


def one_kind(mean: float, interval: float | None, save: float, restart: float, days: float) -> Plan:
    """What Daly's formula describes: one kind of failure, blocking saves, nodes that need no repair."""
    return Plan(
        **{"work_seconds": days * DAY, "nodes": 100, "failures_per_gpu_hour": HOUR / mean / 800, "hang_share": 0.0},
        **{"shares": {"process": 1.0}, "restart_seconds": restart, "interval_seconds": interval, "save_seconds": save},
    )


def test_the_calculator_takes_the_rate_of_llama3_or_a_given_one_and_says_how_long_the_run_gets():
    found = failures(54 * DAY, gpus=16_384, restart=600.0)
    assert pytest.approx(1.973e-5, rel=1e-3) == LLAMA3_FAILURES_PER_GPU_HOUR
    assert found["time between failures"] == pytest.approx(LLAMA3_MEAN)
    assert found["time between checkpoints"] == found["Daly's interval"] < found["Young's interval"]
    assert found["time of the run"] == pytest.approx(54 * DAY / found["goodput"])
    rarely = failures(54 * DAY, mtbf=3.1 * HOUR, restart=600.0, interval=2 * HOUR)
    assert rarely["goodput"] == pytest.approx(0.6670, abs=5e-5)
    assert failures(DAY, mtbf=60.0, save=60.0, restart=1e6)["time of the run"] == np.inf
    with pytest.raises(UsageError, match="--time: got nothing"):
        failures()


def test_the_simulated_goodput_equals_the_closed_form():
    for save, restart, interval, runs in ((60.0, 600.0, None, 60), (300.0, 1800.0, 7200.0, 60)):
        plan = one_kind(LLAMA3_MEAN, interval, save, restart, days=50)
        expected = closed_goodput(plan.interval, save, restart, LLAMA3_MEAN)
        assert simulate(plan, runs).goodput.mean() == pytest.approx(expected, rel=0.01)


def test_the_parts_of_a_simulated_run_sum_to_the_whole_and_the_work_is_done():
    outcome = simulate(ROUGH, 40)
    assert sum(outcome.parts.values()) == pytest.approx(outcome.wall_seconds)
    assert (outcome.parts["useful"], tuple(outcome.parts)) == (pytest.approx(np.full(40, ROUGH.work_seconds)), PARTS)
    assert {name for name, spent in outcome.parts.items() if spent.sum() == 0} == {"fewer nodes"}
    assert (simulate(ROUGH, 5, seed=3).wall_seconds == simulate(ROUGH, 5, seed=3).wall_seconds).all()
    problems = r"sum to 0\.5.*at most 4 nodes; got 9.*stalls training for 90 s.*work must be"
    with pytest.raises(BadInputError, match=problems):
        simulate(Plan(-1.0, 4, shares={"process": 0.5}, least_nodes=9, stall_seconds=90.0))


def test_a_worse_machine_takes_longer():
    better = simulate(ROUGH, 20).wall_seconds.mean()
    for worse in (
        {"failures_per_gpu_hour": 2e-4},
        {"restart_seconds": 1200.0},
        {"hang_seconds": 7200.0},
        {"memory_interval_seconds": None, "interval_seconds": 4 * HOUR},
        {"spare_nodes": 0},
        {"slow_nodes": Slowness(0.02, 1.2, 6.0)},
        {"slow_links": Slowness(0.001, 3.0, 3.0)},
    ):
        assert simulate(dataclasses.replace(ROUGH, **worse), 20).wall_seconds.mean() > better, worse
