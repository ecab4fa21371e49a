"""Hand-written autograd functions under autocast: cast like torch's own matmuls on the way in, untouched on the way
back, whatever region backward() is called in."""

from contextlib import nullcontext

import pytest
import torch

from tests.ops.agreement import assert_same_bits, outputs_of, random, random_ids

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")

from zero2all.ops.kernels import linear
from zero2all.ops.kernels.cross_entropy import triton_cross_entropy
from zero2all.ops.kernels.embedding import triton_embedding
from zero2all.ops.kernels.rms_norm import triton_add_rms_norm
from zero2all.ops.kernels.rope import triton_rope
from zero2all.ops.kernels.swiglu import triton_swiglu
from zero2all.ops.linear import fp8_linear
from zero2all.ops.linear_cross_entropy import chunked_linear_cross_entropy, triton_linear_cross_entropy

LOW, OTHER, WIDE = torch.bfloat16, torch.float16, torch.float32
TABLE = random(4, 3, seed=9)


def rope(qkv):
    return triton_rope(qkv, TABLE.cos().float().to(qkv.device), TABLE.sin().float().to(qkv.device), 2, 1)


def head_and_loss(function):
    def of_hidden_and_head(hidden, head):
        there = hidden.device
        return function(hidden, head, random_ids(17, 6).to(there), random(6, seed=3).abs().float().to(there), 17, 0.02)

    return of_hidden_and_head


def feed_forward_inputs():
    return [random(16, 16), random(32, 16, seed=1) / 4, random(16, 16, seed=2) / 4]


# Name: function, inputs, which of them autocast casts.
CASES = {
    "rms_norm": (
        lambda *given: triton_add_rms_norm(*given, 1e-5),
        [random(5, 12), random(5, 12, seed=1), random(12, seed=2)],
        [False, False, True],
    ),
    "rms_norm, lean": (
        lambda *given: triton_add_rms_norm(*given, 1e-5, True),
        [random(5, 12), random(5, 12, seed=1), 1 + random(12, seed=2).abs()],
        [False, False, True],
    ),
    "rope": (rope, [random(2, 4, 4, 6)], [False]),
    "embedding": (lambda table: triton_embedding(random_ids(5, 9).to(table.device), table), [random(5, 4)], [False]),
    "swiglu": (triton_swiglu, [random(3, 10)], [True]),
    "cross_entropy": (
        lambda logits: triton_cross_entropy(logits, random_ids(9, 4).to(logits.device)),
        [random(4, 9)],
        [False],
    ),
    "linear_cross_entropy, triton": (
        head_and_loss(triton_linear_cross_entropy),
        [random(6, 8), random(20, 8, seed=1)],
        [True, True],
    ),
    "linear_cross_entropy, chunked": (
        head_and_loss(chunked_linear_cross_entropy),
        [random(6, 8), random(20, 8, seed=1)],
        [True, True],
    ),
    "linear fp32_wgrad": (
        linear.linear_fp32_wgrad,
        [random(5, 8), random(4, 8, seed=1), random(4, seed=2)],
        [True, True, True],
    ),
    "feed-forward fp32_wgrad": (linear.feed_forward_fp32_wgrad, feed_forward_inputs(), [True] * 3),
    "linear fp8": (fp8_linear, [random(16, 32), random(16, 32, seed=1)], [True, True]),
    "feed-forward fp8": (fp8_linear.feed_forward, feed_forward_inputs(), [True] * 3),
}
cases = pytest.mark.parametrize(("function", "inputs", "cast"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _float8(request, device):
    if "fp8" in request.node.name:
        small, one = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        try:
            torch._scaled_mm(small, small.t(), scale_a=one, scale_b=one, out_dtype=LOW)
        except (RuntimeError, NotImplementedError) as problem:
            pytest.skip(f"no float8 matmul on {device}: {str(problem).splitlines()[0]}")


def forward_and_backward(function, leaves, forward_in, backward_in, prepare=lambda inputs: inputs):
    """Outputs, and the gradients of `leaves`, with forward and backward each inside its own context."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    with forward_in:
        outputs = outputs_of(function(*prepare([leaf * 1 for leaf in leaves])))
    kept = [output.detach().clone() for output in outputs]
    open_ends = [output for output in outputs if output.requires_grad]
    directions = [random(*output.shape, seed=99).to(output.device, output.dtype) for output in open_ends]
    with backward_in:
        return kept, list(torch.autograd.grad(open_ends, leaves, directions))


@cases
def test_low_precision_is_the_same_inside_autocast_and_outside(device, function, inputs, cast):
    leaves = [value.to(device, LOW) for value in inputs]
    plain = forward_and_backward(function, leaves, nullcontext(), nullcontext())
    inside = forward_and_backward(
        function, leaves, torch.autocast(device, dtype=LOW), torch.autocast(device, dtype=LOW)
    )
    assert_same_bits([*inside[0], *inside[1]], [*plain[0], *plain[1]])


@cases
def test_float32_inputs_are_cast_once_and_their_gradients_are_float32(device, function, inputs, cast):
    leaves = [value.to(device, WIDE) for value in inputs]

    def by_hand(given):
        return [value.to(LOW) if also else value for value, also in zip(given, cast, strict=True)]

    plain = forward_and_backward(function, leaves, nullcontext(), nullcontext(), by_hand)
    inside = forward_and_backward(
        function, leaves, torch.autocast(device, dtype=LOW), torch.autocast(device, dtype=OTHER)
    )
    assert {gradient.dtype for gradient in inside[1]} == {WIDE}
    assert_same_bits([*inside[0], *inside[1]], [*plain[0], *plain[1]])


def test_autocast_is_on_again_afterwards(device):
    x, weight = (random(4, 4, seed=seed).to(device, LOW).requires_grad_() for seed in (0, 1))
    with torch.autocast(device, dtype=LOW):
        y = linear.linear_fp32_wgrad(x, weight)
        assert torch.is_autocast_enabled(device)
        y.sum().backward()
        assert torch.is_autocast_enabled(device)
        assert (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).dtype == LOW


def test_autocast_is_on_again_after_an_error(device):
    x, narrow = random(4, 4).to(device, LOW), random(4, 3).to(device, LOW)
    with torch.autocast(device, dtype=LOW):
        with pytest.raises(RuntimeError):
            linear.linear_fp32_wgrad(x, narrow)
        assert torch.is_autocast_enabled(device)
