"""Residual add and RMSNorm in one kernel each way."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops import agreement, formulas
from tests.ops.agreement import assert_agrees, assert_close, dtypes, random, values_and_gradients
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.kernels import rms_norm
from zero2all.ops.kernels.rms_norm import triton_add_rms_norm
from zero2all.ops.registry import OPERATORS

EPS = 1e-5
reference = partial(formulas.rms_norm, eps=EPS)
SHAPES = [(1, 1), (1, 48), (7, 100), (2, 3, 33), (20, 5)]  # more rows than programs in the backward
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
variants = pytest.mark.parametrize("lean", [False, True], ids=["plain", "lean"])


def weights(width: int) -> Tensor:
    """Around 1, as in a model."""
    return 1.0 + random(width, seed=2) / 8


def norm_of(lean: bool):
    return lambda *given: triton_add_rms_norm(*given, EPS, lean)


def tolerance(dtype: torch.dtype, lean: bool) -> float:
    """The lean variant's own in bfloat16."""
    if dtype == torch.float32:
        return agreement.TOLERANCE[dtype]
    declared = {one.name: one.tolerance for one in OPERATORS["rms_norm"]}
    return declared["triton_lean" if lean else "triton"] or agreement.TOLERANCE[dtype]


@variants
@dtypes(torch.float32, torch.bfloat16)
@shapes
def test_sum_and_norm_of_a_residual_and_a_branch(device, lean, dtype, shape):
    inputs = [random(*shape), random(*shape, seed=1), weights(shape[-1])]
    assert_agrees(norm_of(lean), reference, inputs, dtype, tolerance=tolerance(dtype, lean), device=device)


@variants
def test_float32_residual_under_bfloat16_weights_stays_float32(device, lean):
    agreement.assert_float32_residual_stays(lambda *given: triton_add_rms_norm(*given, lean), weights(20), device)


@variants
def test_norm_whose_sum_goes_nowhere_has_the_gradient_of_the_norm_alone(device, lean):
    # The last norm of a model: nobody adds anything to its sum.
    inputs = [random(6, 12), random(6, 12, seed=1), weights(12)]
    normed, wanted = (lambda *given, of=function: of(*given)[0] for function in (norm_of(lean), reference))
    assert_agrees(normed, wanted, inputs, torch.float32, device=device)


def test_rows_that_are_not_contiguous_are_read_as_they_are(device):
    def turned(function):
        return lambda x, branch, weight: function(x.t(), branch.t(), weight)

    inputs = [random(12, 6), random(12, 6, seed=1), weights(12)]
    assert_agrees(turned(norm_of(False)), turned(reference), inputs, torch.float32, device=device)


@variants
def test_gradient_of_the_weight_is_added_to_the_sink_over_micro_batches(device, lean, monkeypatch):
    monkeypatch.setattr(rms_norm, "SUM_ROWS", 2)  # several parts of the sum over programs
    inputs, allowed = [random(11, 12), random(11, 12, seed=10)], tolerance(torch.bfloat16, lean)
    agreement.assert_sinks_gather(norm_of(lean), reference, inputs, [weights(12)], tolerance=allowed, device=device)


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
    _, gradients = values_and_gradients(norm_of(True), given)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    kept = [place for place in range(12) if place != 5]
    assert_close(gradients[2][kept], wanted[2][kept], 3e-6)
    assert float(gradients[2][5]) == 0.0
