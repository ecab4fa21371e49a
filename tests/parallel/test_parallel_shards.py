"""What a process holds of a logical parameter whose holder FSDP2 has cut by rows."""

from __future__ import annotations

import pytest
import torch

from zero2all.model.config import ModelConfig
from zero2all.parallel import shards
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.shards import part_of

CONFIG = ModelConfig(vocab_size=64, hidden_size=16, intermediate_size=24, layers=1, heads=4, kv_heads=1)
INSIDE = [parameter for parameter in layout_table(CONFIG) if parameter.holder == "blocks.0.attention.qkv.weight"]


@pytest.mark.parametrize("ranks", [2, 5, 9])
def test_the_rows_of_q_k_and_v_lie_on_the_ranks_that_have_them(ranks, monkeypatch):
    whole = torch.arange(24 * 16.0).view(24, 16)
    seen = {parameter.name: torch.full(parameter.shape, -1.0) for parameter in INSIDE}
    chunks = [*whole.chunk(ranks), *[whole[:0]] * ranks][:ranks]  # of 9 ranks the last one has nothing
    for rank, own in enumerate(chunks):
        rows = slice(sum(map(len, chunks[:rank])), sum(map(len, chunks[: rank + 1])))
        monkeypatch.setattr(shards, "box", lambda _holder, rows=rows: (rows,))
        for parameter in INSIDE:
            part = part_of(own, parameter)
            assert (part.shape, part.values.dim()) == (parameter.shape, 2)
            for offsets, box in part.boxes():
                at = tuple(slice(begin, begin + n) for begin, n in zip(offsets, box.shape, strict=True))
                assert (seen[parameter.name][at] == -1).all(), "no two ranks hold the same value"
                seen[parameter.name][at] = box
    assert torch.equal(torch.cat(list(seen.values())), whole)


def test_the_part_of_a_whole_tensor_shares_its_memory():
    holder = torch.zeros(24, 16)
    for number, parameter in enumerate(INSIDE):
        part_of(holder, parameter).values.fill_(number)
    assert holder[:, 0].tolist() == [0.0] * 16 + [1.0] * 4 + [2.0] * 4
