"""The likeliest token of each row, put where the next step reads it."""

import pytest
import torch

from tests.ops.agreement import random

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels.decode_greedy import BLOCK, GreedyScratch, decode_greedy


@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK + 1, 66 * BLOCK])
def test_token_of_the_largest_logit_and_the_next_position(device, width):
    logits = random(3, width).float()
    logits[2, -1] = 100.0
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    positions = torch.tensor([4, 0, 9], device=device)
    tables = torch.tensor([[7, 1], [0, 0], [3, 0]], dtype=torch.int32, device=device)
    scratch = GreedyScratch(3, torch.device(device))
    decode_greedy(logits.to(device), tokens, positions, tables, scratch)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert positions.tolist() == [5, 0, 10]  # the row in the middle is padding
    assert not scratch.arrived.any()  # ready for the next launch


def test_lowest_of_equal_ids_wins(device):
    logits = torch.zeros(2, 2 * BLOCK + 9)
    logits[1, [BLOCK + 3, BLOCK + 8, 2 * BLOCK + 8]] = 1.0
    tokens, positions = torch.ones(2, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    tables = torch.ones(2, 1, dtype=torch.int32, device=device)
    decode_greedy(logits.to(device), tokens, positions, tables, GreedyScratch(2, torch.device(device)))
    assert tokens.tolist() == [0, BLOCK + 3]
