"""Hand-written autograd functions under autocast: cast like torch's own matmuls on the way in, untouched on the way
back, whatever region backward() is called in."""

from contextlib import nullcontext

import pytest
import torch

from tests.ops.agreement import assert_same_bits, outputs_of, random, random_ids
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


NORM = [random(5, 12), random(5, 12, seed=1), 1 + random(12, seed=2).abs()]
HEAD = [random(6, 8), random(20, 8, seed=1)]
LINEAR = [random(5, 8), random(4, 8, seed=1), random(4, seed=2)]
FEED_FORWARD = [random(16, 16), random(32, 16, seed=1) / 4, random(16, 16, seed=2) / 4]


def rms_norm(lean):
    return lambda *given: triton_add_rms_norm(*given, 1e-5, lean)


def cross_entropy(logits):
    return triton_cross_entropy(logits, random_ids(9, 4).to(logits.device))


# Name: function, inputs, which of them autocast casts.
CASES = {
    "rms_norm": (rms_norm(False), NORM, [False, False, True]),
    "rms_norm, lean": (rms_norm(True), NORM, [False, False, True]),
    "rope": (rope, [random(2, 4, 4, 6)], [False]),
    "embedding": (lambda table: triton_embedding(random_ids(5, 9).to(table.device), table), [random(5, 4)], [False]),
    "swiglu": (triton_swiglu, [random(3, 10)], [True]),
    "cross_entropy": (cross_entropy, [random(4, 9)], [False]),
    "linear_cross_entropy, triton": (head_and_loss(triton_linear_cross_entropy), HEAD, [True] * 2),
    "linear_cross_entropy, chunked": (head_and_loss(chunked_linear_cross_entropy), HEAD, [True] * 2),
    "linear fp32_wgrad": (linear.linear_fp32_wgrad, LINEAR, [True] * 3),
    "feed-forward fp32_wgrad": (linear.feed_forward_fp32_wgrad, FEED_FORWARD, [True] * 3),
    "linear fp8": (fp8_linear, [random(16, 32), random(16, 32, seed=1)], [True] * 2),
    "feed-forward fp8": (fp8_linear.feed_forward, FEED_FORWARD, [True] * 3),
}


@pytest.fixture(autouse=True)
def needs_float8(request):
    if "fp8" in request.node.name:
        request.getfixturevalue("float8")


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


@pytest.mark.parametrize(("function", "inputs", "cast"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("given", "backward_in"), [(LOW, LOW), (WIDE, OTHER)], ids=["low", "float32"])
def test_inputs_are_cast_once_and_gradients_have_their_dtype(device, function, inputs, cast, given, backward_in):
    leaves = [value.to(device, given) for value in inputs]

    def by_hand(values):
        return [value.to(LOW) if also else value for value, also in zip(values, cast, strict=True)]

    plain = forward_and_backward(function, leaves, nullcontext(), nullcontext(), by_hand)
    regions = (torch.autocast(device, dtype=dtype) for dtype in (LOW, backward_in))
    inside = forward_and_backward(function, leaves, *regions)
    assert {gradient.dtype for gradient in inside[1]} == {given}
    assert_same_bits([*inside[0], *inside[1]], [*plain[0], *plain[1]])


def test_autocast_is_on_again_afterwards_also_after_an_error(device):
    x, weight = (random(4, 4, seed=seed).to(device, LOW).requires_grad_() for seed in (0, 1))
    with torch.autocast(device, dtype=LOW):
        y = linear.linear_fp32_wgrad(x, weight)
        assert torch.is_autocast_enabled(device)
        y.sum().backward()
        assert torch.is_autocast_enabled(device)
        assert (torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).dtype == LOW
        with pytest.raises(RuntimeError):
            linear.linear_fp32_wgrad(x, random(4, 3).to(device, LOW))
        assert torch.is_autocast_enabled(device)
