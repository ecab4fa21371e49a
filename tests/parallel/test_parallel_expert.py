"""Experts spread over processes train like one process, with the same routing; and what cannot be spread is refused."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import layouts
from zero2all.parallel.world import World

MOE = {
    "experts": 8,
    "experts_per_token": 2,
    "expert_size": 8,
    "shared_experts": 1,
    "dense_layers": 1,
    "balance_rate": 0.01,
}
MODEL = {"moe": MOE}
TWO = {
    "expert 2": {"optimizer": "adamw", "zero": 1, "expert": 2},
    "expert 2, recompute": {"optimizer": "muon", "zero": 2, "expert": 2, "recompute": "full"},
}
FOUR = {
    "shard x expert": {"optimizer": "adamw", "zero": 2, "expert": 2},
}


def assert_like_one_process(found, steps, optimizer, **arguments):
    alone = layouts.course(World(), optimizer, steps=steps, model=MODEL)
    assert found["loads"] == alone["loads"], "the routing differs"
    for (loss, norm), (exact_loss, exact_norm) in zip(found["figures"], alone["figures"], strict=True):
        assert loss == pytest.approx(exact_loss, rel=1e-9)
        assert norm == pytest.approx(exact_norm, rel=1e-9)
    assert found["tensors"].keys() == alone["tensors"].keys()
    for name, value in alone["tensors"].items():
        torch.testing.assert_close(found["tensors"][name], value, rtol=1e-9, atol=1e-9, msg=name)


def run(warm, folder, size, cases, steps):
    given = {name: {**case, "steps": steps, "model": MODEL} for name, case in cases.items()}
    return layouts.run(warm, folder, size, given)


@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)])
def test_spread_experts_train_like_one_process(warm, tmp_path, size, cases):
    found = run(warm, tmp_path, size, cases, 4)
    for name, case in cases.items():
        assert_like_one_process(found[name], 4, **case)
