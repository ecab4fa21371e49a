"""The largest micro-batch that fits: searched without ever running out of memory, and saved."""

import dataclasses
import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.config import RunConfig, config_from_values
from zero2all.config.training import OptimConfig
from zero2all.estimate.memory import ALLOWANCE, estimate_memory
from zero2all.model.config import ModelConfig
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.registry import resolve
from zero2all.parallel.config import MeshSizes
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import init_weights
from zero2all.parallel.world import World
from zero2all.train import micro_batch
from zero2all.train.micro_batch import choose_micro_batch, deciding, find_micro_batch, memory_settings, pass_sizes
from zero2all.train.state import new_state


class SmallDevice:
    """Real tensors, of which only so many bytes may be alive at once."""

    def __init__(self, limit: int) -> None:
        self.limit, self.alive, self.tried = limit, weakref.WeakSet(), []

    @property
    def in_use(self) -> int:
        return sum(tensor.numel() for tensor in self.alive)

    def allocate(self, count: int) -> Tensor:
        if self.in_use + count > self.limit:
            raise torch.OutOfMemoryError(f"tried to allocate {count} bytes, {self.limit - self.in_use} are left")
        tensor = torch.zeros(count, dtype=torch.uint8)
        self.alive.add(tensor)
        return tensor

    def run_pass(self, samples: int) -> None:
        assert self.in_use == 0, "an earlier try left something behind"
        self.tried.append(samples)
        layers = [self.allocate(samples * 100) for _ in range(10)]
        layers.append(layers)  # a cycle: only the garbage collector gives this back


@pytest.mark.parametrize(("rows", "most"), [(1, 1), (24, 3), (64, 50), (97, 11), (97, 1000)])
def test_largest_size_that_fits_is_found_from_any_guess(rows, most):
    candidates = pass_sizes(rows)
    expected = max(number for number in candidates if number <= most)
    for guess in [None, *candidates]:
        device = SmallDevice(most * 1000)
        assert find_micro_batch(device.run_pass, candidates, gc.collect, guess) == expected
        assert device.in_use == 0
        assert len(device.tried) == len(set(device.tried)) <= 2 * math.log2(len(candidates)) + 4


def test_sizes_double_and_then_the_gap_is_halved_and_none_without_fewer_passes_is_tried():
    device = SmallDevice(20 * 1000)
    assert find_micro_batch(device.run_pass, pass_sizes(96), gc.collect) == 20
    assert device.tried == [1, 2, 4, 8, 16, 32, 20, 24]
    assert pass_sizes(64) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 22, 32, 64]
    assert pass_sizes(8) == [1, 2, 3, 4, 8], "4 + 4 is as many passes as 7 + 1"


def test_no_room_for_one_sample_is_an_error_that_says_what_helps_and_another_error_is_not_swallowed():
    helps = r"train\.recompute; `z2a perf memory`.*parallel\.zero 1;.*parallel\.offload optimizer"
    with pytest.raises(UsageError, match=helps):
        find_micro_batch(SmallDevice(500).run_pass, pass_sizes(8), gc.collect)

    def broken(samples: int) -> None:
        raise RuntimeError(f"shapes of {samples} do not match")

    with pytest.raises(RuntimeError, match="do not match"):
        find_micro_batch(broken, [1, 2], gc.collect)


def run_config(parallel=None, **train) -> RunConfig:
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "layers": 2, "heads": 2, "kv_heads": 1}
    values = {"model": {**shape, "max_seq_len": 16}, "data": {"seq_len": 16, "document_mask": True}}
    values["train"] = {"tokens_per_step": 24 * 16, "micro_batch_samples": "auto", "steps": 200, **train}
    return config_from_values({**values, "parallel": {"device": "cpu", **(parallel or {})}}, "of a test")


def world_of(**sizes) -> World:
    mesh = Mesh(MeshSizes(**sizes))
    return World(size=mesh.sizes.processes, mesh=mesh)


def model_of(config: RunConfig) -> Z2all:
    model = Z2all(config.model, resolve(OpsConfig(), "cpu"))
    init_weights(model, 1)
    return model


def test_on_a_cpu_auto_is_a_fixed_rule_that_says_so(tmp_path):
    config = run_config()
    model = model_of(config)
    for world, expected in ((World(), 8), (world_of(replicate=3), 8), (world_of(replicate=5), 5)):
        taken, notes = choose_micro_batch(config, model, world, tmp_path, lambda: None)
        assert taken == expected
        assert "auto on a CPU" in notes[0]


