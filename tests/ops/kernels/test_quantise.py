"""Float8 with one scale per tensor, and its transpose from the same read."""

import pytest
import torch

from tests.ops.agreement import assert_close, random
from zero2all.ops.kernels import quantise as kernel
from zero2all.ops.kernels.quantise import LARGEST, quantise, scale_from_peaks, scale_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
small_floats = pytest.mark.parametrize("small", [E4M3, E5M2], ids=str)
HALF_A_STEP = {E4M3: 2**-4, E5M2: 2**-3}
"""Largest rounding error of a value as a share of it: 3 and 2 bits behind the point."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several tiles each way, the last ones not full."""
    monkeypatch.setattr(kernel, "TILE_ROWS", 16)
    monkeypatch.setattr(kernel, "TILE_COLUMNS", 8)
    monkeypatch.setattr(kernel, "AMAX_BLOCK", 64)


@small_floats
@pytest.mark.parametrize("shape", [(1, 1), (50, 21), (16, 8), (3, 130)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scale_maps_the_largest_magnitude_to_the_largest_float8(device, small, shape, dtype):
    x = random(*shape).to(device, dtype)
    scale = scale_of(x, small)
    assert scale.dtype == torch.float32
    assert float(scale) == pytest.approx(float(x.abs().max()) / LARGEST[small], rel=1e-6)
    assert LARGEST[small] == torch.finfo(small).max
    peaks = torch.tensor([0.0, float(x.abs().max()), 0.0], device=device)
    assert torch.equal(scale_from_peaks(peaks, small), scale)


@small_floats
@pytest.mark.parametrize("shape", [(1, 1), (50, 21), (16, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_come_back_within_half_a_step_and_both_ways_round(device, small, shape, dtype):
    x = random(*shape).to(device, dtype)
    scale = scale_of(x, small)
    straight, turned = quantise(x, small, scale)
    for found, shape in ((straight, x.shape), (turned, x.t().shape)):
        assert (found.shape, found.dtype, found.is_contiguous()) == (shape, small, True)
    assert torch.equal(straight.float(), turned.float().t())
    off = (straight.double() * scale.double() - x.double()).abs()
    normal = x.abs().double() / scale.double() > 2.0**-6 if small == E4M3 else torch.ones_like(off, dtype=torch.bool)
    # 1 + 2^-7: the product with 1/scale is rounded before it is made small.
    assert bool((off[normal] <= x.abs().double()[normal] * HALF_A_STEP[small] * (1 + 2**-7)).all())


@small_floats
def test_each_of_the_two_can_be_left_out(device, small):
    x = random(20, 10).float().to(device)
    given = (x, small, scale_of(x, small))
    (first, nothing), (none, second) = quantise(*given, turned=False), quantise(*given, straight=False)
    both = quantise(*given)
    assert (none, nothing) == (None, None)
    assert torch.equal(first.float(), both[0].float())
    assert torch.equal(second.float(), both[1].float())


@small_floats
def test_values_beyond_the_scale_are_clamped_instead_of_becoming_infinite(device, small):
    x = torch.tensor([[1.0, -4.0, 1000.0, -1000.0]], device=device)
    straight, _ = quantise(x, small, torch.tensor(4.0 / LARGEST[small], device=device))
    back = straight.float() * 4.0 / LARGEST[small]
    assert_close(back, torch.tensor([[1.0, -4.0, 4.0, -4.0]]), 1e-6)


def test_zeros_have_a_scale_too(device):
    x = torch.zeros(3, 5, device=device)
    assert float(scale_of(x, E4M3)) > 0
    assert not quantise(x, E4M3, scale_of(x, E4M3))[0].float().any()
