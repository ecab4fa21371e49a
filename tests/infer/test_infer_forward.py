"""Passes in portions give the logits of one pass; weights in 8 and 4 bits are off by no more than their steps."""

import copy

import psutil
import pytest
import torch
import torch.nn.functional as F

from tests.infer.tiny import tiny_model
from tests.model.test_model_z2all import build, logits, tokens, variants
from tests.ops.agreement import assert_close, random
from zero2all.infer import weights
from zero2all.infer.cache import BLOCK, KeyValueBlocks
from zero2all.infer.forward import Forward, Span
from zero2all.infer.weights import (
    KERNEL_BYTES,
    CpuInt4Weight,
    Int4Weight,
    Int8Weight,
    PackedWeight,
    bits_per_weight,
    drop_matrices,
    int4_weight,
    int8_weight,
    packed_for_cpu,
    quantise,
    weights_of,
)


def random_matrix(rows, columns, seed=0):
    """Rows of very different size."""
    return random(rows, columns, seed=seed).float() * torch.logspace(-3, 1, rows).unsqueeze(1)


def test_each_row_has_its_own_scale_and_is_rounded_half_to_even():
    weight = int8_weight(torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [1e-6, 0.0, -1e-6, 5e-7]]))
    assert weight.scales.tolist()[:2] == [1.0, 1.0]
    assert weight.values[:2].tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert weight.values[2].tolist()[:3] == [127, 0, -127]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_off_by_more_than_half_a_step(dtype, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_VALUES", 256)  # several chunks
    matrix = random_matrix(37, 64).to(dtype)
    weight = int8_weight(matrix)
    step = matrix.double().abs().amax(dim=1, keepdim=True) / 127
    error = (weight.values.double() * weight.scales.double().unsqueeze(1) - matrix.double()).abs()
    assert bool((error <= step * (0.5 + 1e-4)).all())
    assert weight.values.abs().max() == 127
    assert weight.nbytes == 37 * 64 + 37 * 4


@pytest.mark.parametrize("kernel", [True, False])
def test_product_is_that_of_the_rounded_matrix(kernel, monkeypatch):
    """Against float64; with and without torch's own kernel, whole and in pieces."""
    monkeypatch.setattr(weights, "_has_cpu_kernel", lambda: kernel)
    monkeypatch.setattr(weights, "WIDENED_VALUES", 1000)
    weight, bias = int8_weight(random_matrix(50, 96)), random_matrix(50, 1, 2)[:, 0]
    matrix = weight.values.double() * weight.scales.double().unsqueeze(1)
    for rows in (1, 3, 8, 64):
        x = random(rows, 96, seed=1).float()
        found = weight.project(x, bias)
        assert (found.dtype, found.shape) == (torch.float32, (rows, 50))
        size = x.double().abs() @ matrix.abs().t() + bias.double().abs()  # what rounding errors are proportional to
        assert bool(((found.double() - (x.double() @ matrix.t() + bias.double())).abs() <= 2e-6 * size).all())


GROUPS = pytest.mark.parametrize("group", [32, 64, 128])


@GROUPS
def test_4_bits_are_a_whole_number_of_steps_of_the_group_and_the_largest_value_decides_the_step(group, monkeypatch):
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: False)
    monkeypatch.setattr(weights, "CHUNK_VALUES", 4000)  # several chunks
    matrix = random_matrix(50, 200)
    matrix[3] = 0
    weight = int4_weight(matrix, group)
    wide = F.pad(weight.widened(torch.float64), (0, 56)).unflatten(1, (-1, group))
    padded = F.pad(matrix.double(), (0, 56)).unflatten(1, (-1, group))
    most = padded.abs().amax(dim=2, keepdim=True)
    assert bool(((wide - padded).abs() <= 0.25 * most).all()), "8 / 0.8 steps to each side, one of them cut off"
    assert bool((wide - padded).square().mean() <= 0.02 * padded.square().mean())
    assert not weight.widened()[3].any()
    steps = wide / torch.where(most > 0, wide.abs().amax(dim=2, keepdim=True) / 8, 1.0)
    assert all(len(row.unique()) <= 16 for row in steps.flatten(0, 1)), "16 numbers"
    assert weight.nbytes == 64 * 256 // 2 + 64 * 256 // group * 2  # 50 rows and 200 columns filled up


