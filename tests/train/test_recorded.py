"""Which runs record their passes; on a GPU, that a recording computes what the passes themselves compute."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.train.states import copies
from tests.train.test_train_gpu import CHANNELS, ROWS, any_wait_is_an_error, gpu_batch, gpu_config, gpu_state
from zero2all.common.errors import UsageError
from zero2all.config import RunConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import Choice, Ops, resolve
from zero2all.packed.loader import Batch
from zero2all.parallel.device import pick_device
from zero2all.parallel.world import World
from zero2all.perf.measured_config import load_measured_config
from zero2all.train.recorded import EAGER_PASSES, is_worth_it, recorded_passes, why_not_recorded
from zero2all.train.step import StepPlan, train_step

CUDA, H200 = torch.device("cuda"), "NVIDIA H200"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def taking(**names: str) -> Ops:
    """The CPU's operators under other names."""
    ops = resolve(OpsConfig(), "cpu")
    choices = tuple(Choice(each.operator, each.asked, names.get(each.operator, each.got), "") for each in ops.choices)
    return dataclasses.replace(ops, choices=choices)


def the_1b(**changes) -> RunConfig:
    config, _ = load_measured_config("z2all-1b", [])
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


# ---- which runs ----


def test_a_plain_run_on_one_gpu_can_be_recorded():
    assert why_not_recorded(the_1b(), CUDA, 1, taking()) is None


@pytest.mark.parametrize(
    ("changes", "processes", "ops", "reason"),
    [
        ({}, 2, {}, "processes exchange gradients"),
        ({"recompute": "full"}, 1, {}, "train.recompute: full"),
        ({"precision": "float16"}, 1, {}, "float16 scales the loss"),
        ({}, 1, {"attention": "flex"}, "flex is compiled"),
        ({"cuda_graph": "on", "micro_batch_samples": "auto"}, 1, {}, "would both want the memory"),
        ({}, 1, {"rope": "liger", "swiglu": "liger"}, "liger-kernel's rope, swiglu"),
    ],
)
def test_what_is_decided_on_the_host_cannot(changes, processes, ops, reason):
    assert reason in str(why_not_recorded(the_1b(**changes), CUDA, processes, taking(**ops)))


def test_neither_can_dropout_documents_or_compiled_blocks():
    config = the_1b()
    dropping = dataclasses.replace(config, model=dataclasses.replace(config.model, residual_dropout=0.1))
    assert "dropout" in str(why_not_recorded(dropping, CUDA, 1, taking()))
    masked = dataclasses.replace(config, data=dataclasses.replace(config.data, document_mask=True))
    assert "document_mask" in str(why_not_recorded(masked, CUDA, 1, taking()))
    compiled = dataclasses.replace(taking(), compile="block")
    assert "ops.compile" in str(why_not_recorded(config, CUDA, 1, compiled))


def test_auto_records_where_the_host_is_the_limit():
    config, ours, fp8 = the_1b(), taking(linear="into32"), taking(linear="fp8")
    assert is_worth_it(config, H200, 2 * 2048, ours)
    assert not is_worth_it(config, H200, 16 * 2048, ours)
    assert is_worth_it(config, H200, 4 * 2048, fp8)
    assert not is_worth_it(config, H200, 4 * 2048, ours)
    assert not is_worth_it(config, "a card nobody knows", 2048, ours)


def test_a_wish_that_cannot_be_fulfilled_is_an_error():
    model = Z2all(dataclasses.replace(the_1b().model, layers=1, hidden_size=32, heads=2, kv_heads=1), taking())
    cpu = torch.device("cpu")
    with pytest.raises(UsageError, match=r"train.cuda_graph = on: .* it needs a CUDA device. Use auto or off"):
        recorded_passes(the_1b(cuda_graph="on"), model, cpu, 1, 2, 256)
    assert recorded_passes(the_1b(), model, cpu, 1, 2, 256) is None
    assert recorded_passes(the_1b(cuda_graph="off"), model, cpu, 1, 2, 256) is None


# ---- what they compute ----


def trained(config, ops, cuda_graph, steps=5, batches=gpu_batch, precision="bfloat16"):
    """Losses of some steps, and the state behind them. Attention by its formula: the fused ones add up in any order."""
    settings = gpu_config(config, precision, ops={"attention": "math", **ops}, cuda_graph=cuda_graph)
    state, world = gpu_state(settings), World(device=pick_device("cuda"))
    state.recorded = recorded_passes(settings, state.model, world.device, 1, 4, ROWS)
    results = [
        train_step(state, batches(seed), CHANNELS, settings, world, StepPlan(lr=0.01)).result() for seed in range(steps)
    ]
    assert (state.recorded is not None and state.recorded.is_recorded) == (cuda_graph == "on")
    return results, state


@pytest.mark.parametrize("ops", [{}, {"linear": "fp8"}, {"linear": "plain", "rms_norm": "torch"}], ids=str)
class TestOnAGpu:
    pytestmark = needs_gpu

    def test_a_recording_gives_every_bit(self, config, ops):
        if "fp8" in ops.values() and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no float8 tensor cores")
        plain, without = trained(config, ops, "off")
        replayed, recorded = trained(config, ops, "on")
        assert ROWS // 4 * len(plain) > EAGER_PASSES + 2, "some passes are replayed"
        assert [result.loss for result in replayed] == [result.loss for result in plain]
        assert [result.grad_norm for result in replayed] == [result.grad_norm for result in plain]
        assert all(np.array_equal(a.row_nats, b.row_nats) for a, b in zip(replayed, plain, strict=True))
        wanted = copies(without)
        assert all(torch.equal(value, wanted[name]) for name, value in copies(recorded).items())

    def test_another_shape_is_recorded_anew(self, config, ops):
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestWhatAutoTakes:
    def test_the_operators_of_auto_can_be_recorded(self, config):
        plain, _ = trained(config, {"attention": "auto"}, "off")
        replayed, _ = trained(config, {"attention": "auto"}, "on")
        assert [each.loss for each in replayed] == pytest.approx([each.loss for each in plain], rel=1e-3)

    def test_so_can_float32_whose_gradients_autograd_adds_up(self, config):
        plain, _ = trained(config, {}, "off", precision="float32")
        replayed, _ = trained(config, {}, "on", precision="float32")
        assert [each.loss for each in replayed] == [each.loss for each in plain]
