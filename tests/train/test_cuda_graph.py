"""Passes as a CUDA graph: a replay computes what eager passes compute, and a run continues where there is no graph."""

import numpy as np
import pytest
import torch

from tests.train.states import copies
from tests.train.test_train_gpu import CHANNELS, ROWS, any_wait_is_an_error, gpu_batch, gpu_config, gpu_state
from zero2all.common.errors import UsageError
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device
from zero2all.parallel.world import World
from zero2all.train import build
from zero2all.train.cuda_graph import EAGER_PASSES, MOST_CAPTURES, CudaGraphPasses, choose_cuda_graph, reason_of
from zero2all.train.run import train
from zero2all.train.train_step import StepPlan, train_step

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


# ---- where there is none ----


def fail_twice() -> None:
    try:
        raise ValueError("a list of kernels\nand more")
    finally:
        raise RuntimeError("the capture could not be ended")


def test_the_reason_is_what_went_wrong_first():
    with pytest.raises(RuntimeError) as caught:
        fail_twice()
    assert reason_of(caught.value) == "a list of kernels"


def test_there_is_a_reason_even_where_an_error_says_nothing():
    assert reason_of(AssertionError()) == "AssertionError"
    assert reason_of(ValueError("\n  \nat last")) == "at last"


class GivesUp:
    """In the place of CudaGraphPasses, which needs a GPU: runs passes eagerly, and reports a problem after three of
    them. The run around it is what is tested."""

    def __init__(self, model) -> None:
        self.model, self.passes, self.problem, self.needs_room = model, 0, "", False

    def __call__(self, ids, shares):
        self.passes += 1
        self.problem = "a made-up one" if self.passes >= 3 else ""
        total, losses = self.model.loss(ids[:, :-1], ids[:, 1:], shares)
        total.backward()
        return losses


def test_a_run_goes_on_without_and_says_so_once(work, config, monkeypatch):
    made, said = [], []

    def gives_up(_config, model, *_rest):
        made.append(GivesUp(model))
        return made[0]

    monkeypatch.setattr(build, "choose_cuda_graph", gives_up)
    assert train(config(), work, say=said.append).step == 8
    assert made[0].passes == 4, "two passes a step; the second step is the last with a graph"
    about = [line for line in said if "CUDA graph" in line]
    assert about[0].startswith("CUDA graph: passes will be captured")
    assert about[1:] == [
        "passes can no longer be captured as a CUDA graph: a made-up one. They run without one from here on."
    ]


# ---- what they compute ----


def trained(config, ops, cuda_graph, steps=5, batches=gpu_batch, precision="bfloat16"):
    """Losses of some steps, and the state behind them. Attention by its formula: the fused ones add up in any order."""
    settings = gpu_config(config, precision, ops={"attention": "math", **ops}, cuda_graph=cuda_graph)
    state, world = gpu_state(settings), World(device=pick_device("cuda"))
    state.cuda_graph = choose_cuda_graph(settings, state.model, world.device, 1, 4, ROWS)
    results = [
        train_step(state, batches(seed), CHANNELS, settings, world, StepPlan(lr=0.01)).result() for seed in range(steps)
    ]
    assert (state.cuda_graph is not None and state.cuda_graph.is_captured) == (cuda_graph == "on")
    return results, state


@pytest.mark.parametrize("ops", [{}, {"linear": "fp8"}, {"linear": "plain", "rms_norm": "torch"}], ids=str)
class TestOnAGpu:
    pytestmark = needs_gpu

    def test_a_graph_gives_every_bit(self, config, ops):
        if "fp8" in ops.values() and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8 tensor cores")
        plain, without = trained(config, ops, "off")
        replayed, with_graph = trained(config, ops, "on")
        assert ROWS // 4 * len(plain) > EAGER_PASSES + 2, "some passes are replayed"
        assert [result.loss for result in replayed] == [result.loss for result in plain]
        assert [result.grad_norm for result in replayed] == [result.grad_norm for result in plain]
        assert all(np.array_equal(a.row_nats, b.row_nats) for a, b in zip(replayed, plain, strict=True))
        wanted = copies(without)
        assert all(torch.equal(value, wanted[name]) for name, value in copies(with_graph).items())

    def test_another_shape_is_captured_again(self, config, ops):
        def growing(seed: int) -> Batch:
            batch = gpu_batch(seed)
            return batch if seed < 4 else Batch(batch.tokens[:, :33], batch.channels, batch.channels, 0)

        plain, _ = trained(config, ops, "off", steps=8, batches=growing)
        replayed, _ = trained(config, ops, "on", steps=8, batches=growing)
        assert [result.loss for result in replayed] == [result.loss for result in plain]

    def test_the_host_does_not_wait_for_a_replay(self, config, ops):
        _, state = trained(config, ops, "on", steps=3)
        settings = gpu_config(config, ops={"attention": "math", **ops}, cuda_graph="on")
        batch, world = gpu_batch(9), World(device=pick_device("cuda"))
        with any_wait_is_an_error():
            pending = train_step(state, batch, CHANNELS, settings, world, StepPlan(lr=0.01))
        assert np.isfinite(pending.result().loss)