def test_what_was_found_is_recalled_until_something_that_decides_it_changes(tmp_path):
    config, world = run_config(), World()
    ops = resolve(OpsConfig(), "cpu")
    before = deciding(config, ops, world)
    assert micro_batch.recall(tmp_path, before) is None
    micro_batch.remember(tmp_path, before, 12)
    assert micro_batch.recall(tmp_path, deciding(run_config(steps=300), ops, world)) == 12
    for other in (
        deciding(run_config(recompute="full"), ops, world),
        deciding(run_config(tokens_per_step=12 * 16), ops, world),
        deciding(config, resolve(OpsConfig(attention="math"), "cpu"), world),
        deciding(config, ops, world_of(replicate=2)),
        deciding(run_config({"schedule": "gpipe"}), ops, world),
        {**before, "torch": "another"},
    ):
        assert micro_batch.recall(tmp_path, other) is None
    (tmp_path / micro_batch.FILE_NAME).write_bytes(b'{"micro_batch_sam')
    assert micro_batch.recall(tmp_path, before) is None, "half a file is as good as none"


def test_stages_of_a_pipeline_take_the_smallest_of_their_estimates(monkeypatch):
    class OtherStageHasLessRoom(World):
        def gather(self, value):
            return [value, 2]

    monkeypatch.setattr(micro_batch, "deciding", lambda *_: {})
    monkeypatch.setattr(micro_batch, "largest_by_estimate", lambda *_: 6)
    config = run_config({"pipeline": 2})
    world = OtherStageHasLessRoom(size=2, device=torch.device("cuda"), mesh=Mesh(MeshSizes(pipeline=2)))
    assert choose_micro_batch(config, model_of(config), world, None, lambda: None)[0] == 2


def test_a_try_runs_the_real_model_forward_and_backward():
    config = run_config()
    model = model_of(config)
    micro_batch.model_pass(model, config, torch.device("cpu"))(3)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.blocks.parameters())


def test_estimate_of_memory_sees_the_settings_of_the_run():
    ops = resolve(OpsConfig(), "cpu")
    config = run_config({"zero": 2, "offload": "optimizer", "bucket_mb": 4.0}, recompute="full")
    settings = memory_settings(config, ops, Mesh(MeshSizes(shard=2)), 4)
    assert (settings.precision, settings.recompute, settings.documents) == ("float32", "full", True)
    assert settings.passes == 3  # 12 rows for each of 2 processes, 4 at a time
    assert (settings.zero, settings.replicate, settings.shard) == (2, 1, 2)
    assert (settings.offload, settings.bucket_bytes) == ("optimizer", 4e6)
    assert settings.operators["attention"] == ops.footprints["attention"]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_estimate_with_zero_2_is_what_the_fullest_process_holds(kind):
    model = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=160, layers=2, heads=4, kv_heads=2)
    config = run_config({"zero": 2, "bucket_mb": 0.1}, precision="bfloat16")
    config = dataclasses.replace(config, optim=OptimConfig(kind), model=model)
    held = []
    for rank in range(3):
        world = World(mesh=Mesh(MeshSizes(shard=3), rank))
        state = new_state(model_of(config), config.optim, torch.bfloat16, world=world, parallel=config.parallel)
        moments = state.optimizer.state_tensors().values()
        weights = state.weights
        held.append((weights.masters.nbytes, weights.gradients.nbytes, sum(part.values.nbytes for part in moments)))
    settings = memory_settings(config, state.model.ops, world.mesh, 4)
    parts = {part.name: part.bytes for part in estimate_memory(config.model, settings).parts}
    masters, gradients, states = max(held)
    assert (parts["masters"], parts["gradients"]) == (masters, gradients)
    assert parts["masters"] + parts["optimizer"] == pytest.approx(masters + states, rel=0.02)


@pytest.mark.parametrize("zero", [2, 3])
def test_processes_that_exchange_in_every_pass_take_the_estimate_and_say_what_to_do(zero, tmp_path, monkeypatch):
    def tried(*_: object) -> None:
        raise AssertionError("an exchange in which one runs out of memory leaves the others waiting")

    config, mesh = run_config({"zero": zero}), Mesh(MeshSizes(shard=2))
    model, world = model_of(config), World(size=2, device=torch.device("cuda", 0), mesh=mesh)
    for_four = estimate_memory(config.model, memory_settings(config, model.ops, mesh, 4)).total
    card = SimpleNamespace(name="a card", total_memory=int(for_four / (1.0 - ALLOWANCE)) + 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(model, "loss", tried)
    taken, notes = choose_micro_batch(config, model, world, tmp_path, lambda: None)
    assert taken == 4
    assert "4 of 12 samples, from the memory estimate. Every pass communicates" in notes[0]
    assert "set train.micro_batch_samples." in notes[0]
