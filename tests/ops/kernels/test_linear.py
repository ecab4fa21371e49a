"""Linear layers whose weight gradient is summed in float32, in bfloat16 and in float8."""

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, dtypes, random, values_and_gradients

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.kernels import linear
from zero2all.ops.linear import Float8Linear, fp8_linear, fp32_wgrad_linear
from zero2all.ops.linear import feed_forward as build_feed_forward
from zero2all.ops.registry import OPERATORS
from zero2all.ops.swiglu import triton_swiglu

LOW = torch.bfloat16
EIGHT_BITS = {one.name: one.tolerance for one in OPERATORS["linear"]}["fp8"]


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def swiglu_reference(pairs: Tensor) -> Tensor:
    gate, up = pairs[..., 0::2], pairs[..., 1::2]
    return gate / (1 + (-gate).exp()) * up


def feed_forward_reference(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return linear_reference(swiglu_reference(linear_reference(x, gate_up)), down)


def feed_forward_inputs() -> list[Tensor]:
    return [random(2, 8, 16), random(64, 16, seed=1) / 4, random(16, 32, seed=2) / 4]


# ---- bfloat16 and float32 --------------------------------------------------------------------------------------------


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", [(1, 1), (6, 10), (2, 3, 7)], ids=str)
def test_linear_is_a_sum_over_inputs_plus_bias(device, dtype, shape):
    x, weight, bias = random(*shape), random(5, shape[-1], seed=1), random(5, seed=2)
    assert_agrees(fp32_wgrad_linear, linear_reference, [x, weight], dtype, device=device)
    assert_agrees(fp32_wgrad_linear, linear_reference, [x, weight, bias], dtype, device=device)


@dtypes(torch.float32, torch.bfloat16)
def test_feed_forward_without_keeping_the_product_of_swiglu(device, dtype):
    inputs = feed_forward_inputs()
    assert_agrees(linear.feed_forward_fp32_wgrad, feed_forward_reference, inputs, dtype, device=device)


@dtypes(torch.float32, torch.bfloat16)
def test_feed_forward_with_biases_goes_one_step_after_the_other(device, dtype):
    function = build_feed_forward("triton", triton_swiglu, "fp32_wgrad", fp32_wgrad_linear)
    x, up, down = feed_forward_inputs()

    def ours(x, up, down, up_bias, down_bias):
        return function(x, (up, up_bias), (down, down_bias))

    def reference(x, up, down, up_bias, down_bias):
        return linear_reference(swiglu_reference(linear_reference(x, up, up_bias)), down, down_bias)

    inputs = [x, up, down, random(64, seed=3), random(16, seed=4)]
    assert_agrees(ours, reference, inputs, dtype, device=device)


@pytest.mark.parametrize("fused", [False, True], ids=["linear", "feed-forward"])
def test_weight_gradients_are_summed_in_the_sink_over_micro_batches(device, fused):
    x, up, down = feed_forward_inputs()
    function = linear.feed_forward_fp32_wgrad if fused else lambda x, up, _: fp32_wgrad_linear(x, up)
    reference = feed_forward_reference if fused else lambda x, up, _: linear_reference(x, up)
    weights = [weight.to(device, LOW).requires_grad_() for weight in (up, down)]
    for weight in weights:
        weight.gradient_sink = GradientSink(torch.zeros(weight.shape, device=device))
    exact = [up.clone().requires_grad_(), down.clone().requires_grad_()]
    for micro_batch in range(3):
        part = random(*x.shape, seed=10 + micro_batch)
        function(part.to(device, LOW), *weights).sum().backward()
        reference(part, *exact).sum().backward()
    for weight, wanted in zip(weights[: 1 + fused], exact, strict=False):
        assert weight.grad is None
        assert weight.gradient_sink.buffer.dtype == torch.float32
        assert_close(weight.gradient_sink.buffer, wanted.grad, TOLERANCE[LOW])


# ---- float8 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def float8(device):
    """Skips where torch has no float8 matmul."""
    one = torch.ones((), device=device)
    straight = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(straight, straight.t(), scale_a=one, scale_b=one, out_dtype=LOW)
    except (RuntimeError, NotImplementedError) as problem:
        pytest.skip(f"no float8 matmul on {device}: {str(problem).splitlines()[0]}")


def test_float8_linear_agrees_to_the_digits_it_has(float8, device):
    x, weight, bias = random(2, 8, 32), random(48, 32, seed=1), random(48, seed=2)
    for inputs in ([x, weight], [x, weight, bias]):
        assert_agrees(fp8_linear, linear_reference, inputs, LOW, tolerance=EIGHT_BITS, device=device)


def test_float8_feed_forward_agrees_to_the_digits_it_has(float8, device):
    # Errors of the matmuls add up: three one behind the other in the gradient.
    inputs, tolerance = feed_forward_inputs(), 2 * EIGHT_BITS
    assert_agrees(fp8_linear.feed_forward, feed_forward_reference, inputs, LOW, tolerance=tolerance, device=device)


def test_float8_feed_forward_is_its_three_steps(float8, device):
    # The scales measured in passing by SwiGLU's kernels are almost those that would be measured afterwards.
    given = [value.to(device, LOW) for value in feed_forward_inputs()]

    def one_after_the_other(x, up, down):
        return fp8_linear(triton_swiglu(fp8_linear(x, up)), down)

    fused, fused_gradients = values_and_gradients(fp8_linear.feed_forward, given)
    apart, apart_gradients = values_and_gradients(one_after_the_other, given)
    for ours, theirs in zip([*fused, *fused_gradients], [*apart, *apart_gradients], strict=True):
        assert_close(ours, theirs, EIGHT_BITS)


def test_float8_weight_gradients_are_added_to_the_sink(float8, device):
    x, weight = random(16, 32).to(device, LOW), random(48, 32, seed=1).to(device, LOW)
    plain, main = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    main.gradient_sink = GradientSink(torch.ones(weight.shape, device=device))
    fp8_linear(x, plain).sum().backward()
    for _ in range(2):
        fp8_linear(x, main).sum().backward()
    assert main.grad is None
    assert_close(main.gradient_sink.buffer, 1.0 + 2.0 * plain.grad.double(), 1e-6)


def test_weight_is_made_small_again_only_when_it_has_changed(device):
    weight, copies = random(16, 16).to(device, LOW), Float8Linear().copies
    first = linear.float8_weight(weight, copies)
    assert linear.float8_weight(weight, copies) is first
    scale, numbers = float(first.scale), first.straight.float()
    weight.mul_(2.0)
    second = linear.float8_weight(weight, copies)
    assert float(second.scale) == pytest.approx(2 * scale)
    assert torch.equal(second.straight.float(), numbers)


def test_its_small_copy_stays_where_a_recording_reads_it(device):
    weight, copies = random(16, 16).to(device, LOW), Float8Linear().copies
    first = linear.float8_weight(weight, copies)
    weight.copy_(random(16, 16).to(device, LOW))
    second = linear.float8_weight(weight, copies)
    for place in ("straight", "turned", "scale"):
        assert getattr(second, place).data_ptr() == getattr(first, place).data_ptr()
    fresh = linear.float8_weight(weight.clone(), copies)
    assert torch.equal(second.turned.float(), fresh.turned.float())
    assert torch.equal(second.scale, fresh.scale)
