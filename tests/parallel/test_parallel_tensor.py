"""Tensor parallelism: what each rank has, the loss of a cut vocabulary, what is refused, and runs like one process."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tests.parallel import layouts
from zero2all.config.training import OptimConfig
from zero2all.estimate.communication import communication_per_step
from zero2all.estimate.memory import MemorySettings
from zero2all.ops.cut_vocabulary import Exchange, cut_linear_cross_entropy
from zero2all.ops.footprint import Footprint
from zero2all.ops.linear_cross_entropy import chunked_linear_cross_entropy
from zero2all.ops.registry import resolve
from zero2all.parallel.buckets import plan_buffers
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import held_table, layout_table
from zero2all.parallel.tensor import problems
from zero2all.parallel.world import World
from zero2all.train.build import op_context
from zero2all.train.step_stats import SCALARS

BIASES = {"attention_bias": "all", "mlp_bias": True}
QK_NORM = {"qk_norm": True, "init_qk_gain": 1.5}
ONE_KV_HEAD: dict[str, Any] = {"model": {"kv_heads": 1}, "copy_kv_heads": True}
SPREADING = ("tensor", "zero", "shard", "replicate", "copy_kv_heads", "offload", "pipeline", "schedule", "chunks")
"""Arguments of `layouts.course` that say where it runs, not what."""

# ---- what each rank has ------------------------------------------------------------------------------------------


def boxes(rank: int, ranks: int, **model: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
    config = layouts.run_config(**model).model
    table = layout_table(config)
    mesh = Mesh(MeshSizes(tensor=ranks), rank)
    held = held_table(table, [one.holder for one in table], mesh)
    return {one.name.removeprefix("blocks.0."): (one.held.offsets, one.held.lengths, one.copies) for one in held}


def test_a_rank_has_whole_heads_whole_pairs_and_rows_of_the_vocabulary():
    found = boxes(1, 2)
    assert found["attention.q.weight"] == ((8, 0), (8, 16), 1)  # 2 of 4 heads of width 4
    assert found["attention.v.weight"] == ((4, 0), (4, 16), 1)  # 1 of 2
    assert found["attention.out.weight"] == ((0, 8), (16, 8), 1)
    assert found["feed_forward.gate_up_pairs.weight"] == ((24, 0), (24, 16), 1)
    assert found["feed_forward.down.weight"] == ((0, 12), (16, 12), 1)
    assert found["head.weight"] == ((32, 0), (32, 16), 1)
    assert found["norm.weight"] == ((0,), (16,), 1)


def test_with_fewer_kv_heads_than_ranks_neighbours_have_the_kv_head_of_their_query_heads():
    keys = [boxes(rank, 4)["attention.k.weight"] for rank in range(4)]
    assert keys == [((0, 0), (4, 16), 2), ((0, 0), (4, 16), 2), ((4, 0), (4, 16), 2), ((4, 0), (4, 16), 2)]


def test_operators_are_chosen_for_the_sizes_of_one_rank():
    context = op_context(layouts.run_config(parallel=ParallelConfig(tensor=2)), "cpu", torch.float32)
    assert (context.heads, context.kv_heads, context.intermediate_size, context.vocab_size) == (2, 1, 12, 32)
    whole = op_context(layouts.run_config(), "cpu", torch.float32)
    assert (whole.heads, whole.kv_heads, whole.intermediate_size, whole.vocab_size) == (4, 2, 24, 64)


def test_an_operator_that_needs_the_whole_head_says_so():
    config = layouts.run_config(parallel=ParallelConfig(tensor=2))
    asked = type(config.ops)(linear_cross_entropy="off", strict=False)
    ops = resolve(asked, op_context(config, "cpu", torch.float32))
    assert ops.taken["linear_cross_entropy"] == "chunked"
    assert "parallel.tensor" in "\n".join(ops.notes())


# ---- the loss of a cut vocabulary --------------------------------------------------------------------------------


class Threads:
    """Ranks as threads that exchange through shared memory."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given = threading.Barrier(ranks, timeout=120), [torch.empty(0)] * ranks

    def exchange(self, rank: int) -> Exchange:
        def together(values: Tensor, reduce: Any) -> Tensor:
            self._given[rank] = values.clone()
            self._barrier.wait()
            values.copy_(reduce(torch.stack(self._given)))
            self._barrier.wait()
            return values

        return Exchange(
            rank,
            lambda values: together(values, lambda given: given.amax(dim=0)),
            lambda values: together(values, lambda given: given.sum(dim=0)),
        )


