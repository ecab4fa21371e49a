"""Experts in one matmul each, SwiGLU with a gate per row, and sums of rows."""

import pytest
import torch

from tests.ops.agreement import assert_close, dtypes, random
from zero2all.ops.experts import looped_experts
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.kernels.experts import GroupedExperts, gated_swiglu_backward, gated_swiglu_forward, sum_rows
from zero2all.ops.swiglu import eager_swiglu


@pytest.mark.parametrize("width", [5, 64, 1030])
def test_swiglu_times_the_gate_of_the_row(device, width):
    pairs, gates, dh = random(7, 2 * width), random(7, seed=1), random(7, width, seed=2)
    exact = [pairs.double().requires_grad_(), gates.double().requires_grad_()]
    product = eager_swiglu(exact[0]) * exact[1].unsqueeze(1)
    wanted = torch.autograd.grad(product, exact, dh.double())
    given = [each.float().to(device) for each in (pairs, gates, dh)]
    assert_close(gated_swiglu_forward(given[0], given[1]), product.detach(), 3e-6)
    dpairs, h, dgates = gated_swiglu_backward(given[2], given[0], given[1])
    for found, exactly in ((h, product.detach()), (dpairs, wanted[0]), (dgates, wanted[1])):
        assert_close(found, exactly, 3e-6)


@pytest.mark.parametrize("per_token", [1, 3])
def test_the_rows_of_a_token_are_added(device, per_token):
    rows = random(4 * per_token, 70)
    places = torch.randperm(4 * per_token, generator=torch.Generator().manual_seed(1))
    found = sum_rows(rows.float().to(device), places.to(device), per_token)
    assert_close(found, rows[places].view(4, per_token, 70).sum(1), 3e-6)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_all_experts_at_once_are_one_after_the_other(device, dtype, has_sinks):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("grouped_mm on a GPU takes bfloat16")
    x, gates = random(40, 16), random(40, seed=1).abs()
    gate_up, down, dy = random(4, 32, 16, seed=2) / 4, random(4, 16, 16, seed=3) / 4, random(40, 16, seed=4)
    ends = torch.tensor([10, 10, 37, 40], dtype=torch.int32)  # the second expert has no token
    exact = [each.to(dtype).double().requires_grad_() for each in (x, gates, gate_up, down)]
    wanted = looped_experts(*exact, ends, eager_swiglu)
    wanted_gradients = torch.autograd.grad(wanted, exact, dy.to(dtype).double())

    given = [each.to(device, dtype).detach().requires_grad_() for each in (x, gates, gate_up, down)]
    given[1] = given[1].detach().float().requires_grad_()
    buffers = [torch.ones(each.shape, device=device) for each in given[2:]]
    for weight, buffer in zip(given[2:], buffers, strict=True) if has_sinks else ():
        weight.gradient_sink = GradientSink(buffer)
    y = GroupedExperts.apply(*given, ends.to(device))
    y.backward(dy.to(device, dtype))
    tolerance = 3e-6 if dtype == torch.float32 else 2e-2
    assert_close(y.detach(), wanted.detach(), tolerance)
    found = [each.grad for each in given]
    if has_sinks:
        assert found[2:] == [None, None]
        found[2:] = [buffer - 1 for buffer in buffers]
    for mine, exactly in zip(found, wanted_gradients, strict=True):
        assert_close(mine, exactly, tolerance)
