"""All processes of a run have the same settings and choose the same operators, or none of them starts."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.train.ranks import RankStarter
from zero2all.common.errors import UsageError, error_values
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.parallel.world import World
from zero2all.train.build import resolve_together
from zero2all.train.resume import changed_operators


@pytest.fixture
def ranks(warm, work, tmp_path):
    starter = RankStarter(warm, work.root, tmp_path)
    yield starter
    starter.stop()


def test_a_process_with_another_setting_ends_all_of_them_before_the_first_step(ranks, config):
    launch = ranks(config(train={"steps": 4}), processes=2, words={1: ["--ops.attention", "math"]})
    assert launch.wait() == [2, 2], launch.text()
    said = "ops.attention 'math' instead of 'auto'"
    assert all(said in trainer.text() for trainer in launch.trainers), launch.text()
    assert launch.steps() == []


class WorldOfTwo(World):
    """Rank 0 of two processes; what rank 1 says is `other`."""

    other: Any = None

    def gather(self, value):
        """The value of this rank and that of the other."""
        return [value, self.other(value)]


def of_two(other: Callable[[Any], Any]) -> World:
    world = WorldOfTwo(0, 2)
    object.__setattr__(world, "other", other)
    return world


def test_processes_that_choose_different_operators_or_find_none_all_end():
    """The same settings: only the machines differ."""

    def takes_another(value):
        return {**value, "attention": "math"} if isinstance(value, dict) else value

    with pytest.raises(UsageError, match="attention is sdpa on rank 0 and math on rank 1"):
        resolve_together(OpsConfig(), OpContext("cpu"), of_two(takes_another))
    none = [error_values(UsageError("no kernel")), "there"]
    with pytest.raises(UsageError, match="Rank 1 on there: no kernel"):
        resolve_together(OpsConfig(), OpContext("cpu"), of_two(lambda value: none if value is None else value))


def test_changed_operators_are_told_and_unknown_ones_are_not():
    before = {"attention": {"got": "sdpa"}, "rope": {"got": "eager"}}
    assert changed_operators(before, {"attention": "fa4", "rope": "eager", "swiglu": "torch"}) == [
        "attention sdpa -> fa4"
    ]


def test_an_operator_that_only_has_another_name_now_has_not_changed():
    assert changed_operators({"linear": {"got": "into32"}}, {"linear": "fp32_wgrad"}) == []
