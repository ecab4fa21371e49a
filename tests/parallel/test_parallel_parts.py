"""Parts: ranges of boxes of tensors, as boxes and as places in the whole tensor."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero2all.config import load_config
from zero2all.model.config import ModelConfig
from zero2all.model.init import initial_values
from zero2all.model.z2all import Z2all
from zero2all.ops.config import OpsConfig
from zero2all.ops.implementation import OpContext
from zero2all.ops.registry import resolve
from zero2all.parallel import shards
from zero2all.parallel.buckets import plan_buffers
from zero2all.parallel.parameter_table import layout_table
from zero2all.parallel.parts import Box, TensorPart
from zero2all.parallel.shards import part_of
from zero2all.train.optimizers.factory import cut_of


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_boxes_of_a_range_hold_its_values_and_nothing_else(shape, data):
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    part = TensorPart.whole(whole)
    if shape:
        part = TensorPart.of_range(whole.reshape(-1)[start:stop], tuple(shape), start, None)
    seen = torch.full_like(whole, -1)
    for offsets, box in part.boxes():
        at = tuple(slice(first, first + length) for first, length in zip(offsets, box.shape, strict=True))
        assert (seen[at] == -1).all(), "boxes do not overlap"
        seen[at] = box
    expected = whole.reshape(-1)[start:stop] if shape else whole.view(-1)
    assert seen.reshape(-1)[seen.reshape(-1) >= 0].tolist() == expected.tolist()
    assert len(list(part.boxes())) <= max(1, 2 * len(shape) - 1)


def test_the_index_of_a_box_is_the_place_in_the_whole_tensor_and_values_per_row_are_cut_at_the_same_rows():
    whole = torch.arange(4 * 6, dtype=torch.int32).view(4, 6)
    box = whole[1:4, 2:5]
    part = TensorPart(box.reshape(-1)[2:7].clone(), (4, 6), Box((1, 2), (3, 3)), start=2)
    assert part.index().tolist() == part.values.tolist()
    boxes = [(at, here.tolist()) for at, here in part.boxes()]
    assert boxes == [((1, 4), [[10]]), ((2, 2), [[14, 15, 16]]), ((3, 2), [[20]])]
    part = TensorPart.of_range(torch.zeros(2 * 3), (5, 3), 6, None)
    scales = part.by_row(torch.zeros(2, 4), (4,))
    assert (scales.shape, scales.start, [at for at, _ in scales.boxes()]) == ((5, 4), 8, [(2, 0)])


@pytest.mark.parametrize("options", [{}, {"attention_bias": "all", "mlp_bias": True}, {"tied_embeddings": True}])
def test_the_layout_table_covers_the_model_exactly(options):
    config = ModelConfig(vocab_size=70, hidden_size=16, intermediate_size=24, layers=2, heads=4, kv_heads=2, **options)
    model = Z2all(config, resolve(OpsConfig(), OpContext("cpu", torch.float32)))
    covered: dict[str, int] = {}
    for parameter in layout_table(config):
        assert parameter.start == covered.get(parameter.holder, 0), "one after the other"
        covered[parameter.holder] = parameter.start + parameter.numel
    assert covered == {name: tensor.numel() for name, tensor in model.named_parameters()}
    assert list(covered) == [name for name, _ in model.named_parameters()]


def test_a_seed_means_the_same_weights_whatever_else_the_model_has():
    shape = {"vocab_size": 70, "hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 2}
    small, deep = (ModelConfig(**shape, layers=layers) for layers in (2, 3))
    drawn = {one.name: initial_values(one.name, one.shape, one.kind, small, 5) for one in layout_table(small)}
    again = {one.name: initial_values(one.name, one.shape, one.kind, deep, 5) for one in layout_table(deep)}
    assert torch.equal(drawn["blocks.1.attention.q.weight"], again["blocks.1.attention.q.weight"])
    assert not torch.equal(drawn["blocks.0.attention.k.weight"], drawn["blocks.0.attention.v.weight"])
    other = initial_values("embedding.weight", (128, 16), "embedding", small, 6)
    assert drawn["embedding.weight"].shape == other.shape
    assert not torch.equal(drawn["embedding.weight"], other)
    assert drawn["embedding.weight"][70:].abs().sum() == 0
    assert drawn["blocks.0.attention.out.weight"].std() == pytest.approx(0.02 / 2, rel=0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
@pytest.mark.parametrize("shards", [2, 4, 8])
def test_owners_of_the_1b_model_hold_about_the_same(optimizer, shards):
    config = load_config("z2all-1b", ["--model.vocab_size", "64000"]).model
    table = layout_table(config)
    plan = plan_buffers(table, shards, 32_000_000, lambda one: cut_of(optimizer, one))
    own = [sum(b.borders[r + 1] - b.borders[r] for b in plan.buckets) for r in range(shards)]
    assert sum(own) == plan.length
    equal = sum(one.numel for one in table) / shards
    tolerance = 1.02 if optimizer in ("adamw", "adamw_8bit") else 1.1  # matrices of 12 M values have one owner each
    assert max(own) <= tolerance * equal


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
