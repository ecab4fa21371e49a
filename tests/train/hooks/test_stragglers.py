"""A rank that is slow for some steps is named; others, and one long pause, are not."""

import os
import re
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train.ranks import RankStarter
from tests.train.states import events
from zero2all.train.hooks.stragglers import HALF, Stragglers, scores


class Log:
    def __init__(self) -> None:
        self.events: list[tuple[int, dict]] = []
        self.step = 0

    def event(self, kind: str, data: dict) -> None:
        assert kind == "straggler"
        self.events.append((self.step, data))

    def say(self, *_lines: str) -> None:
        pass


def watched(paces) -> list[tuple[int, dict]]:
    log = Log()
    pipeline = SimpleNamespace(rank=0)
    known = [("host", pipeline.rank)] * paces.shape[1]
    world = SimpleNamespace(size=paces.shape[1], mesh=SimpleNamespace(pipeline=pipeline), gather=lambda _: known)
    watch = Stragglers(world, log)
    for log.step, step in enumerate(paces):
        watch.after_result(SimpleNamespace(paces=step, seconds={"forward": 0.0, "loss": 0.0}), 0.0)
    return log.events


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_named_once_within_20_steps_with_its_score_and_part(ranks):
    paces = np.full((80, ranks, 2), [0.01, 0.2])
    paces[30:, 1, 1] = 0.4
    ((step, event),) = watched(paces)
    assert 30 < step < 50
    assert (event["rank"], event["part"]) == (1, "forward pass")
    assert event["score"] == pytest.approx(0.51, abs=0.02)
    shown = r"score (\S+) \((\S+) s in a step are usual, it needs (\S+) s\)"
    assert re.search(shown, event["text"]).groups() == ("0.51", "0.21", "0.41")  # also of two ranks
    paces[30:, 1] = [0.21, 0.2]
    paces[40, 1, 1] = 9.0  # a pause changes neither the figures nor the part
    ((_, event),) = watched(paces)
    assert (event["part"], "it needs 0.41 s" in event["text"]) == ("data", True)


def test_one_long_pause_and_small_differences_are_not_reported():
    paces = np.random.default_rng(1).uniform(0.2, 0.25, (100, 4, 2))
    paces[50, 2, 0] = 30.0
    assert watched(paces) == []


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    assert scores(np.tile([1.0, 1.0, 3.0, 3.0], (HALF, 1)), np.array([0, 0, 1, 1]))[0].tolist() == [1.0] * 4


@pytest.mark.slow
def test_a_rank_that_is_stopped_half_of_the_time_is_named_in_the_events(warm, work, config, tmp_path):
    ranks = RankStarter(warm, work.root, tmp_path)
    fields = {"train": {"name": "slow", "steps": 60, "tokens_per_step": 4096, "micro_batch_samples": 16}}
    launch = ranks(config(**fields, validation={"every_steps": 0, "tokens_per_source": 128}), 2)
    slow = launch.trainers[1]
    try:
        slow.wait_until(lambda: launch.steps(1))
        begun = len(launch.steps(1))
        while slow.poll() is None:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                with suppress(ProcessLookupError):
                    os.kill(slow.pid, number)
                time.sleep(0.03)
        assert launch.wait() == [0, 0], launch.text()
    finally:
        ranks.stop()
    first = events(work.run("slow"), "straggler")[0]
    assert first.data["rank"] == 1
    assert first.step <= begun + 20 + 2
    assert 0.25 < first.data["score"] < 0.75
