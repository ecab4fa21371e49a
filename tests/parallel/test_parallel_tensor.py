"""Axes inside the model: what each rank has, the loss of a cut vocabulary, the places of a cut sequence."""

import threading
from functools import partial
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
from zero2all.train.build import op_context


def test_operators_are_chosen_for_the_sizes_of_one_rank_and_one_that_needs_the_whole_head_says_so():
    context = op_context(layouts.run_config(parallel=ParallelConfig(tensor=2)), "cpu", torch.float32)
    assert (context.heads, context.kv_heads, context.intermediate_size, context.vocab_size) == (2, 1, 12, 32)
    whole = op_context(layouts.run_config(), "cpu", torch.float32)
    assert (whole.heads, whole.kv_heads, whole.intermediate_size, whole.vocab_size) == (4, 2, 24, 64)
    config = layouts.run_config(parallel=ParallelConfig(tensor=2))
    asked = type(config.ops)(linear_cross_entropy="off", strict=False)
    ops = resolve(asked, op_context(config, "cpu", torch.float32))
    assert ops.taken["linear_cross_entropy"] == "chunked"
    assert "parallel.tensor" in "\n".join(ops.notes())


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

        highest = partial(together, reduce=lambda given: given.amax(dim=0))
        return Exchange(rank, highest, partial(together, reduce=lambda given: given.sum(dim=0)))


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


def all_places(method, ranks, length):
    parallel, device = ParallelConfig(context_method=method), torch.device("cpu")
    meshes = [Mesh(MeshSizes(context=ranks), rank) for rank in range(ranks)]
    return [places_of(layouts.MODEL, parallel, mesh, length, device) for mesh in meshes]


def test_gathered_keys_are_as_many_for_every_process():
    places = all_places("gather", 4, 16)
    assert places[1].tolist() == [2, 3, 12, 13]
    assert len({int((each + 1).sum()) for each in places}) == 1, "a query sees itself and all tokens before it"


def test_auto_takes_ulysses_where_the_heads_of_a_tensor_rank_divide():
    for heads, tensor, method in ((8, 1, "ulysses"), (8, 2, "ulysses"), (8, 4, "gather"), (6, 1, "gather")):
        model = ModelConfig(vocab_size=60, hidden_size=48, intermediate_size=24, layers=1, heads=heads, kv_heads=2)
        assert method_of(model, ParallelConfig(), MeshSizes(context=4, tensor=tensor)) == method
