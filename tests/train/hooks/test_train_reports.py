"""The times of steps in the metric rows: between the ends of steps, by the clock of the device that computed them."""

import numpy as np
import pytest

from tests.train.conftest import prepared_run
from zero2all.train.hooks import reports as reports_module
from zero2all.train.hooks.reports import StepReports
from zero2all.train.step_stats import StepResult
from zero2all.train.step_timer import PARTS, TimeOfDay


class Rows:
    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}
        self.times: dict[int, float] = {}

    def log(self, values, step, tokens, at) -> None:
        del tokens
        self.values[step] = values
        self.times[step] = at


def result(step: int, ended: float, in_parts: float, between: tuple[float, float] = (0.0, 0.0)) -> StepResult:
    figures = {"loss": 3.0, "core_loss": 3.0, "channel_losses": [3.0, 3.0], "grad_norm": 1.0, "lr": 0.1}
    figures |= {"updated": True, "stop_requested": False, "folder_changed": False}
    figures |= {"row_nats": np.ones(4), "row_counts": np.ones(4), "ended": ended, "ended_between": between}
    seconds = {**dict.fromkeys(PARTS, 0.0), "forward": in_parts}
    return StepResult(step=step, tokens=(128 * (step - 1), 128 * step), seconds=seconds, **figures)


def test_a_step_lasts_from_the_end_of_the_one_before_or_of_a_pause_whenever_it_is_read(work, config, monkeypatch):
    rows, now = Rows(), 100.0
    monkeypatch.setattr(reports_module, "mark_now", lambda _: now)
    reports = StepReports(*prepared_run(config(), work), rows)
    reports.report(result(1, ended=103.0, in_parts=2.0), wait_seconds=0.5)
    now = 109.0  # nothing is looked at between two steps: both are read late
    reports.report(result(2, ended=105.5, in_parts=2.0), wait_seconds=4.0)  # the host waited while the device was busy
    now = 110.0  # validation
    reports.end_pause()
    reports.report(result(3, ended=112.25, in_parts=2.0), wait_seconds=0.0)
    for step, times in {1: (3.0, 0.5, 0.5), 2: (2.5, 0.5, 0.0), 3: (2.25, 0.0, 0.25)}.items():
        found = rows.values[step]
        assert (found["time/step"], found["time/data_wait"], found["time/other"]) == pytest.approx(times), step
        assert found["tokens_per_second"] == pytest.approx(128 / times[0])


def test_a_row_is_stamped_with_the_end_of_its_step_whenever_it_is_read(work, config, monkeypatch):
    rows = Rows()
    monkeypatch.setattr(reports_module, "mark_now", lambda _: 100.0)
    monkeypatch.setattr(reports_module.time, "time", lambda: 5000.0)
    reports = StepReports(*prepared_run(config(), work), rows)
    # Steps of 6.7 s, each read 6.3 s late; only the last before a pause is read at once.
    for step in range(1, 10):
        ended = 6.7 * step
        reports.report(result(step, 100 + ended, 6.0, (5000 + ended - 6.6, 5000 + ended + 6.3)), wait_seconds=0.0)
    reports.report(result(10, 167.0, 6.0, (5067.01, 5067.01)), wait_seconds=0.0)
    assert list(rows.times.values()) == pytest.approx([5000 + 6.7 * step for step in range(1, 10)] + [5067.01])


def test_a_mark_has_the_time_the_host_waited_for_it_and_is_never_later_than_read_nor_earlier_than_queued():
    clock = TimeOfDay(10.0, 1000.0)
    assert clock.of(12.0, (1002.5, 1002.5)) == 1002.5
    assert clock.of(13.0, (1000.0, 1009.0)) == 1003.5, "counted from the one before"
    clock = TimeOfDay(10.0, 1000.0)
    assert clock.of(20.0, (1001.0, 1009.0)) == 1009.0  # the device's clock runs fast
    assert clock.of(21.0, (1001.0, 1020.0)) == 1010.0
    assert clock.of(22.0, (1011.5, 1020.0)) == 1011.5  # and then slow
    assert clock.of(23.0, (1011.5, 1020.0)) == 1012.5


def test_drift_between_the_clocks_does_not_add_up():
    clock = TimeOfDay(0.0, 0.0)
    for step in range(1, 1001):
        ended = 5.0 * step
        mark = ended * (1 + 1e-3)  # a second too much after 200 steps
        assert clock.of(mark, (ended - 4.9, ended if step % 50 == 0 else ended + 4.9)) == pytest.approx(ended, abs=0.3)
