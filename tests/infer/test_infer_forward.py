"""Passes in portions, through the cache, give the logits of one pass over the whole text."""

from __future__ import annotations

import pytest
import torch

from tests.model.test_model_z2all import build, logits, tokens, variants
from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.forward import Forward, Span
from zero2all.infer.weights import packed_for_cpu, weights_of

TABLE = [2, 1]


def through_the_cache(forward: Forward, ids: list[int], portions: list[int]) -> torch.Tensor:
    rows, done = [], 0
    for count in portions:
        places = torch.arange(done, done + count)
        slots = torch.tensor(TABLE)[places // BLOCK] * BLOCK + places % BLOCK
        given = torch.tensor(ids[done : done + count])
        done += count
        if count == 1:
            rows.append(forward.decode(given, places, torch.tensor([TABLE[: -(-done // BLOCK)]])))
        else:
            rows.append(forward.logits(forward.prefill(given, places, slots, [Span(0, count, done, TABLE)])))
    return torch.cat(rows)


@variants
@pytest.mark.parametrize("portions", [[1] * 20, [3] * 6 + [2], [7, 1, 1, 11], [20]], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_logits_through_the_cache_equal_those_of_one_pass(config, portions, packed):
    model, ids = build(config), tokens(rows=1)
    weights = packed_for_cpu(weights_of(model), 1 << 40) if packed else weights_of(model)
    forward = Forward(weights, KeyValueBlocks(config, 3, torch.float32, torch.device("cpu")))
    found = through_the_cache(forward, ids[0].tolist(), portions)
    torch.testing.assert_close(found, logits(model, ids)[0], rtol=1e-5, atol=1e-5)
