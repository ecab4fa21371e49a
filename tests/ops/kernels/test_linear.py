"""Linear layers whose weight gradient is summed in float32, in bfloat16 and in float8."""

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from tests.ops.agreement import assert_agrees, assert_sinks_gather, dtypes, random
from zero2all.ops.kernels import linear
from zero2all.ops.linear import Float8Linear, fp8_linear, fp32_wgrad_linear
from zero2all.ops.linear import feed_forward as build_feed_forward
from zero2all.ops.registry import OPERATORS
from zero2all.ops.swiglu import triton_swiglu

LOW = torch.bfloat16
EIGHT_BITS = {one.name: one.tolerance for one in OPERATORS["linear"]}["fp8"]


def feed_forward_inputs() -> list[Tensor]:
    return [random(2, 8, 16), random(64, 16, seed=1) / 4, random(16, 32, seed=2) / 4]


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", [(1, 1), (6, 10), (2, 3, 7)], ids=str)
def test_linear_is_a_sum_over_inputs_plus_bias(device, dtype, shape):
    inputs = [random(*shape), random(5, shape[-1], seed=1), random(5, seed=2)]
    for given in (inputs[:2], inputs):
        assert_agrees(fp32_wgrad_linear, formulas.linear, given, dtype, device=device)


@dtypes(torch.float32, torch.bfloat16)
def test_feed_forward_without_keeping_the_product_of_swiglu(device, dtype):
    inputs = feed_forward_inputs()
    assert_agrees(linear.feed_forward_fp32_wgrad, formulas.feed_forward, inputs, dtype, device=device)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("swiglu", ["triton", "quack"])
def test_feed_forward_with_biases_goes_one_step_after_the_other(device, dtype, swiglu):
    function = build_feed_forward(swiglu, triton_swiglu, "fp32_wgrad", fp32_wgrad_linear)

    def ours(x, up, down, up_bias, down_bias):
        return function(x, (up, up_bias), (down, down_bias))

    inputs = [*feed_forward_inputs(), random(64, seed=3), random(16, seed=4)]
    assert_agrees(ours, formulas.feed_forward, inputs, dtype, device=device)


def test_weight_gradients_are_summed_in_the_sink_over_micro_batches(device):
    x, up, down = feed_forward_inputs()
    assert_sinks_gather(fp32_wgrad_linear, formulas.linear, [x], [up], device=device)
    assert_sinks_gather(linear.feed_forward_fp32_wgrad, formulas.feed_forward, [x], [up, down], device=device)


def test_float8_layers_agree_to_the_digits_they_have_and_add_weight_gradients_to_the_sink(float8, device):
    x, weight, bias = random(2, 8, 32), random(48, 32, seed=1), random(48, seed=2)
    for inputs in ([x, weight], [x, weight, bias]):
        assert_agrees(fp8_linear, formulas.linear, inputs, LOW, tolerance=EIGHT_BITS, device=device)
    # Errors of the matmuls add up: three one behind the other in the gradient.
    inputs, tolerance = feed_forward_inputs(), 2 * EIGHT_BITS
    assert_agrees(fp8_linear.feed_forward, formulas.feed_forward, inputs, LOW, tolerance=tolerance, device=device)
    assert_sinks_gather(fp8_linear, formulas.linear, [x], [weight], tolerance=EIGHT_BITS, device=device)


def test_weight_is_made_small_again_only_when_it_has_changed_and_in_the_same_place(device):
    weight, copies = random(16, 16).to(device, LOW), Float8Linear().copies
    first = linear.float8_weight(weight, copies)
    assert linear.float8_weight(weight, copies) is first
    parts = ("straight", "turned", "scale")
    places = [getattr(first, part).data_ptr() for part in parts]
    weight.copy_(2.0 * random(16, 16, seed=1).to(device, LOW))
    second, fresh = linear.float8_weight(weight, copies), linear.float8_weight(weight.clone(), copies)
    assert all(torch.equal(getattr(second, part).float(), getattr(fresh, part).float()) for part in parts)
    assert [getattr(second, part).data_ptr() for part in parts] == places, "where a recording reads it"
