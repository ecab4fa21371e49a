"""The times of steps in the metric rows: between the ends of steps, by the clock of the device that computed them."""

from __future__ import annotations

import numpy as np
import pytest

from zero2all.parallel.world import World
from zero2all.train import reports as reports_module
from zero2all.train.anatomy import PARTS
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.reports import StepReports
from zero2all.train.setup import prepare
from zero2all.train.step import StepResult


class Rows:
    """Takes down what is logged."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def log(self, values, step, tokens) -> None:
        del tokens
        self.values[step] = values


def result(step: int, ended: float, in_parts: float) -> StepResult:
    return StepResult(
        step=step,
        tokens=(128 * (step - 1), 128 * step),
        loss=3.0,
        channel_losses=[3.0, 3.0],
        grad_norm=1.0,
        lr=0.1,
        updated=True,
        stop_requested=False,
        row_nats=np.ones(4),
        row_counts=np.ones(4),
        seconds={**dict.fromkeys(PARTS, 0.0), "forward": in_parts},
        ended=ended,
    )


def test_a_step_lasts_from_the_end_of_the_one_before_or_of_a_pause_whenever_it_is_read(work, config, monkeypatch):
    settings = config()
    prepared = prepare(settings, work, World(), CheckpointStore(work.run(settings.train.name)))
    rows, now = Rows(), 100.0
    monkeypatch.setattr(reports_module, "mark_now", lambda _: now)
    reports = StepReports(prepared, rows)
    reports.report(result(1, ended=103.0, in_parts=2.0), wait_seconds=0.5)
    now = 109.0  # nothing is looked at between two steps: both are read late
    reports.report(result(2, ended=105.5, in_parts=2.0), wait_seconds=4.0)  # the host waited while the device was busy
    now = 110.0  # validation
    reports.pause_ended()
    reports.report(result(3, ended=112.25, in_parts=2.0), wait_seconds=0.0)
    wanted = {1: (3.0, 0.5, 0.5), 2: (2.5, 0.5, 0.0), 3: (2.25, 0.0, 0.25)}
    for step, times in wanted.items():
        found = rows.values[step]
        assert (found["time/step"], found["time/data_wait"], found["time/other"]) == pytest.approx(times), step
        assert found["tokens_per_second"] == pytest.approx(128 / times[0])
