"""All processes of a run choose the same operators, or none of them starts: real processes, one of them different."""

from __future__ import annotations

import pytest

from tests.train.ranks import RankStarter
from zero2all.train.operators import changed_operators


@pytest.fixture
def ranks(warm, work, tmp_path):
    starter = RankStarter(warm, work.root, tmp_path)
    yield starter
    starter.stop()


@pytest.mark.parametrize(
    ("operator", "name", "said"),
    [
        ("attention", "math", "attention is sdpa on rank 0 and math on rank 1"),
        ("swiglu", "triton", "Rank 1: ops.swiglu = triton cannot run on this machine"),
    ],
    ids=["takes another", "cannot take what it was told"],
)
def test_a_process_that_differs_ends_all_of_them_before_the_first_step(ranks, config, operator, name, said):
    launch = ranks(config(train={"steps": 4}), processes=2, words={1: [f"--ops.{operator}", name]})
    assert launch.wait() == [2, 2], launch.text()
    assert [said in trainer.text() for trainer in launch.trainers] == [True, False], launch.text()
    assert launch.steps() == []


def test_changed_operators_are_told_and_unknown_ones_are_not():
    before = {"attention": {"got": "sdpa"}, "rope": {"got": "eager"}}
    assert changed_operators(before, {"attention": "fa4", "rope": "eager", "swiglu": "torch"}) == [
        "attention sdpa -> fa4"
    ]


def test_an_operator_that_only_has_another_name_now_has_not_changed():
    assert changed_operators({"linear": {"got": "into32"}}, {"linear": "fp32_wgrad"}) == []