@GROUPS
@pytest.mark.parametrize("kernel", [True, False])
def test_product_is_that_of_the_matrix_in_4_bits(group, kernel, monkeypatch):
    """Against float64; torch's kernel rounds rows and results to bfloat16."""
    if kernel and not weights._has_int4_cpu_kernel():
        pytest.skip("no fast kernel for 4 bits in torch on this CPU")
    matrix, bias = random_matrix(50, 200), random_matrix(50, 1, 2)[:, 0]
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: False)
    wide = int4_weight(matrix, group).widened(torch.float64)
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: kernel)
    weight = int4_weight(matrix, group)
    assert isinstance(weight, CpuInt4Weight if kernel else Int4Weight)
    for rows in (1, 5, 40):
        x = random(rows, 200, seed=1).float()
        found = weight.project(x, bias)
        assert (found.dtype, found.shape, len(weight)) == (torch.float32, (rows, 50), 50)
        assert_close(found, x.double() @ wide.t() + bias.double(), 4e-3 if kernel else 2e-6)


def test_4_bits_keep_the_head_in_8_and_have_the_gains_of_norms_in_the_matrices(monkeypatch):
    monkeypatch.setattr(weights, "_has_int4_cpu_kernel", lambda: False)
    model = copy.deepcopy(tiny_model().model)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
    plain = weights_of(model)
    narrow = quantise(plain, "int4")
    assert isinstance(narrow.head, Int8Weight)
    assert narrow.norm is plain.norm
    for before, after in zip(plain.layers, narrow.layers, strict=True):
        assert bool((after.attention_norm == 1).all() and (after.feed_forward_norm == 1).all())
        wanted = before.qkv * before.attention_norm
        assert_close(after.qkv.widened(), wanted, 0.12)
        assert_close(after.out.widened(), before.out, 0.12)
    blocks = 96 * 128 / 64 / 96  # 64 or 96 columns are filled up to 128
    assert 4.25 < bits_per_weight(narrow) < 8 * blocks


@pytest.mark.parametrize(("moe", "tied"), [(False, False), (True, False), (False, True)])
def test_a_whole_model_keeps_embedding_norms_and_experts(moe, tied):
    weights = weights_of(tiny_model(moe, tied).model)
    narrow = quantise(weights, "int8")
    assert isinstance(narrow.head, Int8Weight)
    assert len(narrow.head) == weights.config.vocab_ids
    assert narrow.embedding is weights.embedding
    for before, after in zip(weights.layers, narrow.layers, strict=True):
        assert after.attention_norm is before.attention_norm
        assert after.experts is before.experts
        for name in ("qkv", "out", "gate_up_pairs", "down"):
            assert isinstance(getattr(after, name), Int8Weight | None), name
    assert narrow.layers[0].gate_up_pairs is not None  # the first layer has no experts
    assert packed_for_cpu(narrow, 1 << 40) is narrow  # there is nothing to pack


def test_the_matrices_that_were_copied_can_be_freed():
    model = copy.deepcopy(tiny_model(True, False).model)
    needed = ("embedding", "norm", "router", "experts", "shared")
    kept = {name: one.nbytes for name, one in model.named_parameters() if any(word in name for word in needed)}
    drop_matrices(model)
    assert sum(parameter.nbytes for parameter in model.parameters()) == sum(kept.values())


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
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_logits_through_the_cache_equal_those_of_one_pass(config, packed):
    model, ids = build(config), tokens(rows=1)
    weights = packed_for_cpu(weights_of(model), 1 << 40) if packed else weights_of(model)
    for portions in ([1] * 20, [7, 1, 1, 11], [20]):
        forward = Forward(weights, KeyValueBlocks(config, 3, torch.float32, torch.device("cpu")))
        found = through_the_cache(forward, ids[0].tolist(), portions)
        torch.testing.assert_close(found, logits(model, ids)[0], rtol=1e-5, atol=1e-5)


def test_prompts_of_many_lengths_leave_few_compiled_kernels():
    """One for each length would take 20 times as much."""
    weight = PackedWeight(random(512, 512).float())

    def memory_after(lengths):
        for rows in lengths:
            weight.project(torch.ones(rows, 512), None)
        return psutil.Process().memory_info().rss

    before = memory_after([299, 128, 2])  # libraries are in memory
    assert memory_after(range(2, 300)) - before < 50 * KERNEL_BYTES  # of 298; 8 up to 32 rows, 6 up to 128
