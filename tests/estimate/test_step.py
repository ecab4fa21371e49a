"""The time of a step: bounds, sums, and what must make it longer."""

import dataclasses
import itertools

import pytest

from zero2all.common.errors import UsageError
from zero2all.estimate.machine import named_cluster
from zero2all.estimate.memory import MemorySettings
from zero2all.estimate.step import PassOrder, predict_step, stage_blocks
from zero2all.model.config import ModelConfig, MoeConfig
from zero2all.ops.registry import TAKEN_ON_A_GPU, footprints

OPERATORS = footprints(TAKEN_ON_A_GPU)
FLOAT8 = footprints({**TAKEN_ON_A_GPU, "linear": "fp8"})
DENSE = ModelConfig(vocab_size=64320)
EXPERTS = ModelConfig(vocab_size=64320, hidden_size=1024, moe=MoeConfig(experts=32, experts_per_token=4))
H200 = named_cluster("h200")


def settings(**changes: object) -> MemorySettings:
    first = MemorySettings(seq_len=2048, micro_batch_samples=4, operators=OPERATORS, passes=8)
    return dataclasses.replace(first, **changes)  # type: ignore[arg-type]


LAYOUTS = {
    "one GPU": settings(),
    "recompute": settings(recompute="full"),
    "float8": settings(operators=FLOAT8),
    "replicas": settings(replicate=16),
    "zero 1": settings(zero=1, shard=8),
    "zero 2": settings(zero=2, shard=4, replicate=2),
    "zero 3": settings(zero=3, shard=64),
    "tensor": settings(tensor=8),
    "context": settings(context=4, replicate=2),
    "pipeline": settings(pipeline=4, replicate=4),
    "all": settings(pipeline=2, tensor=4, context=2, zero=1, shard=4),
    "offload": settings(offload="optimizer"),
    "experts": settings(expert=4, zero=1, shard=8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bounds_hold_and_parts_sum_to_the_step(name: str):
    for cluster in ("b200", "h200", "a100-80g"):
        if (name, cluster) == ("float8", "a100-80g"):
            with pytest.raises(UsageError, match="no peak for float8"):
                predict_step(DENSE, LAYOUTS[name], named_cluster(cluster))
            return
        step = predict_step(EXPERTS if name == "experts" else DENSE, LAYOUTS[name], named_cluster(cluster))
        assert all(0 <= part.lower <= part.estimate <= part.upper for part in step.parts)
        low, high = step.interval
        assert 0 < step.lower <= low <= step.estimate <= high <= step.upper
        assert step.estimate == pytest.approx(sum(part.estimate for part in step.parts))
        assert 0 < step.mfu["causal"] < 1


def test_more_work_takes_longer():
    for smaller, larger in (
        ({}, {"micro_batch_samples": 8}),
        ({}, {"passes": 9}),
        ({}, {"seq_len": 4096, "micro_batch_samples": 2}),
        ({}, {"recompute": "selective"}),
        ({"recompute": "selective"}, {"recompute": "full"}),
        ({}, {"replicate": 8}),
        ({"replicate": 8}, {"replicate": 64}),
        ({"operators": FLOAT8}, {}),
    ):
        less, more = (predict_step(DENSE, settings(**changes), H200).estimate for changes in (smaller, larger))
        assert less < more, (smaller, larger)
    base = predict_step(DENSE, settings(), H200).estimate
    for changes in ({"layers": 24}, {"intermediate_size": 6144}):
        assert predict_step(dataclasses.replace(DENSE, **changes), settings(), H200).estimate > base
    assert predict_step(DENSE, settings(), named_cluster("a100-80g")).estimate > base


def test_the_network_exposes_what_nvlink_hides_and_a_graph_takes_the_host_away():
    inside = predict_step(DENSE, settings(zero=3, shard=8), H200)
    across = predict_step(DENSE, settings(zero=3, shard=64), H200)
    axis = "communication, shard"
    assert inside.seconds(axis) < across.seconds(axis)
    assert next(part for part in inside.parts if part.name == axis).hidden > 0
    small = settings(micro_batch_samples=1)
    eager, captured = predict_step(DENSE, small, H200), predict_step(DENSE, small, H200, PassOrder(cuda_graph=True))
    assert eager.seconds("host") > 0
    assert (captured.seconds("host"), eager.estimate - eager.seconds("host")) == (0, pytest.approx(captured.estimate))


def test_schedules_are_ordered_by_their_bubbles():
    piped = settings(pipeline=4)
    orders = [PassOrder("zero_bubble"), PassOrder("interleaved", 2), PassOrder("1f1b")]
    bubbles = [predict_step(DENSE, piped, H200, order).seconds("bubble") for order in orders]
    assert bubbles == sorted(bubbles)
    assert predict_step(DENSE, piped, H200, PassOrder("gpipe")).seconds("bubble") == bubbles[-1]


def test_the_cut_into_stages_has_the_cheapest_dearest_stage():
    for layers, stages, head in itertools.product((4, 22, 61), (2, 3, 4), (0.0, 1.7, 5.2)):
        others, last = stage_blocks(layers, stages, head)
        assert last >= 1
        assert others * (stages - 1) + last >= layers
        best = min(max(-(-(layers - end) // (stages - 1)), end + head) for end in range(1, layers - stages + 2))
        assert max(others, last + head) == best


def test_the_data_sheet_of_an_h200_comes_within_a_tenth_of_measurements():
    """benchmarks/results/ablation.json, z2all-1b; the interval has to hold them too."""
    rows = ((16, 4, OPERATORS, False, 1.693), (2, 16, OPERATORS, True, 0.911), (16, 4, FLOAT8, False, 1.300))
    for samples, passes, operators, graph, measured in rows:
        here = settings(micro_batch_samples=samples, passes=passes, operators=operators)
        step = predict_step(DENSE, here, H200, PassOrder(cuda_graph=graph))
        assert step.estimate == pytest.approx(measured, rel=0.1)
        assert step.interval[0] <= measured <= step.interval[1]