class TestWhatAutoTakes:
    pytestmark = needs_gpu

    def test_the_operators_of_auto_can_be_captured(self, config):
        plain, _ = trained(config, {"attention": "auto"}, "off")
        replayed, _ = trained(config, {"attention": "auto"}, "on")
        assert [each.loss for each in replayed] == pytest.approx([each.loss for each in plain], rel=1e-3)

    def test_where_the_device_is_the_limit_a_graph_is_taken_if_memory_is_plentiful(self, config, monkeypatch):
        settings = gpu_config(config, cuda_graph="auto")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card nobody knows")
        for taken, is_captured in ((1, True), (2**50, False)):
            state = gpu_state(settings)
            passes = choose_cuda_graph(settings, state.model, pick_device("cuda"), 1, 4, ROWS)
            monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _, taken=taken: taken)
            ids = gpu_batch().tokens[:4]
            for _ in range(EAGER_PASSES + 1):
                passes(ids, torch.full((4, ids.shape[1] - 1), 1e-3, device=ids.device))
            assert passes.needs_room
            assert (passes.is_captured, passes.problem) == (is_captured, "")

    def test_so_can_float32_whose_gradients_autograd_adds_up(self, config):
        plain, without = trained(config, {}, "off", precision="float32")
        replayed, with_graph = trained(config, {}, "on", precision="float32")
        assert [each.loss for each in replayed] == [each.loss for each in plain]
        wanted = copies(without)
        assert all(torch.equal(value, wanted[name]) for name, value in copies(with_graph).items())


def passes_of(config, monkeypatch=None, spoil=None, insists=False):
    """Passes of a small model on the GPU, ids and shares to feed them; `spoil`: called within its loss."""
    settings = gpu_config(config)
    state = gpu_state(settings)
    if spoil is not None:
        loss = state.model.loss
        monkeypatch.setattr(state.model, "loss", lambda ids, *rest: (spoil(ids), loss(ids, *rest))[1])
    ids = gpu_batch().tokens[:4]
    shares = torch.full((4, ids.shape[1] - 1), 1e-3, device=ids.device)
    return CudaGraphPasses(state.model, 0.0, ids.device, insists), ids, shares


class TestWhatCannotBeCaptured:
    pytestmark = needs_gpu

    def test_a_pass_that_asks_the_device_runs_eagerly_and_keeps_no_memory(self, config, monkeypatch):
        passes, ids, shares = passes_of(config, monkeypatch, lambda ids: ids.sum().item())
        wanted = passes(ids, shares).clone()
        for _ in range(EAGER_PASSES - 1):
            passes(ids, shares)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        again = [passes(ids, shares).clone() for _ in range(4)]
        assert passes.problem
        assert not passes.is_captured
        torch.testing.assert_close(again[-1], wanted)
        torch.rand(1, device="cuda")  # the generator is no longer part of a capture
        del again
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before

    def test_who_insists_gets_the_error(self, config, monkeypatch):
        passes, ids, shares = passes_of(config, monkeypatch, lambda ids: ids.sum().item(), insists=True)
        for _ in range(EAGER_PASSES):
            passes(ids, shares)
        with pytest.raises(
            UsageError, match=r"train.cuda_graph is on, but the passes of this run cannot be captured: "
        ):
            passes(ids, shares)

    def test_a_graph_that_leaves_too_little_memory_is_dropped(self, config, monkeypatch):
        passes, ids, shares = passes_of(config)
        # Instead of filling the card to the last megabytes, which others may be using too.
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 2**40))
        for _ in range(EAGER_PASSES + 2):
            passes(ids, shares)
        assert not passes.is_captured
        assert "GiB, and less than that" in passes.problem

    def test_passes_that_keep_changing_their_shape_are_left_alone(self, config):
        passes, ids, shares = passes_of(config)
        for number in range(MOST_CAPTURES + 1):
            rows = 1 + number % 2
            for _ in range(EAGER_PASSES + 1):
                passes(ids[:rows], shares[:rows])
        assert "the shape of a pass has changed" in passes.problem
        assert not passes.is_captured
