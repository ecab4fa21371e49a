"""All processes of a run compute alike, or none of them begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from zero2all.common.errors import UsageError
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import Situation
from zero2all.ops.registry import resolve
from zero2all.parallel.world import World
from zero2all.train.operators import changed_operators, resolve_together

HERE = Situation("cpu")


@dataclass(frozen=True)
class TwoProcesses(World):
    """This process and another one, of which it is known what it says."""

    size: int = 2
    other: Any = field(default=("", {}))

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


def test_processes_that_take_the_same_go_on():
    alike = TwoProcesses(other=("", resolve(OpsConfig(), HERE).taken))
    for world in (alike, World()):
        assert resolve_together(OpsConfig(), HERE, world).choices == resolve(OpsConfig(), HERE).choices


def test_a_process_that_takes_something_else_ends_all_of_them_with_both_named():
    taken = resolve(OpsConfig(), HERE).taken
    with pytest.raises(UsageError) as refusal:
        resolve_together(OpsConfig(), HERE, TwoProcesses(other=("", {**taken, "attention": "math"})))
    assert "attention is sdpa in process 0 and math in process 1" in str(refusal.value)
    assert "--ops.attention math" in str(refusal.value)


def test_what_one_process_cannot_run_ends_all_of_them_with_its_reason():
    with pytest.raises(UsageError, match=r"In process 1: ops.attention = fa4 cannot run"):
        resolve_together(OpsConfig(), HERE, TwoProcesses(other=("ops.attention = fa4 cannot run", {})))
    with pytest.raises(UsageError, match=r"^ops.swiglu = triton cannot run on this machine"):
        resolve_together(OpsConfig(swiglu="triton"), HERE, World())


def test_changed_operators_are_told_and_unknown_ones_are_not():
    before = {"attention": {"got": "sdpa"}, "rope": {"got": "eager"}}
    assert changed_operators(before, {"attention": "fa4", "rope": "eager", "swiglu": "torch"}) == [
        "attention sdpa -> fa4"
    ]
