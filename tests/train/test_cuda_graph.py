"""Passes as a CUDA graph: which runs capture them, that a replay computes what eager passes compute, and that a run
continues where there is no graph."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.train.states import assert_same_bits, copies
from tests.train.test_train_gpu import ROWS, any_wait_is_an_error, gpu_batch, gpu_config, gpu_state
from tests.train.test_train_gpu import step as gpu_step
from tests.train.test_train_step import make_batch, make_state, settings_of
from tests.train.test_train_step import train_step as cpu_step
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import Choice, Ops, resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device
from zero2all.predict.batch import load_measured_config
from zero2all.train import build, cuda_graph
from zero2all.train.cuda_graph import EAGER_PASSES, check_cuda_graph, choose_cuda_graph, is_worth_it, why_no_cuda_graph
from zero2all.train.run import train

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CPU, CUDA, H200 = torch.device("cpu"), torch.device("cuda"), "NVIDIA H200"
PLAIN = {"linear": "plain", "rms_norm": "torch"}
CAPTURED = [("bfloat16", {}), ("bfloat16", {"linear": "fp8"}), ("bfloat16", PLAIN), ("float32", {})]


def taking(**names: str) -> Ops:
    ops = resolve(OpsConfig(), "cpu")
    choices = tuple(Choice(each.operator, each.asked, names.get(each.operator, each.got), "") for each in ops.choices)
    return dataclasses.replace(ops, choices=choices)


def the_1b(model=None, data=None, parallel=None, **train) -> RunConfig:
    config, _ = load_measured_config("z2all-1b", [])
    changes = {"model": model or {}, "data": data or {}, "parallel": parallel or {}, "train": train}
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
    return dataclasses.replace(config, **sections)


@pytest.mark.parametrize(
    ("changes", "processes", "ops", "reason"),
    [
        ({"recompute": "full"}, 1, {}, "train.recompute full"),
        ({"precision": "float16"}, 1, {}, "float16 scales the loss"),
        ({}, 1, {"attention": "flex"}, "flex is compiled"),
        ({"model": {"residual_dropout": 0.1}}, 1, {}, "dropout"),
        ({"data": {"document_mask": True}}, 1, {}, "document_mask"),
        ({"parallel": {"zero": 2}}, 2, {}, "every pass communicates"),
    ],
)
def test_what_is_decided_on_the_host_cannot(changes, processes, ops, reason):
    assert reason in str(why_no_cuda_graph(the_1b(**changes), CUDA, processes, taking(**ops)))


def test_neither_can_compiled_blocks_but_a_plain_run_can():
    assert "ops.compile" in str(why_no_cuda_graph(the_1b(), CUDA, 1, dataclasses.replace(taking(), compile="block")))
    assert [why_no_cuda_graph(the_1b(), CUDA, processes, taking()) for processes in (1, 2)] == [None, None]


def test_auto_takes_a_graph_where_the_host_is_the_limit():
    config, ours, fp8 = the_1b(), taking(linear="fp32_wgrad"), taking(linear="fp8")
    assert is_worth_it(config, H200, 2 * 2048, ours)
    assert not is_worth_it(config, H200, 16 * 2048, ours)
    assert is_worth_it(config, H200, 4 * 2048, fp8)
    assert not is_worth_it(config, H200, 4 * 2048, ours)
    assert not is_worth_it(config, "a card nobody knows", 2048, ours)


def test_on_where_it_is_impossible_is_an_error_before_any_long_work():
    model = Z2all(dataclasses.replace(the_1b().model, layers=1, hidden_size=32, heads=2, kv_heads=1), taking())
    on, auto = the_1b(cuda_graph="on"), the_1b()
    with pytest.raises(UsageError, match=r"train.cuda_graph is on, .* it needs a CUDA device. Use auto or off"):
        choose_cuda_graph(on, model, CPU, 1, 2, 256)
    with pytest.raises(UsageError, match="it needs a CUDA device"):
        check_cuda_graph(on, CPU, 1, taking())
    with pytest.raises(UsageError, match="the only pass of a step sends gradients"):
        choose_cuda_graph(on, model, CUDA, 2, 128, 128)
    check_cuda_graph(auto, CPU, 1, taking())
    check_cuda_graph(on, CUDA, 1, taking())
    for none in (auto, the_1b(cuda_graph="off")):
        assert choose_cuda_graph(none, model, CPU, 1, 2, 256) is None


def test_the_reason_is_what_went_wrong_first():
    error = RuntimeError("the capture could not be ended")
    error.__context__ = ValueError("a list of kernels\nand more")
    assert cuda_graph.reason_of(error) == "a list of kernels"
    assert cuda_graph.reason_of(AssertionError()) == "AssertionError"
    assert cuda_graph.reason_of(ValueError("\n  \nat last")) == "at last"


class Passes:
    """In the place of CudaGraphPasses, which needs a GPU: eager passes, with a problem after so many of them."""

    needs_room = False

    def __init__(self, model, good: int) -> None:
        self.model, self.good, self.rows, self.problem = model, good, [], ""

    def __call__(self, ids, shares):
        self.rows.append(len(ids))
        self.problem = "a made-up one" if len(self.rows) >= self.good else ""
        total, losses = self.model.loss(ids[:, :-1], ids[:, 1:], shares)
        total.backward()
        return losses


def test_a_run_goes_on_without_and_says_so_once(work, config, monkeypatch):
    made, said = [], []

    def gives_up(_config, model, *_rest):
        made.append(Passes(model, good=3))
        return made[0]

    monkeypatch.setattr(build, "choose_cuda_graph", gives_up)
    assert train(config(), work, say=said.append).step == 8
    assert len(made[0].rows) == 4, "two passes a step; the second step is the last with a graph"
    first, last = (line for line in said if "CUDA graph" in line)
    assert first.startswith("CUDA graph: passes will be captured")
    assert "no longer be captured as a CUDA graph: a made-up one. They run without one from here on" in last


def test_a_shorter_last_pass_runs_without_the_graph_and_changes_nothing(config):
    settings = settings_of(config, micro_batch_samples=3)
    plain, captured = make_state(settings), make_state(settings)
    captured.cuda_graph = Passes(captured.model, good=99)
    one, other = (cpu_step(state, make_batch(), settings) for state in (plain, captured))
    assert captured.cuda_graph.rows == [3, 3]
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert_same_bits(copies(plain), copies(captured))


def trained(config, ops, switch, steps=5, batches=gpu_batch, precision="bfloat16"):
    """Results of some steps, and the state behind them. Attention by its formula: fused ones add up in any order."""
    settings = gpu_config(config, precision, ops={"attention": "math", **ops}, cuda_graph=switch)
    state = gpu_state(settings)
    state.cuda_graph = choose_cuda_graph(settings, state.model, pick_device("cuda"), 1, 4, ROWS)
    results = [gpu_step(state, settings, batch=batches(seed)).result() for seed in range(steps)]
    assert (state.cuda_graph is not None and state.cuda_graph.is_captured) == (switch == "on")
    return results, state


class TestWhatTheyCompute:
    pytestmark = needs_gpu

    @pytest.mark.parametrize(("precision", "ops"), CAPTURED, ids=str)
    def test_a_graph_gives_every_bit(self, config, precision, ops):
        if "fp8" in ops.values() and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8 tensor cores")
        plain, without = trained(config, ops, "off", precision=precision)
        replayed, with_graph = trained(config, ops, "on", precision=precision)
        assert ROWS // 4 * len(plain) > EAGER_PASSES + 2, "some passes are replayed"
        for one, other in zip(replayed, plain, strict=True):
            assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
            assert np.array_equal(one.row_nats, other.row_nats)
        assert_same_bits(copies(without), copies(with_graph))

    def test_another_shape_is_captured_again(self, config):
        def growing(seed: int) -> Batch:
            batch = gpu_batch(seed)
            return batch if seed < 4 else Batch(batch.tokens[:, :33], batch.channels, batch.channels, 0)

        plain, _ = trained(config, {}, "off", steps=8, batches=growing)
        replayed, _ = trained(config, {}, "on", steps=8, batches=growing)
        assert [result.loss for result in replayed] == [result.loss for result in plain]

    def test_the_host_does_not_wait_for_a_replay(self, config):
        _, state = trained(config, {}, "on", steps=3)
        settings, batch = gpu_config(config, ops={"attention": "math"}, cuda_graph="on"), gpu_batch(9)
        with any_wait_is_an_error():
            pending = gpu_step(state, settings, batch=batch)
        assert np.isfinite(pending.result().loss)

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


def passes_of(config, monkeypatch=None, spoil=None, insists=False):
    """Passes of a small model on the GPU, ids and shares to feed them; `spoil`: called within its loss."""
    state = gpu_state(gpu_config(config))
    if spoil is not None:
        loss = state.model.loss
        monkeypatch.setattr(state.model, "loss", lambda ids, *rest: (spoil(ids), loss(ids, *rest))[1])
    ids = gpu_batch().tokens[:4]
    shares = torch.full((4, ids.shape[1] - 1), 1e-3, device=ids.device)
    return cuda_graph.CudaGraphPasses(state.model, 0.0, ids.device, insists), ids, shares


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
        with pytest.raises(UsageError, match=r"cuda_graph is on, but the passes of this run cannot be captured: "):
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
        for number in range(cuda_graph.MOST_CAPTURES + 1):
            rows = 1 + number % 2
            for _ in range(EAGER_PASSES + 1):
                passes(ids[:rows], shares[:rows])
        assert "the shape of a pass has changed" in passes.problem
        assert not passes.is_captured
