"""Residual add and RMSNorm in one kernel each way."""

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, dtypes, random, values_and_gradients

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.gradient_sink import GradientSink
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


@pytest.mark.parametrize("width", [5, 33])
def test_sum_over_programs_takes_every_part_once(device, monkeypatch, width):
    monkeypatch.setattr(rms_norm, "SUM_ROWS", 4)
    parts = random(11, width).float()
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    found = rms_norm.add_sum_of_parts(weight, parts.to(device))
    assert found.dtype == torch.bfloat16
    assert_close(found, parts.double().sum(dim=0), 4e-3)
    weight.gradient_sink = GradientSink(torch.ones(width, device=device))
    assert rms_norm.add_sum_of_parts(weight, parts.to(device)) is None
    assert_close(weight.gradient_sink.buffer, 1.0 + parts.double().sum(dim=0), 1e-6)


@variants
def test_gradient_of_the_weight_is_added_to_the_sink_over_micro_batches(device, lean):
    low = torch.bfloat16
    weight, exact = weights(12).to(device, low).requires_grad_(), weights(12).to(low).double().requires_grad_()
    weight.gradient_sink = GradientSink(torch.zeros(12, device=device))
    for micro_batch in range(3):
        x, branch = random(7, 12, seed=micro_batch), random(7, 12, seed=10 + micro_batch)
        triton_add_rms_norm(x.to(device, low), branch.to(device, low), weight, EPS, lean)[0].sum().backward()
        reference(x, branch, exact)[0].sum().backward()
    assert weight.grad is None
    assert_close(weight.gradient_sink.buffer, exact.grad, tolerance(low, lean))


def test_weight_that_autocast_casts_gets_its_gradient_through_autograd(device):
    weight = weights(12).float().to(device).requires_grad_()
    weight.gradient_sink = GradientSink(torch.zeros(12, device=device))
    with torch.autocast(device, dtype=torch.bfloat16):
        normed, _ = triton_add_rms_norm(random(7, 12).float().to(device), None, weight, EPS)
    normed.sum().backward()
    assert normed.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    assert weight.grad.any()
    assert not weight.gradient_sink.buffer.any()


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
