"""AdamW over flat buffers in one pass, and the sum of squares that clipping needs."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import assert_close, assert_same_bits, random

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels import adamw
from zero2all.ops.kernels.adamw import bias_corrections, sum_of_squares
from zero2all.ops.optimizer import AdamWConstants, Flat, triton_adamw
from zero2all.ops.split_master import join, split

LR, BETA1, BETA2, EPS = 1e-2, 0.9, 0.95, 1e-8
LENGTHS, DECAYS = (1300, 77), (0.1, 0.0)
STEPS = 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several programs per buffer, the last one not full."""
    monkeypatch.setattr(adamw, "BLOCK", 512)
    monkeypatch.setattr(adamw, "NORM_BLOCK", 256)


def new_groups(device: str, weights_in: torch.dtype, split_masters: bool = False) -> list[Flat]:
    groups = []
    for number, (length, decay) in enumerate(zip(LENGTHS, DECAYS, strict=True)):
        masters = random(length, seed=50 + number).float().to(device)
        weights = masters if weights_in == torch.float32 else masters.to(weights_in)
        zeros = [torch.zeros_like(masters) for _ in range(3)]
        if split_masters:
            weights, masters = split(masters)
        groups.append(Flat(weights, masters, *zeros, slices=(slice(0, length),), weight_decay=decay, lr=LR))
    return groups


def gradient_at(step: int, group: int) -> Tensor:
    return random(LENGTHS[group], seed=100 * step + group)


def updated(
    device: str, max_norm: float, weights_in: torch.dtype = torch.float32, split_masters: bool = False
) -> tuple[list[Flat], Tensor]:
    groups = new_groups(device, weights_in, split_masters)
    updates = torch.zeros((), device=device)
    for step in range(STEPS):
        for number, group in enumerate(groups):
            group.gradients.copy_(gradient_at(step, number))
        norm = sum_of_squares(torch.cat([group.gradients for group in groups])).sqrt().float()
        scale = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
        triton_adamw(groups, updates, scale, ~norm.isfinite(), AdamWConstants(BETA1, BETA2, EPS))
    return groups, updates


def by_hand(max_norm: float) -> list[Tensor]:
    results = []
    for number, (length, decay) in enumerate(zip(LENGTHS, DECAYS, strict=True)):
        weight = random(length, seed=50 + number)
        mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in range(STEPS):
            norm = float(torch.cat([gradient_at(step, group) for group in range(2)]).norm())
            gradient = gradient_at(step, number) * (min(1.0, max_norm / norm) if max_norm else 1.0)
            mean, square = BETA1 * mean + (1 - BETA1) * gradient, BETA2 * square + (1 - BETA2) * gradient**2
            spread = (square / (1 - BETA2 ** (step + 1))).sqrt()
            weight = weight * (1 - LR * decay) - LR * mean / (1 - BETA1 ** (step + 1)) / (spread + EPS)
        results.append(weight)
    return results


@pytest.mark.parametrize("max_norm", [1.0, 1000.0, 0.0], ids=["clipped", "short enough", "not clipped"])
def test_update_is_adamw_with_decoupled_decay_and_clipping(device, max_norm):
    groups, updates = updated(device, max_norm)
    assert float(updates) == STEPS
    for group, expected in zip(groups, by_hand(max_norm), strict=True):
        assert_close(group.masters, expected, 1e-6)


def test_bfloat16_weights_are_written_from_the_masters(device):
    groups, _ = updated(device, 1.0, torch.bfloat16)
    alone, _ = updated(device, 1.0)
    for group, wide in zip(groups, alone, strict=True):
        assert torch.equal(group.masters, wide.masters)
        assert torch.equal(group.weights, group.masters.bfloat16())


def test_split_masters_get_every_bit_that_whole_ones_get(device):
    groups, _ = updated(device, 1.0, split_masters=True)
    alone, _ = updated(device, 1.0)
    for group, wide in zip(groups, alone, strict=True):
        assert_same_bits(
            [join(group.weights, group.masters), group.firsts, group.seconds], [wide.masters, wide.firsts, wide.seconds]
        )
        assert_same_bits([group.weights, group.masters], split(wide.masters))


def test_a_split_master_that_is_no_number_makes_a_weight_that_is_none(device):
    (group, *_), _ = updated(device, 1.0, split_masters=True)
    group.seconds[:3] = torch.tensor([-1.0, math.nan, math.inf])
    one = torch.ones((), device=device)
    triton_adamw([group], one.clone(), one, one == 0, AdamWConstants(BETA1, BETA2, EPS))
    assert group.weights[:3].isnan().tolist() == [True, True, False]
    assert group.weights[3:].isfinite().all()


@pytest.mark.parametrize("split_masters", [False, True], ids=["whole masters", "split masters"])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_skipped_step_leaves_every_bit_as_it_was(device, norm, split_masters):
    groups, updates = updated(device, 1.0, torch.bfloat16, split_masters)
    groups[1].weights[0] = 3.0  # not even written from the masters
    buffers = [getattr(group, name) for group in groups for name in ("weights", "masters", "firsts", "seconds")]
    before = [buffer.clone() for buffer in (*buffers, updates)]
    groups[0].gradients[3] = norm
    found = sum_of_squares(torch.cat([group.gradients for group in groups]))
    assert not bool(found.isfinite())
    triton_adamw(groups, updates, found.float(), ~found.isfinite(), AdamWConstants(BETA1, BETA2, EPS))
    assert_same_bits([*buffers, updates], before)


def test_bias_corrections_are_those_of_the_update_to_come(device):
    for made in (0, 1, 999, 1_000_000):
        updates = torch.tensor(float(made), dtype=torch.float64, device=device)
        first, second = bias_corrections(updates, BETA1, BETA2).tolist()
        assert first == pytest.approx(1 - BETA1 ** (made + 1), rel=1e-6)
        assert second == pytest.approx(1 - BETA2 ** (made + 1), rel=1e-6)


@pytest.mark.parametrize("length", [1, 255, 256, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sum_of_squares_is_in_float64(device, length, dtype):
    values = random(length)
    found = sum_of_squares(values.to(device, dtype))
    assert found.shape == ()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(float((values * values).sum()), rel=1e-6)
