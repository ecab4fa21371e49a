"""The likeliest token of each row, put where the next pass reads it."""

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import random
from zero2all.ops.kernels.decode_greedy import BLOCK, GreedyScratch, decode_greedy


def likeliest(device: str, logits: Tensor, never: Tensor | None = None) -> list[int]:
    tokens = torch.full((len(logits),), -1, device=device)
    scratch = GreedyScratch(len(logits), torch.device(device))
    never = torch.zeros(logits.shape[1], dtype=torch.bool) if never is None else never
    decode_greedy(logits.to(device), never.to(device), tokens, scratch)
    assert not scratch.arrived.any()  # ready for the next launch
    return tokens.tolist()


@pytest.mark.parametrize("width", [5, BLOCK, 3 * BLOCK + 1, 66 * BLOCK])
def test_token_of_the_largest_logit(device, width):
    logits = random(3, width).float()
    logits[2, -1] = 100.0
    assert likeliest(device, logits) == logits.argmax(dim=-1).tolist()


def test_lowest_of_equal_ids_wins_and_ids_that_are_ruled_out_are_never_taken(device):
    logits = torch.zeros(2, 2 * BLOCK + 9)
    logits[1, [BLOCK + 3, BLOCK + 8, 2 * BLOCK + 8]] = 1.0
    assert likeliest(device, logits) == [0, BLOCK + 3]
    logits, never = random(4, BLOCK + 7).float(), torch.zeros(BLOCK + 7, dtype=torch.bool)
    never[logits.argmax(dim=-1)] = True
    assert likeliest(device, logits, never) == logits.masked_fill(never, -torch.inf).argmax(dim=-1).tolist()
    assert likeliest(device, logits, torch.ones_like(never)) == [0] * 4  # an id all the same
