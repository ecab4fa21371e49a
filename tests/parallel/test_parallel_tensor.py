"""Axes inside the model: what each rank has, the loss of a cut vocabulary, the places of a cut sequence."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parallel import layouts
from tests.waiting import in_threads
from zero2all.model.config import ModelConfig
from zero2all.ops.cut_vocabulary import Exchange, cut_linear_cross_entropy
from zero2all.ops.linear_cross_entropy import chunked_linear_cross_entropy
from zero2all.ops.registry import resolve
from zero2all.parallel.config import MeshSizes, ParallelConfig
from zero2all.parallel.context import method_of, places_of
from zero2all.parallel.mesh import Mesh
from zero2all.parallel.parameter_table import held_table, layout_table
from zero2all.train.build import op_context

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

    in_threads(work, range(4))
    total, losses, dhidden, dhead = outcome(chunked_linear_cross_entropy, head)
    for of_rank in found:
        torch.testing.assert_close(of_rank[:2], (total, losses), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(of_rank[2] for of_rank in found), dhidden, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([of_rank[3] for of_rank in found]), dhead, rtol=1e-12, atol=1e-12)


# ---- sequences cut over processes ----


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
