"""A model cut into stages trains like a whole one, under every schedule; how long the stages wait is known before."""

import dataclasses
import itertools

import pytest

from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.model.z2all import PipelineStage
from zero2all.parallel.pipeline import ModelCosts, make_stages, model_costs
from zero2all.parallel.schedule import make_orders, predicted_bubble

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1)]


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
    assert (costs.blocks, costs.head) == ([pytest.approx(6 * matrices + 6 * 64 * 32)] * 3, 6 * 640 * 64)
    moe = MoeConfig(experts=8, experts_per_token=2, expert_size=32, dense_layers=1)
    with_experts = model_costs(dataclasses.replace(model, moe=moe), seq_len=32)
    assert with_experts.blocks[0] == pytest.approx(costs.blocks[0])
    assert with_experts.blocks[1:] == [pytest.approx(costs.blocks[0] + 6 * (64 * 8 + 3 * 64 * (2 * 32 - 128)))] * 2
