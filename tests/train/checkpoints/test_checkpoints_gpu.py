"""Saves from a GPU: pinned host memory taken once, and a copy that later changes on the device do not reach."""

import pytest
import torch

from zero2all.train.checkpoints.memory import MemoryStore
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore


@pytest.mark.gpu
def test_a_save_from_a_gpu_is_the_moment_of_the_call_and_goes_through_pinned_memory(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    store = CheckpointStore(tmp_path)
    tensors = {f"model/{n}": torch.randn(4096, 4096, device="cuda") for n in range(4)}
    tensors |= {"model/turned": torch.randn(300, 200, device="cuda").t(), "optimizer/step": torch.tensor(3.0)}
    parts = Snapshot.of_tensors(tensors).parts
    store.prepare(parts)
    assert all(buffer.is_pinned() for buffer in store._buffers.buffers)
    truth = {name: value.clone() for name, value in tensors.items()}
    for step in (1, 2):
        for value in tensors.values():
            value.mul_(2)  # still under way on the device when the save begins
        ticket = store.save(step, Snapshot(parts), {})
        for value in tensors.values():
            value.zero_()
        assert ticket.folder().is_dir()
        store.at(step).load_into(parts)
        assert all(torch.equal(value, truth[name] * 2) for name, value in tensors.items())
        truth = {name: value.clone() for name, value in tensors.items()}
    assert store.close()


@pytest.mark.gpu
def test_a_save_to_memory_is_the_moment_of_the_call_and_shares_the_block_with_those_to_the_disk(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    store = CheckpointStore(tmp_path / "run")
    store.memory = MemoryStore(tmp_path / "run", store.peers, tmp_path, "key", pytest.fail)
    tensors = {f"optimizer/{n}": torch.randn(4096, 4096, device="cuda") for n in range(4)}
    tensors |= {"model/turned": torch.randn(300, 200, device="cuda").t()}
    parts = Snapshot.of_tensors(tensors).parts
    store.prepare(parts)
    (tmp_path / "run").mkdir(exist_ok=True)
    assert store.prepare_memory(parts) is None
    for step in (1, 2, 3):
        truth = {name: value.clone() for name, value in tensors.items()}
        copied, bad = store.save_to_memory(step, Snapshot(parts), {})
        assert bad is None
        assert isinstance(copied, torch.cuda.Event)
        torch.cuda.current_stream().wait_event(copied)
        for value in tensors.values():
            value.zero_()
        assert store.save(10 * step, Snapshot(parts), {}).folder().is_dir(), "it waits for the block"
        found = store.memory.newest(-1)
        assert (found.step, found.in_memory) == (step, True)
        found.load_into(parts)
        assert all(torch.equal(value, truth[name]) for name, value in tensors.items())
    assert store.close()
