"""Offload: the same training with masters and moments in host memory or in files, in one process and in several."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

from tests.parallel import layouts
from tests.parallel.layouts import CHANNELS, batch_of, course, make_state, run_config
from tests.processes import WarmProcess
from tests.train.states import copies
from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.config import config_from_values
from zero2all.config.training import OptimConfig
from zero2all.estimate import memory
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.world import World
from zero2all.train import offload, streamed
from zero2all.train.offload import host_zeros
from zero2all.train.train_step import StepPlan, train_step

OPTIM = OptimConfig(clip_grad_norm=0.5)
GO, REFUSED = torch.tensor(False), torch.tensor(True)


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    """Several pieces a bucket, as in a large model."""
    before = offload.PIECE_VALUES
    offload.PIECE_VALUES = 300
    yield
    offload.PIECE_VALUES = before


@pytest.fixture(scope="module")
def plain():
    """One process without offload, by the number of steps."""
    return functools.cache(lambda steps: course(World(), "adamw", steps=steps))


def new(dtype="float32", recompute="none", **parallel):
    return make_state(World(), run_config(OPTIM, ParallelConfig(bucket_mb=0.002, **parallel), dtype, recompute))


def train(state, steps):
    for _ in range(steps):
        step = state.step
        train_step(state, batch_of(step, 0, 1), CHANNELS, run_config(OPTIM), World(), StepPlan(1e-2)).result()


def assert_equal_course(found, expected, tolerance=1e-9):
    assert torch.tensor(found["figures"]).allclose(torch.tensor(expected["figures"]), rtol=tolerance, atol=0)
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, values in expected["tensors"].items():
        torch.testing.assert_close(found["tensors"][name], values, rtol=tolerance, atol=tolerance, msg=name)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


# ---- exactness ----


@pytest.mark.parametrize(("kind", "steps"), [("optimizer", 8), ("optimizer_disk", 4)])
def test_one_process_comes_to_the_same_weights_and_moments(plain, kind, steps, tmp_path):
    found = course(World(), "adamw", steps=steps, offload=kind, offload_folder=str(tmp_path))
    assert_equal_course(found, plain(steps))
    assert list(tmp_path.iterdir()) == []  # the files have no names


@pytest.mark.parametrize("zeros", [(1,), pytest.param((0, 1, 2), marks=pytest.mark.slow)], ids=["some", "all"])
def test_two_processes_come_to_the_same(plain, warm: WarmProcess, tmp_path, zeros):
    late = {"offload": "optimizer", "offload_one_step_late": True}
    cases = {f"ZeRO-{zero}": {"zero": zero, "offload": "optimizer"} for zero in zeros}
    cases |= {f"late ZeRO-{zero}": {"zero": zero, **late} for zero in ((2,) if len(zeros) == 1 else (1, 2))}
    cases["weights"] = {"offload": "weights", "recompute": "full"}
    common = {"optimizer": "adamw", "steps": 4}
    found = layouts.run(warm, tmp_path, 2, {name: {**common, **each} for name, each in cases.items()})
    one_process_late = course(World(), **common, **late)
    for name, each in found.items():
        assert_equal_course(each, one_process_late if "late" in name else plain(4))


def test_float32_is_close_to_torch_s_kernel_on_the_device():
    states = new(), new(offload="optimizer")
    for state in states:
        train(state, 5)
    expected, found = (copies(state) for state in states)
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=2e-5, atol=1e-6, msg=name)


def test_a_tied_embedding_trains_too():
    tied = [course(World(), "adamw", tied=True, steps=4, **options) for options in ({}, {"offload": "optimizer"})]
    assert_equal_course(tied[1], tied[0])


# ---- precision and memory ----


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


@pytest.mark.parametrize(
    ("dtype", "late", "bytes_a_value"),
    [("bfloat16", False, 12), ("bfloat16", True, 14), ("float32", False, 12), ("float64", False, 24)],
)
def test_host_memory_is_as_the_formula_says(monkeypatch, dtype, late, bytes_a_value):
    taken = []
    zeros = host_zeros(ParallelConfig(offload="optimizer"), 0)

    def counted(name, count, kind):
        taken.append(count * kind.itemsize)
        return zeros(name, count, kind)

    monkeypatch.setattr("zero2all.train.state.host_zeros", lambda *_: counted)
    state = new(dtype, offload="optimizer", offload_one_step_late=late)
    assert sum(taken) == bytes_a_value * state.weights.own_length


def test_the_estimate_of_memory_knows_the_sizes_of_pieces_and_slots():
    known = (memory.PIECE_VALUES, memory.STAGED_PIECES, memory.STREAMED_BLOCKS)
    assert known == (streamed.PIECE_VALUES, offload.SLOTS, streamed.BLOCK_SLOTS)


# ---- steps ----


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


@pytest.mark.parametrize("late", [False, True])
def test_a_refused_step_leaves_no_trace(late):
    state = new("bfloat16", offload="optimizer", offload_one_step_late=late)
    train(state, 2)
    before = copies(state)
    state.weights.gradients.fill_(torch.nan)
    state.optimizer.step(torch.tensor(torch.nan), REFUSED)
    assert_same(copies(state), before)
    assert not state.weights.gradients.any()


def test_an_error_of_the_worker_reaches_the_step():
    state = new(offload="optimizer")

    def fail(*_arguments):
        raise RuntimeError("no such bucket")

    state.optimizer.update = fail
    with pytest.raises(RuntimeError, match="no such bucket"):
        train(state, 2)


# ---- streamed weights ----


@pytest.mark.parametrize(("recompute", "steps"), [("full", 8), ("selective", 4)])
def test_weights_that_come_block_by_block_train_the_same(plain, recompute, steps):
    assert_equal_course(course(World(), "adamw", steps=steps, offload="weights", recompute=recompute), plain(steps))


@pytest.mark.parametrize(("dtype", "bytes_a_value"), [("bfloat16", 18), ("float32", 16)])
def test_everything_of_streamed_weights_is_on_the_host_but_two_blocks_and_the_tables(dtype, bytes_a_value):
    state = new(dtype, "full", offload="weights")
    train(state, 2)
    weights, own = state.weights, state.optimizer
    buffers = {flat.data_ptr(): flat.nbytes for flat in (weights.weights, weights.masters, weights.gradients)}
    assert sum(buffers.values()) + own.firsts.nbytes + own.seconds.nbytes == bytes_a_value * weights.plan.length
    storages = {parameter.untyped_storage().data_ptr() for parameter in state.model.blocks.parameters()}
    norms = {id(bucket) for bucket in weights.plan.buckets if bucket.kind == "norm"}
    assert len(storages) <= 2 + len(norms)


def test_streamed_weights_are_saved_and_loaded_like_others():
    first, second = new("bfloat16", "full", offload="weights"), new("bfloat16", "full", offload="weights")
    train(first, 2)
    with first.tensors() as saved, second.tensors() as loaded:
        for name, part in loaded.items():
            part.values.copy_(saved[name].values)
    second.resume_from(first.counters())
    for one in (first, second):
        train(one, 2)
    assert_same(copies(second), copies(first))
    samples = second.weights.master_samples(10**9)
    assert all(torch.equal(values, copies(second)[f"model/{name}"].reshape(-1)) for name, values in samples.items())


# ---- one step late ----


class LateReference:
    """An optimizer whose updates reach the weights of the forward pass one step late."""

    writes_weights, clears_gradients = True, False

    def __init__(self, state):
        self.weights, self.inner = state.weights, state.optimizer
        self.newest = self.weights.weights.clone()
        self.set_learning_rate, self.state_tensors = self.inner.set_learning_rate, self.inner.state_tensors

    def step(self, scale, refused):
        before = self.newest
        self.weights.weights.copy_(self.newest)
        self.inner.step(scale, refused)
        self.newest = self.weights.weights.clone()
        self.weights.weights.copy_(before)


def test_late_updates_are_those_of_a_reference_that_holds_each_back_for_a_step():
    reference, state = new("float64"), new("float64", offload="optimizer", offload_one_step_late=True)
    reference.optimizer = LateReference(reference)
    for one in (reference, state):
        train(one, 8)
    state.weights.wait()
    for name, place in state.weights.plan.places.items():  # what the next step would compute with
        there = reference.weights.plan.places[name]
        torch.testing.assert_close(
            state.weights.weights[place], reference.weights.weights[there], rtol=1e-9, atol=1e-12, msg=name
        )
    reference.weights.weights.copy_(reference.optimizer.newest)
    found, expected = copies(state), copies(reference)  # finishes the update
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_goes_on_from_its_checkpoint_equals_the_one_that_saved_it(dtype):
    first = new(dtype, offload="optimizer", offload_one_step_late=True)
    train(first, 3)
    second = new(dtype, offload="optimizer", offload_one_step_late=True)
    with first.tensors() as saved, second.tensors() as loaded:
        for name, part in loaded.items():
            part.values.copy_(saved[name].values)
    second.resume_from(first.counters())
    for one in (first, second):
        train(one, 3)
    assert_same(copies(second), copies(first))


def test_samples_of_the_masters_are_the_newest_and_leave_a_late_update_late():
    state = new("bfloat16", offload="optimizer", offload_one_step_late=True)
    train(state, 3)
    state.weights.wait()
    old = state.weights.weights.clone()
    samples = {name: values.clone() for name, values in state.weights.master_samples(10**9).items()}
    assert torch.equal(state.weights.weights, old)
    found = copies(state)
    assert not torch.equal(state.weights.weights, old)
    for name, values in samples.items():
        assert torch.equal(values, found[f"model/{name}"].reshape(-1)), name


# ---- bad input ----


def test_everything_that_forbids_offload_is_found_together():
    parallel = {"offload": "weights", "zero": 1, "offload_one_step_late": True}
    values = {"parallel": parallel, "optim": {"kind": "lion"}, "ops": {"compile": "block"}}
    config = config_from_values(values, "of a test")
    fields = ["optim.kind lion", "zero 1", "one_step_late", "train.recompute none", "ops.compile block"]
    found = spread_problems(config, MeshSizes(shard=2))
    assert len(found) == len(fields), found
    assert all(each.startswith("parallel.offload weights does not work with ") for each in found)
    assert all(field in each for field, each in zip(fields, found, strict=True)), found
    allowed = {"parallel": {"offload": "weights"}, "train": {"recompute": "full"}}
    assert spread_problems(config_from_values(allowed, "of a test"), MeshSizes()) == []


def test_a_folder_that_nothing_would_use_is_refused():
    with pytest.raises(UsageError, match="only optimizer_disk uses a folder"):
        config_from_values({"parallel": {"offload": "optimizer", "offload_folder": "/fast"}}, "of a test")


def test_a_full_disk_is_found_before_anything_is_built(tmp_path):
    zeros = host_zeros(ParallelConfig(offload="optimizer_disk", offload_folder=str(tmp_path)), 0)
    with pytest.raises(DiskError, match="offload_folder"):
        zeros("masters", 1 << 60, torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["no such folder", "a file", "a file/below"])
def test_a_folder_that_is_none_is_refused_and_not_made(name, tmp_path):
    (tmp_path / "a file").touch()
    zeros = host_zeros(ParallelConfig(offload="optimizer_disk", offload_folder=str(tmp_path / name)), 0)
    with pytest.raises(BadInputError, match=r"offload_folder.*cannot be used.*Choose an existing folder"):
        zeros("masters", 8, torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]
