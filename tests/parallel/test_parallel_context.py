"""Sequences cut over processes: the run of one process, by both methods, and what is sent for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.parallel import layouts
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.model.config import ModelConfig
from zero2all.ops.footprint import Footprint
from zero2all.parallel.check import spread_problems
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.context import method_of, places_of
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.world import World

SAME = ("tied", "model", "documents", "recompute")
"""What a case has in common with the run of one process; the rest spreads it."""
FEW_HEADS = {"heads": 4, "kv_heads": 1}
OF_TWO = {
    "ulysses": {"context": 2, "documents": True, "recompute": "selective"},
    "gather": {"context": 2, "context_method": "gather", "documents": True, "recompute": "full"},
}
OF_FOUR = {
    "ulysses, one kv head": {"context": 4, "model": FEW_HEADS},
    "gather, ZeRO-1, tied": {"context": 2, "context_method": "gather", "zero": 1, "tied": True},
}


def assert_like_one_process(found, case, steps):
    alone = layouts.course(World(), "adamw", steps=steps, **{name: case[name] for name in SAME if name in case})
    layouts.assert_same_course(found, alone)
    return alone


def run(warm, folder, size, cases, steps):
    return layouts.run(warm, folder, size, {n: {"optimizer": "adamw", "steps": steps, **c} for n, c in cases.items()})


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    """All fast cases, in one group of two processes and one of four."""
    two = run(warm, tmp_path_factory.mktemp("two"), 2, OF_TWO, 2)
    return two | run(warm, tmp_path_factory.mktemp("four"), 4, OF_FOUR, 2)


@pytest.mark.parametrize(("name", "case"), [*OF_TWO.items(), *OF_FOUR.items()])
def test_processes_that_share_sequences_train_like_one(found, name, case):
    assert_like_one_process(found[name], case, 2)


def sent_in_attention(case, size):
    """By the formula, of one process in a step."""
    ranks, method = case["context"], case.get("context_method", "ulysses")
    passes = layouts.SAMPLES // (size // ranks) // layouts.MICRO
    config = layouts.run_config(**case.get("model", {})).model
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", context=ranks,
        context_method=method, recompute=case.get("recompute", "none"), passes=passes,
    )  # fmt: skip
    kinds = {"all-to-all": "alltoall", "all-gather": "allgather", "reduce-scatter": "reduce_scatter"}
    transfers = communication_per_step(config, settings)
    return {kinds[one.collective]: one.given for one in transfers if one.what != "gradients"}


@pytest.mark.parametrize(("name", "size"), [("ulysses", 2), ("gather", 2), ("ulysses, one kv head", 4)])
def test_bytes_sent_for_attention_are_those_of_the_formula(found, name, size):
    sent = {kind: amount for kind, amount in found[name]["sent"].items() if kind != "allreduce"}
    assert sent == sent_in_attention((OF_TWO | OF_FOUR)[name], size)


# ---- one process -----------------------------------------------------------------------------------------------------


def all_places(method, ranks, length):
    parallel, device = ParallelConfig(context_method=method), torch.device("cpu")
    meshes = [Mesh(MeshSizes(context=ranks), rank) for rank in range(ranks)]
    return [places_of(layouts.MODEL, parallel, mesh, length, device) for mesh in meshes]


def test_gathered_keys_are_as_many_for_every_process():
    places = all_places("gather", 4, 16)
    assert places[1].tolist() == [2, 3, 12, 13]
    assert len({int((each + 1).sum()) for each in places}) == 1, "a query sees itself and all tokens before it"


@pytest.mark.parametrize(
    ("heads", "tensor", "context", "method"),
    [(8, 1, 4, "ulysses"), (8, 2, 4, "ulysses"), (8, 4, 4, "gather"), (6, 1, 4, "gather")],
)
def test_auto_takes_ulysses_where_the_heads_of_a_tensor_rank_divide(heads, tensor, context, method):
    model = ModelConfig(vocab_size=60, hidden_size=48, intermediate_size=24, layers=1, heads=heads, kv_heads=2)
    assert method_of(model, ParallelConfig(), MeshSizes(context=context, tensor=tensor)) == method


def problems_of(context, stages=(), **parallel):
    config = layouts.run_config(parallel=ParallelConfig(context=context, **parallel))
    object.__setattr__(config, "stages", [SimpleNamespace(seq_len=length) for length in stages])
    return spread_problems(config, MeshSizes(context=context))


def test_what_does_not_divide_is_refused_in_words():
    assert problems_of(4) == []
    (heads,) = problems_of(8, context_method="ulysses")
    assert "model.heads / parallel.tensor = 4 / 1 = 4 is not a multiple of 8" in heads
    assert "parallel.context_method to gather" in heads
    (length,) = problems_of(8)  # by gathered keys
    assert "data.seq_len 8 is not a multiple of 16: parallel.context 8" in length
    assert "with context_method gather each context rank has two" in length
    (stage,) = problems_of(4, stages=[16, 18])
    assert "stages[1].seq_len 18 is not a multiple of 4: parallel.context 4" in stage
