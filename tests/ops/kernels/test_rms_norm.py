"""Residual add and RMSNorm in one kernel each way."""

import pytest
import torch
from agreement import TOLERANCE, assert_agrees, assert_close, dtypes, random, values_and_gradients
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels import rms_norm
from zero2all.ops.kernels.rms_norm import triton_add_rms_norm
from zero2all.ops.registry import OPERATORS

EPS = 1e-5
SHAPES = [(1, 1), (1, 48), (7, 100), (2, 3, 33), (20, 5)]  # more rows than programs in the backward
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
variants = pytest.mark.parametrize("lean", [False, True], ids=["plain", "lean"])


def reference(x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total / (total.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight, total


def weights(width: int) -> Tensor:
    """Around 1, as in a model."""
    return 1.0 + random(width, seed=2) / 8


def tolerance(dtype: torch.dtype, lean: bool) -> float:
    """The lean variant's own in bfloat16."""
    if dtype == torch.float32:
        return TOLERANCE[dtype]
    declared = {one.name: one.tolerance for one in OPERATORS["rms_norm"]}
    return declared["triton_lean" if lean else "triton"] or TOLERANCE[dtype]


@variants
@dtypes(torch.float32, torch.bfloat16)
@shapes
def test_sum_and_norm_of_a_residual_and_a_branch(device, lean, dtype, shape):
    inputs = [random(*shape), random(*shape, seed=1), weights(shape[-1])]
    assert_agrees(
        lambda *given: triton_add_rms_norm(*given, EPS, lean),
        reference,
        inputs,
        dtype,
        tolerance=tolerance(dtype, lean),
        device=device,
    )


@variants
@dtypes(torch.float32, torch.bfloat16)
def test_norm_without_a_branch(device, lean, dtype):
    assert_agrees(
        lambda x, weight: triton_add_rms_norm(x, None, weight, EPS, lean),
        lambda x, weight: reference(x, None, weight),
        [random(2, 3, 33), weights(33)],
        dtype,
        tolerance=tolerance(dtype, lean),
        device=device,
    )


@variants
def test_float32_residual_under_bfloat16_weights_stays_float32(device, lean):
    low, wide = torch.bfloat16, torch.float32
    x, branch = torch.full((2, 8), 1000.0, device=device), torch.ones(2, 8, dtype=low, device=device)
    normed, total = triton_add_rms_norm(x, branch, torch.ones(8, dtype=low, device=device), EPS, lean)
    assert (normed.dtype, total.dtype) == (low, wide)
    assert torch.equal(total, torch.full_like(total, 1001.0))
    inputs = [random(5, 20), random(5, 20, seed=1), weights(20)]
    assert_agrees(
        lambda *given: triton_add_rms_norm(*given, EPS, lean), reference, inputs, [wide, low, low], device=device
    )


@variants
def test_norm_whose_sum_goes_nowhere_has_the_gradient_of_the_norm_alone(device, lean):
    # The last norm of a model: nobody adds anything to its sum.
    inputs = [random(6, 12), random(6, 12, seed=1), weights(12)]
    assert_agrees(
        lambda *given: triton_add_rms_norm(*given, EPS, lean)[0],
        lambda *given: reference(*given)[0],
        inputs,
        torch.float32,
        device=device,
    )


def test_rows_that_are_not_contiguous_are_read_as_they_are(device):
    inputs = [random(12, 6), random(12, 6, seed=1), weights(12)]
    assert_agrees(
        lambda x, branch, weight: triton_add_rms_norm(x.t(), branch.t(), weight, EPS),
        lambda x, branch, weight: reference(x.t(), branch.t(), weight),
        inputs,
        torch.float32,
        device=device,
    )


def test_gradient_of_the_weight_is_the_same_sum_however_many_programs_share_the_rows(device, monkeypatch):
    given = [value.float().to(device) for value in (random(29, 12), random(29, 12, seed=1), weights(12))]
    found = []
    for programs in (1, 6):
        monkeypatch.setattr(rms_norm, "PROGRAMS_PER_PROCESSOR", programs)
        _, gradients = values_and_gradients(lambda *inputs: triton_add_rms_norm(*inputs, EPS), given)
        found.append(gradients[2])
    assert_close(found[0], found[1], 1e-6)


def test_lean_backward_takes_a_weight_of_zero_for_a_very_small_one(device):
    weight = weights(12)
    weight[5] = 0.0
    x, branch = random(4, 12), random(4, 12, seed=1)
    _, wanted = values_and_gradients(reference, [x, branch, weight])
    given = [value.float().to(device) for value in (x, branch, weight)]
    _, gradients = values_and_gradients(lambda *inputs: triton_add_rms_norm(*inputs, EPS, True), given)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    kept = [place for place in range(12) if place != 5]
    assert_close(gradients[2][kept], wanted[2][kept], 3e-6)
    assert float(gradients[2][5]) == 0.0
