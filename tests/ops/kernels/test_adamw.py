"""AdamW over flat buffers in one pass, and the sum of squares that clipping needs."""

import math
from functools import partial

import pytest
import torch

from tests.ops import flat_adamw
from tests.ops.agreement import assert_close, assert_same_bits, random
from zero2all.ops.kernels import adamw
from zero2all.ops.kernels.adamw import bias_corrections, sum_of_squares
from zero2all.ops.optimizer import triton_adamw
from zero2all.ops.split_master import join, split

adamw_of = partial(flat_adamw.updated, triton_adamw)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs per buffer, the last one not full."""
    monkeypatch.setattr(adamw, "BLOCK", 512)
    monkeypatch.setattr(adamw, "NORM_BLOCK", 256)


@pytest.mark.parametrize("max_norm", [flat_adamw.MAX_NORM, 0.0], ids=["clipped", "not clipped"])
def test_update_is_adamw_with_decoupled_decay_and_clipping(device, max_norm):
    groups, updates = adamw_of(device, max_norm=max_norm)
    assert float(updates) == flat_adamw.STEPS
    for group, expected in zip(groups, flat_adamw.by_formula(max_norm), strict=True):
        assert_close(group.masters, expected, 1e-6)


def test_bfloat16_weights_are_written_from_the_masters(device):
    flat_adamw.assert_weights_are_rounded_masters(triton_adamw, device)


def test_split_masters_get_every_bit_that_whole_ones_get(device):
    groups, alone = (adamw_of(device, split_masters=each)[0] for each in (True, False))
    for group, wide in zip(groups, alone, strict=True):
        found = [join(group.weights, group.masters), group.firsts, group.seconds]
        assert_same_bits(found, [wide.masters, wide.firsts, wide.seconds])
        assert_same_bits([group.weights, group.masters], split(wide.masters))


def test_a_split_master_that_is_no_number_makes_a_weight_that_is_none(device):
    (group, *_), _ = adamw_of(device, split_masters=True)
    group.seconds[:3] = torch.tensor([-1.0, math.nan, math.inf])
    one = torch.ones((), device=device)
    triton_adamw([group], one.clone(), one, one == 0, flat_adamw.CONSTANTS)
    assert group.weights[:3].isnan().tolist() == [True, True, False]
    assert group.weights[3:].isfinite().all()


@pytest.mark.parametrize("split_masters", [False, True], ids=["whole masters", "split masters"])
def test_a_skipped_step_leaves_every_bit_as_it_was(device, split_masters):
    groups, updates = adamw_of(device, torch.bfloat16, split_masters=split_masters)
    groups[1].weights[0] = 3.0  # not even written from the masters
    buffers = flat_adamw.buffers_of(groups, updates)
    before = [buffer.clone() for buffer in buffers]
    groups[0].gradients[3] = math.inf
    found = sum_of_squares(torch.cat([group.gradients for group in groups]))
    assert not bool(found.isfinite())
    triton_adamw(groups, updates, found.float(), ~found.isfinite(), flat_adamw.CONSTANTS)
    assert_same_bits(buffers, before)


def test_bias_corrections_are_those_of_the_update_to_come(device):
    for made in (0, 1, 999, 1_000_000):
        updates = torch.tensor(float(made), dtype=torch.float64, device=device)
        found = bias_corrections(updates, 0.9, 0.95).tolist()
        assert found == pytest.approx([1 - 0.9 ** (made + 1), 1 - 0.95 ** (made + 1)], rel=1e-6)


@pytest.mark.parametrize("length", [1, 255, 256, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum_of_squares_is_in_float64(device, length, dtype):
    values = random(length)
    found = sum_of_squares(values.to(device, dtype))
    assert found.shape == ()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float((values * values).sum()), rel=1e-6)