@pytest.mark.parametrize("vocab_size", [64, 61, 40], ids=["no padding", "some", "one rank has nothing else"])
@pytest.mark.parametrize("z", [0.0, 1e-2])
def test_the_loss_of_a_cut_vocabulary_is_that_of_the_whole(monkeypatch, vocab_size, z):
    monkeypatch.setattr("zero2all.ops.linear_cross_entropy.CHUNK_ROWS", 8)  # three chunks, the last not full
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 10, 6, generator=generator, dtype=torch.float64)
    head = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (2, 10), generator=generator)
    targets[0, 3], targets[1, 9] = -1, -100
    weights = torch.rand(2, 10, generator=generator, dtype=torch.float64)

    def outcome(loss: Any, rows: Tensor) -> tuple[Tensor, ...]:
        own_hidden, own_rows = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        total, losses = loss(own_hidden, own_rows, targets, weights, vocab_size, z)
        total.backward()
        return total.detach(), losses, own_hidden.grad, own_rows.grad

    threads, found = Threads(4), [None] * 4

    def work(rank: int) -> None:
        loss = cut_linear_cross_entropy("chunked", threads.exchange(rank))
        found[rank] = outcome(loss, head[16 * rank : 16 * rank + 16])

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total, losses, dhidden, dhead = outcome(chunked_linear_cross_entropy, head)
    for of_rank in found:
        torch.testing.assert_close(of_rank[:2], (total, losses), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(of_rank[2] for of_rank in found), dhidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([of_rank[3] for of_rank in found]), dhead, rtol=1e-12, atol=1e-12)


# ---- what is refused ---------------------------------------------------------------------------------------------


def refusals(
    tensor: int,
    optimizer: str = "adamw",
    may_copy: bool = False,
    compiled: Literal["none", "block"] = "none",
    **model: Any,
) -> str:
    parallel = ParallelConfig(tensor=tensor, copy_kv_heads=may_copy)
    config = layouts.run_config(OptimConfig(optimizer), parallel, **model)
    config = replace(config, ops=replace(config.ops, compile=compiled))
    return "\n".join(problems(config, MeshSizes(tensor=tensor)))


def test_what_divides_is_not_refused():
    assert refusals(1) == refusals(2) == refusals(4, may_copy=True) == ""


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (["model.heads 4 is not a multiple of parallel.tensor 8"], {"tensor": 8}),
        (["model.intermediate_size 26", "parallel.tensor 4"], {"tensor": 4, "intermediate_size": 26}),
        (["model.kv_heads 2 is less than parallel.tensor 4", "copy_kv_heads"], {"tensor": 4}),
        (["model.kv_heads 2 and parallel.tensor 3", "neither"], {"tensor": 3, "may_copy": True}),
        (["60 ids", "64 rows", "parallel.tensor 3", "a divisor of 64, or model.vocab_size to 192"], {"tensor": 3}),
        (["ops.compile block does not work with parallel.tensor 2"], {"tensor": 2, "compiled": "block"}),
        (["optim.kind adamw_8bit", "row by row"], {"tensor": 2, "optimizer": "adamw_8bit"}),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(said, arguments):
    text = refusals(**arguments)
    assert all(words in text for words in said), text


# ---- like one process --------------------------------------------------------------------------------------------


def largest_difference(found: dict[str, Any], case: dict[str, Any]) -> float:
    """Of losses, gradient norms and final tensors to those of one process."""
    alone = layouts.course(World(), **{name: value for name, value in case.items() if name not in SPREADING})
    figures = [
        abs(mine - exact) / abs(exact)
        for one, other in zip(found["figures"], alone["figures"], strict=True)
        for mine, exact in zip(one, other, strict=True)
    ]
    assert found["tensors"].keys() == alone["tensors"].keys()
    tensors = [(found["tensors"][name] - value).abs().max().item() for name, value in alone["tensors"].items()]
    return max(*figures, *tensors)


OF_TWO = {
    "tied, documents, z, selective": {
        **{"optimizer": "adamw", "tied": True, "documents": True, "z_loss": 1e-2, "recompute": "selective"},
        **{"tensor": 2, "model": {"vocab_size": 30, "layers": 2}},  # the second rank has only padding
    },
    "biases, copied kv heads, full": {
        **{"optimizer": "adamw", "recompute": "full", "tensor": 2, "copy_kv_heads": True},
        **{"model": {**BIASES, **QK_NORM, "kv_heads": 1, "layers": 2}},
    },
}
OF_FOUR = {
    "ZeRO-1, copied kv heads": {"optimizer": "adamw", "tensor": 2, "zero": 1, **ONE_KV_HEAD},
    "ZeRO-3": {"optimizer": "adamw", "tensor": 2, "zero": 3, "model": {**BIASES, **QK_NORM, "layers": 2}},
    "muon, ZeRO-1": {"optimizer": "muon", "tensor": 2, "zero": 1, "model": {"layers": 2}},
    "muon, ZeRO-3": {"optimizer": "muon", "tensor": 2, "zero": 3, "model": {"layers": 2}},
}
MUON_OF_TWO = {"optimizer": "muon", "tensor": 2, "copy_kv_heads": True, "model": {"kv_heads": 1, "layers": 2}}
"""Rows of q, columns of out and down, pairs of rows of gate and up; both ranks have the same rows of k and v."""
IN_FLOAT32 = {"optimizer": "adamw", "steps": 1, "model": {"hidden_size": 128, "vocab_size": 8192, "layers": 2}}
"""2 million parameters: enough for a sum of squares to lose digits."""
FEW = 2
"""Steps; those of the table below are 20."""


