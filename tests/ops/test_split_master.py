"""float32 split in two: the bfloat16 is the nearest, and together they are every bit of the number."""

import math

import torch

from zero2all.ops.split_master import join, split


def numbers() -> torch.Tensor:
    """Numbers of every size, and the borders: halfway cases, the largest, the smallest, infinities."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32).view(torch.float32)
    halfway = (torch.arange(-0x7F80, 0x7F80, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    borders = torch.tensor([0.0, -0.0, 1.0, 3.4028234e38, -3.4028234e38, 1e-45, math.inf, -math.inf])
    everything = torch.cat((any_bits, halfway, borders))
    return everything[~everything.isnan()]


def test_the_upper_half_is_the_nearest_bfloat16_and_both_give_back_every_bit():
    values = numbers()
    nearest, remainder = split(values)
    assert (nearest.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(nearest, remainder).view(torch.int32), values.view(torch.int32))
    is_halfway = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert is_halfway.sum() > 60_000
    assert torch.equal(nearest[~is_halfway], values.bfloat16()[~is_halfway])
    # Halfway the other neighbour is as near, and this one has the larger magnitude.
    finite = is_halfway & nearest.isfinite()
    away = (nearest.double() - values.double()).abs()
    assert torch.equal(away[finite], (values.bfloat16().double() - values.double()).abs()[finite])
    assert (nearest.double().abs() > values.double().abs())[finite].all()


def test_what_is_no_number_stays_none():
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    nearest, remainder = split(bits.view(torch.float32))
    assert nearest.isnan().all()
    assert join(nearest, remainder).isnan().all()
