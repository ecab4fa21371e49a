"""Parameters spread over two real processes are updated as whole ones are, for every optimizer."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("shard_worker.py")
spec = importlib.util.spec_from_file_location("shard_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)

EXACT = ("lion", "sgd", "muon", "adamw_8bit", "adamw_bf16", "adamw_bf16, kahan")
"""Nothing is summed over processes: every bit is the same. The fused AdamW kernel rounds the ends of tensors apart."""


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    processes = [
        subprocess.Popen([sys.executable, WORKER, str(rank), "2", folder / "store", folder / "out.pt"])
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
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