@pytest.fixture(scope="module")
def of_two(warm, tmp_path_factory):
    cases = {n: {**c, "steps": FEW} for n, c in OF_TWO.items()}
    cases["muon"] = {**MUON_OF_TWO, "steps": FEW}
    cases["float32"] = {**IN_FLOAT32, "tensor": 2, "dtype": "float32"}
    return layouts.run(warm, tmp_path_factory.mktemp("two"), 2, cases)


@pytest.fixture(scope="module")
def of_four(warm, tmp_path_factory):
    return layouts.run(warm, tmp_path_factory.mktemp("four"), 4, {n: {**c, "steps": FEW} for n, c in OF_FOUR.items()})


@pytest.mark.parametrize("name", OF_TWO)
def test_two_tensor_ranks_train_like_one_process(of_two, name):
    assert largest_difference(of_two[name], {**OF_TWO[name], "steps": FEW}) < 1e-9


def test_muon_of_two_tensor_ranks_trains_like_one_process_and_keeps_each_mean_square_once(of_two):
    assert largest_difference(of_two["muon"], {**MUON_OF_TWO, "steps": FEW}) < 1e-9
    assert sum("mean_squares" in name for name in of_two["muon"]["tensors"]) == 2 * 6


@pytest.mark.parametrize("name", ["muon", "muon, ZeRO-1", "muon, ZeRO-3"])
def test_muon_sends_the_bytes_of_the_formula_to_owners_and_back(of_two, of_four, name):
    case = {**OF_FOUR, "muon": MUON_OF_TWO}[name]
    sizes = {"tensor": 2, "shard": 2 if "zero" in case else 1, "zero": case.get("zero", 0)}
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", optimizer="muon", **sizes
    )
    transfers = communication_per_step(layouts.run_config(**case["model"]).model, settings)
    counted = [of_rank["alltoall"] for of_rank in {**of_four, **of_two}[name]["sent_by_rank"]]
    assert sum(counted) / len(counted) == sum(one.given for one in transfers if one.collective == "all-to-all")


def test_the_gradient_norm_of_float32_is_exact_in_one_process_and_in_two(of_two):
    exact = layouts.course(World(), **IN_FLOAT32)["figures"][0][1]
    alone = layouts.course(World(), dtype="float32", **IN_FLOAT32)["figures"][0][1]
    assert [alone, of_two["float32"]["figures"][0][1]] == pytest.approx([exact, exact], rel=1e-6)


@pytest.mark.parametrize("name", OF_TWO)
def test_bytes_sent_are_those_of_the_formula(of_two, name):
    case = OF_TWO[name]
    config = layouts.run_config(tied_embeddings=case.get("tied", False), **case["model"]).model
    settings = MemorySettings(
        layouts.SEQ_LEN, layouts.MICRO, {"optimizer": Footprint()}, precision="float64", tensor=2,
        recompute=case["recompute"], passes=layouts.SAMPLES // layouts.MICRO,
    )  # fmt: skip
    table = layout_table(config)
    held = held_table(table, [one.holder for one in table], Mesh(MeshSizes(tensor=2)))
    buffers = {"cut": 0, "copied": 0}
    for bucket in plan_buffers(held, 1, int(0.002e6) // 8).buckets:
        buffers[bucket.spread] += bucket.span.stop - bucket.span.start
    expected: dict[str, float] = {}
    figures = len(SCALARS) + 2 * layouts.CHANNELS + 2 * layouts.SAMPLES + 2 * 2  # two per rank
    for one in communication_per_step(config, settings, figures, buffers):
        kind = one.collective.replace("-", "_" if one.collective == "reduce-scatter" else "")
        expected[kind] = expected.get(kind, 0) + one.given
    assert of_two[name]["sent"] == expected


@pytest.mark.parametrize("name", OF_FOUR)
def test_two_tensor_ranks_of_two_shards_train_like_one_process(of_four, name):
    assert largest_difference(of_four[name], {**OF_FOUR[name], "steps": FEW}) < 1e-9
