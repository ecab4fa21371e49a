"""Offload: the same training with masters and moments in host memory, in one process and in several."""

import threading

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.layouts import CHANNELS, batch_of, course, make_state, run_config
from tests.train.states import assert_same_bits, copies, loaded_from
from zero2all.config import config_from_values
from zero2all.config.training import OptimConfig
from zero2all.estimate import memory
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.world import World
from zero2all.train import offload
from zero2all.train.train_step import StepPlan, train_step

OPTIM = OptimConfig(clip_grad_norm=0.5)
GO, REFUSED = torch.tensor(False), torch.tensor(True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several pieces a bucket, as in a large model."""
    monkeypatch.setattr(offload, "PIECE_VALUES", 300)


def new(dtype="float32", recompute="none", **parallel):
    return make_state(World(), run_config(OPTIM, ParallelConfig(bucket_mb=0.002, **parallel), dtype, recompute))


def train(state, steps):
    for _ in range(steps):
        step = state.step
        train_step(state, batch_of(step, 0, 1), CHANNELS, run_config(OPTIM), World(), StepPlan(1e-2)).result()


@pytest.mark.parametrize("tied", [False, True])
def test_one_process_comes_to_the_same_weights_and_moments(tied):
    plain, found = (course(World(), "adamw", tied, steps=4, **each) for each in ({}, {"offload": "optimizer"}))
    layouts.assert_same_course(found, plain)


def test_bfloat16_weights_are_rounded_from_masters_that_are_updated_in_float32():
    state, plain = new("bfloat16", offload="optimizer"), new("bfloat16")
    weights = state.weights
    assert weights.masters.dtype == torch.float32
    generator = torch.Generator().manual_seed(1)
    for number in range(3):
        gradients = torch.randn(weights.plan.length, generator=generator)
        for one in (state, plain):
            for name, place in one.weights.plan.places.items():
                one.weights.gradients[place] = gradients[weights.plan.places[name]]
            one.optimizer.set_learning_rate(0.01 * (number + 1))
            one.optimizer.step(torch.tensor(0.5), GO)
            one.weights.wait()
    found, expected = copies(state), copies(plain)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-9, msg=name)
    for name, part in weights.parts(weights.weights).items():
        assert torch.equal(part.values, found[f"model/{name}"].bfloat16()), name


@pytest.mark.parametrize(("dtype", "bytes_a_value"), [("bfloat16", 12), ("float64", 24)])
def test_host_memory_is_as_the_formula_says(dtype, bytes_a_value):
    state = new(dtype, offload="optimizer")
    weights, own = state.weights, state.optimizer
    assert weights.masters.nbytes + own.firsts.nbytes + own.seconds.nbytes == bytes_a_value * weights.own_length
    assert (memory.PIECE_VALUES, memory.STAGED_PIECES) == (1 << 24, offload.SLOTS)


def test_a_refused_step_leaves_no_trace():
    state = new("bfloat16", offload="optimizer")
    train(state, 2)
    before = copies(state)
    state.weights.gradients.fill_(torch.nan)
    state.optimizer.step(torch.tensor(torch.nan), REFUSED)
    assert_same_bits(copies(state), before)
    assert not state.weights.gradients.any()


def test_a_run_that_goes_on_from_its_checkpoint_equals_the_one_that_saved_it():
    first, second = (new("bfloat16", offload="optimizer") for _ in range(2))
    train(first, 3)
    loaded_from(second, copies(first))
    second.resume_from(first.counters())
    for one in (first, second):
        train(one, 3)
    assert_same_bits(copies(second), copies(first))


def test_the_forward_pass_begins_while_later_blocks_are_still_updated():
    state = new(offload="optimizer")
    began, apply = threading.Event(), state.optimizer.update
    last = state.weights.plan.backward_order[0]

    def update(bucket, *arguments):
        if bucket == last and state.step:
            assert began.wait(300), "the forward pass waits for the last bucket"
        apply(bucket, *arguments)

    state.optimizer.update = update
    state.model.blocks[0].register_forward_hook(lambda *_: began.set() if state.step else None)
    train(state, 2)
    assert began.is_set()


def test_an_error_of_the_worker_reaches_the_step():
    state = new(offload="optimizer")

    def fail(*_arguments):
        raise RuntimeError("no such bucket")

    state.optimizer.update = fail
    with pytest.raises(RuntimeError, match="no such bucket"):
        train(state, 2)


def test_everything_that_forbids_offload_is_found_together():
    config = config_from_values({"parallel": {"offload": "optimizer"}, "optim": {"kind": "muon"}}, "of a test")
    found = spread_problems(config, MeshSizes(context=2, shard=2))
    said = [each.partition("parallel.offload optimizer does not work with ")[2] for each in found]
    assert [each[:9] for each in said] == ["context 2", "optim.kin"]
    assert spread_problems(config_from_values({"parallel": {"offload": "optimizer"}}, "of a test"), MeshSizes()) == []
