"""Rows of a table by id, and a gradient that touches only those."""

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import assert_agrees, assert_sinks_gather, dtypes, random, random_ids
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.kernels import embedding
from zero2all.ops.kernels.embedding import triton_embedding

LOW = torch.bfloat16
SHAPES = [((1, 1), 1, 1), ((2, 7), 5, 33), ((3, 2, 5), 100, 6), ((150,), 3, 20)]


def looked_up(tokens: Tensor):
    return lambda table: triton_embedding(tokens.to(table.device), table)


def reference(tokens: Tensor):
    """A matmul with a row of zeros and a one per token."""
    return lambda table: torch.nn.functional.one_hot(tokens, len(table)).to(table.dtype) @ table


RUNS = {
    "one token": [3],
    "each id once": [4, 2, 0, 3, 1],
    "a run of one piece": [1, 1, 1, 1],
    "a run up to a border, another behind it": [0, 0, 0, 0, 1, 1, 1],
    "a run over one border": [0, 0, 0, 1, 1, 1, 2],
    "a run over all borders": [2] * 29,
    "a run that begins at a border and crosses one": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
    "a run that ends at a border": [0, 0, 1, 1, 1, 1, 1, 1, 2],
    "several long runs": [0] * 9 + [1] * 2 + [3] * 14 + [4] * 6,
}


@pytest.fixture
def small_pieces(monkeypatch):
    """Borders at every fourth position, two rows at a time."""
    monkeypatch.setattr(embedding, "PIECE", 4)
    monkeypatch.setattr(embedding, "ROWS", 2)


def shuffled(tokens: Tensor) -> Tensor:
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(5))]


@pytest.mark.parametrize("tokens", [torch.tensor(run) for run in RUNS.values()], ids=RUNS)
def test_each_row_gets_the_sum_of_its_positions_wherever_pieces_end_also_in_its_sink(device, small_pieces, tokens):
    for ids in (tokens, shuffled(tokens)):
        assert_agrees(looked_up(ids), reference(ids), [random(5, 3)], torch.float32, device=device)
    assert_sinks_gather(looked_up(ids), reference(ids), [], [random(5, 3)], device=device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize(("shape", "rows", "width"), SHAPES, ids=str)
def test_rows_are_looked_up_and_gradients_summed_by_id(device, dtype, shape, rows, width):
    tokens = random_ids(rows, torch.Size(shape).numel()).view(shape)
    assert_agrees(looked_up(tokens), reference(tokens), [random(rows, width)], dtype, device=device)


def test_wide_rows_are_cut_over_programs(device, monkeypatch):
    monkeypatch.setattr(embedding, "LARGEST_BLOCK", 8)
    tokens = torch.tensor([0, 1, 1, 2, 1] * 3)
    assert_agrees(looked_up(tokens), reference(tokens), [random(4, 21)], torch.float32, device=device)


def test_sum_of_many_positions_is_not_rounded_to_bfloat16(device):
    # 1 added to 256 is lost in bfloat16; 300 is rounded once where the gradient has that dtype.
    tokens = torch.zeros(300, dtype=torch.int64, device=device)
    table = torch.zeros(2, 1, dtype=LOW, device=device).requires_grad_()
    triton_embedding(tokens, table).sum().backward()
    assert table.grad.flatten().tolist() == [300.0, 0.0]
    table.grad, table.gradient_sink = None, GradientSink(torch.full((2, 1), 1000.0, device=device))
    triton_embedding(tokens, table).sum().backward()
    assert table.gradient_sink.buffer.flatten().tolist() == [1300.0, 1000.0]


def test_ids_outside_the_table_write_nowhere(device, small_pieces):
    around = torch.zeros(3 + 4 + 3, 2, device=device)
    ids = torch.tensor([-1] * 9 + [2] * 5 + [4] * 6 + [2**31 - 1], device=device)
    embedding._sum_by_id(torch.ones(len(ids), 2, device=device), shuffled(ids.cpu()).to(device), around[3:7], add=True)
    wanted = torch.zeros(10, 2)
    wanted[3 + 2] = 5.0
    assert torch.equal(around.cpu(), wanted)
