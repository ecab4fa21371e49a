"""Parameters spread over two real processes are updated as whole ones are, for every optimizer."""

from __future__ import annotations

import pytest
import torch

from tests.processes import Program
from tests.train.optimizers import shard_worker as worker

EXACT = ("lion", "sgd", "muon", "adamw_8bit", "adamw_bf16", "adamw_bf16, kahan")
"""Nothing is summed over processes: every bit is the same. The fused AdamW kernel rounds the ends of tensors apart."""


@pytest.fixture(scope="module")
def spread(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    code = "from tests.train.optimizers import shard_worker; shard_worker.main()"
    words = ["2", str(folder / "store"), str(folder / "out.pt")]
    ranks = [Program(warm, code, [str(rank), *words], folder / f"output-{rank}.txt") for rank in range(2)]
    for rank in ranks:
        assert rank.wait() == 0, rank.text()
    return torch.load(folder / "out.pt", weights_only=True)


@pytest.mark.parametrize("name", worker.CONFIGS)
def test_two_processes_agree_with_one(spread, name):
    alone = worker.train(worker.CONFIGS[name], lambda tensor: tensor)
    assert spread[name].keys() == alone.keys()
    for key, tensor in alone.items():
        if name in EXACT:
            assert torch.equal(spread[name][key], tensor), key
        else:
            torch.testing.assert_close(spread[name][key], tensor, rtol=1e-6, atol=1e-7, msg=key)
