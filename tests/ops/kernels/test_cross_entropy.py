"""Cross-entropy whose gradient takes the place of the logits, alone and behind the head's matmul."""

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from tests.ops.agreement import assert_agrees, assert_close, assert_sinks_gather, dtypes, random, random_ids
from zero2all.ops import linear_cross_entropy
from zero2all.ops.kernels import cross_entropy
from zero2all.ops.kernels.cross_entropy import cross_entropy_in_place, row_sums, slopes_in_place, triton_cross_entropy
from zero2all.ops.linear_cross_entropy import triton_linear_cross_entropy

ROWS, COLUMNS, VOCAB = 11, 200, 190
Z = 0.02


@pytest.fixture(autouse=True, params=[0, 256], ids=["in blocks", "whole rows"])
def small_blocks(monkeypatch, request):
    """Several blocks per row, the last one not full; or rows that fit into registers."""
    monkeypatch.setattr(cross_entropy, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "WHOLE_ROW", request.param)


def targets_and_weights(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Some targets are ignored."""
    targets = random_ids(VOCAB, ROWS)
    targets[[1, ROWS - 1]] = torch.tensor([-1, -100])
    return targets.to(device), random(ROWS, seed=3).abs().float().to(device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("z", [0.0, Z], ids=["plain", "z"])
@pytest.mark.parametrize("columns", [COLUMNS, VOCAB], ids=["padded", "not padded"])
def test_logits_become_the_gradient_of_the_weighted_sum(device, dtype, z, columns):
    logits, (targets, weights) = random(ROWS, columns) * 2, targets_and_weights()
    exact = logits.clone().requires_grad_()
    losses, penalties = formulas.losses_and_penalties(exact[:, :VOCAB], targets, z)
    ((losses + penalties) * weights).sum().backward()
    given = logits.to(device, dtype)
    found, of_z = cross_entropy_in_place(given, targets.to(device), weights.to(device), VOCAB, z)
    assert found.dtype == torch.float32
    assert_close(found, losses, 3e-6)
    if z:
        assert_close(of_z, penalties, 3e-6)
    else:
        assert of_z is None
    assert_close(given, exact.grad, 1e-2 if dtype == torch.bfloat16 else 3e-6)
    assert not given[:, VOCAB:].any()
    assert not given[targets.to(device) < 0].any()
    assert not found[targets.to(device) < 0].any()


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("z", [0.0, Z], ids=["plain", "z"])
def test_columns_cut_over_processes_give_the_same_after_one_exchange_of_sums(device, dtype, z):
    logits, (targets, weights) = (random(ROWS, 256) * 2).to(device, dtype), targets_and_weights(device)
    weights = torch.where(targets >= 0, weights, 0.0)
    parts = list(logits.clone().split(64, dim=1))  # the last one has only padding
    columns = [min(max(VOCAB - 64 * rank, 0), 64) for rank in range(4)]
    assert columns == [64, 64, 62, 0]
    sums = [row_sums(part, targets, 64 * rank, columns[rank]) for rank, part in enumerate(parts)]
    largest = torch.stack([each[0] for each in sums]).amax(dim=0)
    total = sum(each[1] * (each[0] - largest).exp() for each in sums)
    logsum = largest + total.log()
    for rank, part in enumerate(parts):
        slopes_in_place(part, targets, weights, logsum, 64 * rank, columns[rank], z)
    losses, _ = cross_entropy_in_place(logits, targets, weights, VOCAB, z)
    found = torch.where(targets >= 0, logsum - sum(each[2] for each in sums), 0.0)
    assert_close(found, losses, 3e-6)
    assert_close(torch.cat(parts, dim=1), logits, 1e-2 if dtype == torch.bfloat16 else 3e-6)


def test_without_gradient_the_logits_stay(device):
    logits = random(ROWS, COLUMNS).float().to(device)
    before = logits.clone()
    given = (*targets_and_weights(device), VOCAB)
    losses, _ = cross_entropy_in_place(logits, *given, gradient=False)
    assert torch.equal(logits, before)
    again, _ = cross_entropy_in_place(logits, *given)
    assert torch.equal(losses, again)


def test_huge_logits_and_padding_that_is_not_finite_do_no_harm(device):
    logits = torch.tensor([[1e4, -1e4, 0.0, float("inf")], [-1e30, 0.0, -1e30, float("nan")]], device=device)
    targets, weights = torch.tensor([1, 1], device=device), torch.ones(2, device=device)
    losses, _ = cross_entropy_in_place(logits, targets, weights, 3)
    torch.testing.assert_close(losses.cpu(), torch.tensor([2e4, 0.0]))
    assert torch.equal(logits.cpu(), torch.tensor([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))


@dtypes(torch.float32, torch.bfloat16)
def test_as_an_operator_it_has_the_gradient_of_each_loss(device, dtype):
    def reference(logits: Tensor, targets: Tensor) -> Tensor:
        return formulas.losses_and_penalties(logits, targets, 0.0)[0]

    inputs = [random(ROWS, COLUMNS) * 2]
    assert_agrees(triton_cross_entropy, reference, inputs, dtype, random_ids(COLUMNS, ROWS), device=device)


def test_calling_backward_twice_is_refused_because_the_logits_are_gone(device):
    logits = random(ROWS, COLUMNS).float().to(device).requires_grad_()
    losses = triton_cross_entropy(logits * 1, random_ids(COLUMNS, ROWS).to(device))
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def head_inputs() -> list[Tensor]:
    return [random(ROWS, 16) / 2, random(COLUMNS, 16, seed=1)]


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("z", [0.0, Z], ids=["plain", "z"])
@pytest.mark.parametrize("chunk", [4, 8192])
def test_head_and_loss_chunk_by_chunk(device, dtype, z, chunk, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_ROWS", chunk)
    others = (*targets_and_weights(), VOCAB, z)
    assert_agrees(triton_linear_cross_entropy, formulas.head_and_loss, head_inputs(), dtype, *others, device=device)


def test_gradient_of_the_head_is_added_to_the_sink_over_micro_batches(device):
    hidden, head = head_inputs()
    others = (*targets_and_weights(), VOCAB, 0.0)
    assert_sinks_gather(triton_linear_cross_entropy, formulas.head_and_loss, [hidden], [head], *others, device=device)
