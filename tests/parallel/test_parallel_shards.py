"""Tensors of the model as parts of logical parameters, whole and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero2all.model.config import ModelConfig
from zero2all.parallel.layout import layout_table
from zero2all.parallel.shards import logical_parts

CONFIG = ModelConfig(vocab_size=64, hidden_size=16, intermediate_size=24, layers=1, heads=4, kv_heads=1)
TABLE = layout_table(CONFIG)
QKV = "blocks.0.attention.qkv.weight"
ROWS = {"q": (0, 16), "k": (16, 20), "v": (20, 24)}


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """A process group without other processes: enough to say what lies where."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_q_k_and_v_are_the_rows_of_their_tensor_and_share_its_memory():
    qkv = torch.zeros(24, 16)
    parts = logical_parts(TABLE, {f"model/{QKV}": qkv, f"optimizer/exp_avg_scales/{QKV}": torch.zeros(24, 3)})
    for number, (name, (first, after)) in enumerate(ROWS.items(), 1):
        part = parts[f"model/blocks.0.attention.{name}.weight"]
        part.values.fill_(number)
        assert (part.shape, part.is_cut) == ((after - first, 16), False)
        assert parts[f"optimizer/exp_avg_scales/blocks.0.attention.{name}.weight"].shape == (after - first, 3)
    assert qkv[:, 0].tolist() == [1.0] * 16 + [2.0] * 4 + [3.0] * 4
    assert len(parts) == 6


def test_what_has_nothing_for_each_row_is_shared_and_other_names_stay():
    columns, step = torch.zeros(16), torch.tensor(3.0)
    parts = logical_parts(TABLE, {f"optimizer/column_means/{QKV}": columns, "optimizer/step/all": step})
    assert [part.values is columns for part in parts.values()] == [True, True, True, False]
    assert parts["optimizer/step/all"].values is step


@pytest.mark.parametrize("dimension", [0, 1])
def test_sharded_tensors_give_the_boxes_that_lie_here(dimension):
    whole = torch.arange(24 * 16.0).view(24, 16)
    seen = {name: torch.full((after - first, 16), -1.0) for name, (first, after) in ROWS.items()}
    for rank, own in enumerate(whole.chunk(5, dim=dimension)):  # 5 rows or 4 columns each, the last rank has less
        with as_rank(rank, 5):
            mesh = init_device_mesh("cpu", (5,))
            given = (own.contiguous(), mesh, [Shard(dimension)])
            tensor = DTensor.from_local(*given, run_check=False, shape=whole.shape, stride=whole.stride())
            for name, part in logical_parts(TABLE, {QKV: tensor}).items():
                key = name.split(".")[-2]
                assert part.shape == tuple(seen[key].shape)
                for offsets, box in part.boxes():
                    at = tuple(slice(first, first + n) for first, n in zip(offsets, box.shape, strict=True))
                    assert (seen[key][at] == -1).all(), "no two ranks hold the same value"
                    seen[key][at] = box
    assert torch.equal(torch.cat(list(seen.values())), whole)
