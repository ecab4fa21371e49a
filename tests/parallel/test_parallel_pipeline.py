"""A model cut into stages trains like a whole one, under every schedule; how long the stages wait is known before."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import pytest
import torch

from tests.parallel import layouts
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.z2all import PipelineStage
from zero2all.ops.gradient_sink import deferring
from zero2all.ops.linear import deferrable_linear
from zero2all.parallel import pipeline
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.pipeline import ModelCosts, make_stages, model_costs
from zero2all.parallel.schedule import make_orders, predicted_bubble
from zero2all.parallel.world import World

FIVE_BLOCKS = {"model": {"layers": 5}}
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


# ---- schedules ----


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_processes_expect_messages_in_the_order_in_which_they_are_sent_and_never_wait_for_each_other(schedule, chunks):
    for processes, micros in itertools.product((2, 3, 4, 7), (1, 2, 3, 4, 5, 9, 16)):
        stages = processes * chunks
        orders = make_orders(schedule, processes, chunks, micros)
        for rank, order in enumerate(orders):
            after = orders[(rank + 1) % processes]
            done = {kind: [(s, m) for k, s, m in order if k == kind] for kind in ("forward", "backward", "weights")}
            assert sorted(done["forward"]) == sorted(done["backward"]) == sorted(set(done["forward"]))
            assert len(done["forward"]) == chunks * micros
            assert sorted(done["weights"]) == (sorted(done["forward"]) if schedule == "zero_bubble" else [])
            sent = [(s + 1, m) for s, m in done["forward"] if s + 1 < stages]
            assert sent == [(s, m) for k, s, m in after if k == "forward" and s]
            sent = [(s, m) for k, s, m in after if k == "backward" and s]
            assert sent == [(s + 1, m) for s, m in done["backward"] if s + 1 < stages]
        predicted_bubble(schedule, processes, chunks, micros, [1.0] * stages)  # fails where they would wait forever


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("processes", "micros"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(schedule, chunks, processes, micros):
    work = 3.0 * micros  # forward, backward by inputs and backward by weights take 1 each
    waits = (processes - 1) * {"interleaved": 3.0 / chunks, "zero_bubble": 1.0}.get(schedule, 3.0)
    found = predicted_bubble(schedule, processes, chunks, micros, [1.0] * (processes * chunks))
    assert found == pytest.approx(waits / (work + waits))


def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_behind():
    for rank, order in enumerate(make_orders("1f1b", 4, 1, 16)):
        kept = list(itertools.accumulate(1 if action.kind == "forward" else -1 for action in order))
        assert max(kept) == 4 - rank


# ---- stages ----


@pytest.mark.parametrize(("layers", "head", "count"), [(7, 0.3, 3), (9, 4.0, 4), (6, 1.0, 6), (8, 9.0, 2), (5, 0.0, 2)])
def test_no_cut_has_a_cheaper_dearest_stage(layers, head, count):
    costs = ModelCosts([1.0 + 0.1 * (number % 3) for number in range(layers)], head)

    def dearest(borders):
        cuts = [PipelineStage(range(a, b), a == 0, b == layers) for a, b in itertools.pairwise((0, *borders, layers))]
        return max(costs.of(stage) for stage in cuts)

    stages = make_stages(costs, count)
    assert [number for stage in stages for number in stage.blocks] == list(range(layers))
    best = min(dearest(borders) for borders in itertools.combinations(range(1, layers), count - 1))
    assert max(costs.of(stage) for stage in stages) == pytest.approx(best)


def test_costs_are_the_flops_of_a_token():
    model = ModelConfig(vocab_size=640, hidden_size=64, intermediate_size=128, layers=3, heads=4, kv_heads=2)
    costs = model_costs(model, seq_len=32)
    matrices = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128
    assert costs.blocks == [pytest.approx(6 * matrices + 6 * 64 * 32)] * 3
    assert costs.head == 6 * 640 * 64
    moe = MoeConfig(experts=8, experts_per_token=2, expert_size=32, dense_layers=1)
    with_experts = model_costs(dataclasses.replace(model, moe=moe), seq_len=32)
    assert with_experts.blocks[0] == pytest.approx(costs.blocks[0])
    assert with_experts.blocks[1:] == [pytest.approx(costs.blocks[0] + 6 * (64 * 8 + 3 * 64 * (2 * 32 - 128)))] * 2


def test_everything_that_forbids_a_pipeline_is_said():
    config = layouts.run_config(
        parallel=ParallelConfig(pipeline=4, schedule="interleaved", chunks=2), tied_embeddings=True, layers=6
    )
    found = pipeline.problems(config, MeshSizes(pipeline=4))
    assert len(found) == 2
    assert "parallel.pipeline 4 x parallel.chunks 2 = 8 stages, but model.layers is 6" in found[0]
    assert "model.tied_embeddings does not work with parallel.pipeline 4" in found[1]
    assert pipeline.problems(config, MeshSizes()) == []
    deferred = layouts.run_config(parallel=ParallelConfig(pipeline=2, schedule="zero_bubble", zero=3))
    assert (
        "zero_bubble does not work with parallel.zero 3"
        in pipeline.problems(deferred, MeshSizes(pipeline=2, shard=2))[0]
    )


def test_a_deferred_product_is_added_when_the_queue_is_worked_off():
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.nn.Parameter(torch.randn(5, 4))
    expected = torch.autograd.grad(torch.nn.functional.linear(x, weight).square().sum(), (x, weight))
    queue = []
    with deferring(queue):
        deferrable_linear(x, weight).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, expected[0])
    for _ in range(2):
        for add_product in queue:
            add_product()
    torch.testing.assert_close(weight.grad, 2 * expected[1])


# ---- processes ----


@functools.cache
def course_alone(arguments):
    return layouts.course(World(), "adamw", **json.loads(arguments))


def assert_like_one_process(found, **arguments):
    alone = course_alone(json.dumps(arguments))
    layouts.assert_same_course(found, alone)


OF_TWO = {
    "1f1b, uneven passes": {"documents": True, "z_loss": 0.01, "micro": 3},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zero_bubble": {"schedule": "zero_bubble", "recompute": "full"},
    "gpipe, fewer passes than stages": {"schedule": "gpipe", "micro": 8},
}
OF_FOUR = {
    "four stages": {"pipeline": 4},
    "ZeRO-1 x interleaved": {"pipeline": 2, "zero": 1, "schedule": "interleaved", "chunks": 2},
    "ZeRO-3": {"pipeline": 2, "zero": 3},
    "replicate x zero_bubble": {"pipeline": 2, "schedule": "zero_bubble"},
}
PARALLEL_FIELDS = ("pipeline", "zero", "schedule", "chunks")


def run_cases(warm, folder, size, cases, steps):
    given = {name: {"optimizer": "adamw", **FIVE_BLOCKS, "steps": steps, **case} for name, case in cases.items()}
    return layouts.run(warm, folder, size, given)


def assert_cases(found, cases, steps):
    for name, case in cases.items():
        of_model = {key: value for key, value in case.items() if key not in PARALLEL_FIELDS}
        assert_like_one_process(found[name], **FIVE_BLOCKS, steps=steps, **of_model)


def test_two_stages_train_like_one_process(warm, tmp_path):
    cases = {name: {"pipeline": 2, **case} for name, case in OF_TWO.items()}
    found = run_cases(warm, tmp_path, 2, cases, 3)
    assert_cases(found, cases, 3)
    of_a_micro_batch = layouts.SEQ_LEN * layouts.MODEL.hidden_size * 8
    for kind in ("send", "recv"):
        assert found["1f1b, uneven passes"]["sent"][kind] == layouts.SAMPLES * of_a_micro_batch
        assert found["interleaved"]["sent"][kind] == 3 * layouts.SAMPLES * of_a_micro_batch  # of three borders


def test_four_processes_train_like_one_and_resume_from_each_other(warm, tmp_path):
    names = ["pipeline", "ZeRO-1 x interleaved", "ZeRO-2"]
    resumed = {"folder": str(tmp_path / "runs"), "layouts": names, "every": False}
    cases = {name: {"optimizer": "adamw", "steps": 3, **FIVE_BLOCKS, **case} for name, case in OF_FOUR.items()}
    found = layouts.run(warm, tmp_path, 4, {**cases, "pairs": {**resumed, **FIVE_BLOCKS}})
    assert_cases(found, OF_FOUR, 3)
    del found["pairs"]["own_bytes_by_rank"]
    assert len(found["pairs"]) == 3
    for name, (differ, loss) in found["pairs"].items():
        assert differ == [], name
        assert loss < 1e-9, name
