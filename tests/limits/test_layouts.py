"""Many layouts at once: the rules of a run, and the same times and memory as one at a time."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.limits.test_step import DENSE, EXPERTS, OPERATORS
from zero2all.limits.layouts import enumerate_layouts, in_flight, predict_layouts, settings_of
from zero2all.limits.machine import named_cluster
from zero2all.limits.memory import MemorySettings, estimate_memory
from zero2all.limits.pass_memory import PassMemory, pass_memory
from zero2all.limits.step import predict_step
from zero2all.model.config import ModelConfig
from zero2all.parallel.schedule import make_orders

SETTINGS = MemorySettings(seq_len=2048, micro_batch_samples=1, operators=OPERATORS)
H100 = named_cluster("h100")


def test_layouts_use_all_gpus_and_all_samples():
    layouts, rejected = enumerate_layouts(DENSE, 16, 64, 2048, 8)
    ranks = layouts["tensor"] * layouts["context"] * layouts["pipeline"] * layouts["shard"] * layouts["replicate"]
    assert (ranks == 16).all()
    assert (layouts["samples"] * layouts["passes"] * layouts["shard"] * layouts["replicate"] == 64).all()
    assert len({tuple(layouts.row(number).values()) for number in range(len(layouts))}) == len(layouts)
    assert rejected["fewer kv heads than tensor ranks"] > 0
    assert all(rejected.values())


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_columns_say_what_the_full_models_say(model: ModelConfig):
    layouts, _ = enumerate_layouts(model, 8, 64, 2048, 8, {"samples": [1, 4], "context": [1, 2], "expert": [1, 4]})
    times = predict_layouts(model, SETTINGS, H100, layouts)
    errors, memory = [], []
    for number in random.Random(3).sample(range(len(layouts)), 60):
        row = layouts.row(number)
        here = settings_of(SETTINGS, row, model)
        plain = max(here.pipeline, here.tensor, here.context, here.expert) == 1 and here.zero < 2
        graph = plain and not model.moe.experts
        one = predict_step(model, here, H100, str(row["schedule"]), int(row["chunks"]), graph)
        errors.append(abs(times.seconds[number] / one.estimate - 1))
        if here.pipeline == 1:
            memory.append(abs(times.memory[number] / estimate_memory(model, here).total - 1))
    assert sum(errors) / len(errors) < 0.03
    assert max(memory) < 0.1
    assert sum(memory) / len(memory) < 0.02


def test_a_smaller_share_of_the_states_takes_less_memory_and_recomputing_less_activations():
    few = {"samples": [8], "tensor": [1], "context": [1], "pipeline": [1], "shard": [1, 8]}
    layouts, _ = enumerate_layouts(DENSE, 8, 64, 2048, 8, few)
    times = predict_layouts(DENSE, SETTINGS, H100, layouts)
    found = {
        (row["zero"], row["recompute"]): times.memory[number]
        for number, row in enumerate(map(layouts.row, range(len(layouts))))
    }
    assert found[0, "none"] > found[1, "none"] > found[2, "none"]
    assert found[1, "none"] > found[1, "selective"] > found[1, "full"]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("passes", [4, 8])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: str, passes: int):
    chunks = 2 if schedule == "interleaved" else 1
    frees = "weights" if schedule == "zero_bubble" else "backward"
    orders = make_orders(schedule, 4, chunks, passes)
    for rank, is_last in ((0, False), (3, True)):
        kept = most = 0
        for action in orders[rank]:
            kept += (action.kind == "forward") - (action.kind == frees)
            most = max(most, kept)
        assert in_flight(schedule, 4, chunks, passes, is_last) == pytest.approx(most / chunks, abs=0.51)


def test_many_layouts_take_less_than_a_model_each():
    """Most of the time is spent once per combination; rows are arithmetic."""
    layouts, _ = enumerate_layouts(DENSE, 64, 256, 2048, 8, {"context": [1], "tensor": [1, 2], "samples": [1, 2, 4]})
    calls = 0

    def counting(model: ModelConfig, settings: MemorySettings) -> PassMemory:
        nonlocal calls
        calls += 1
        return pass_memory(model, settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero2all.limits.layouts.pass_memory", counting)
        predict_layouts(DENSE, SETTINGS, dataclasses.replace(H100), layouts)
    assert 0 < calls < len(layouts) / 20
