"""The feed-forward with SwiGLU in the epilogues of QuACK's matmuls.

Where there is no GPU, or no QuACK, formulas that answer as its functions do stand in for them: what is ours around them
is then tested all the same.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops.agreement import TOLERANCE, assert_agrees, assert_close, random, values_and_gradients

pytest.importorskip("triton", reason="the kernels around it are written in Triton, which is not installed")

from zero2all.ops import trial
from zero2all.ops.gradient_sink import GradientSink
from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues
from zero2all.ops.kernels.linear import feed_forward_fp32_wgrad
from zero2all.ops.linear import feed_forward as build_feed_forward
from zero2all.ops.linear import fp32_wgrad_linear
from zero2all.ops.swiglu import problem_in_trial, triton_swiglu

LOW = torch.bfloat16


def gated(x: Tensor, weight: Tensor, *, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    """x weight, in pairs of gate and up, and swiglu of it."""
    assert (activation, tuned) == ("swiglu", False)
    pairs = (x @ weight).float()
    return pairs.to(x.dtype), (torch.nn.functional.silu(pairs[:, 0::2]) * pairs[:, 1::2]).to(x.dtype)


def dgated(
    dy: Tensor, weight: Tensor, pairs: Tensor, *, activation: str, dynamic_scheduler: bool, tuned: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of `pairs`, whose swiglu has the gradient dy weight, and that swiglu."""
    assert (activation, tuned) == ("swiglu", False)
    dh, gate, up = (dy @ weight).float(), pairs[:, 0::2].float(), pairs[:, 1::2].float()
    share = torch.sigmoid(gate)
    both = torch.stack((dh * up * share * (1 + gate * (1 - share)), dh * gate * share), dim=-1)
    return both.flatten(1).to(dy.dtype), (gate * share * up).to(dy.dtype)


@pytest.fixture(autouse=True)
def quack(device, monkeypatch):
    """QuACK, or the formulas above in its place."""
    if device == "cpu":
        interface = ModuleType("quack.gemm_interface")
        interface.gemm_gated, interface.gemm_dgated = gated, dgated
        monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
        return
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("QuACK's matmuls need a GPU of the Hopper generation or newer")


def reference(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    pairs = x @ gate_up.t()
    gate, up = pairs[..., 0::2], pairs[..., 1::2]
    return (gate / (1 + (-gate).exp()) * up) @ down.t()


def inputs() -> list[Tensor]:
    return [random(2, 8, 16), random(64, 16, seed=1) / 4, random(16, 32, seed=2) / 4]


def test_feed_forward_is_linear_swiglu_linear(device):
    assert_agrees(feed_forward_in_epilogues, reference, inputs(), LOW, device=device)


def test_weight_gradients_are_summed_in_the_sink_over_micro_batches(device):
    x, *weights = inputs()
    ours = [weight.to(device, LOW).requires_grad_() for weight in weights]
    exact = [weight.clone().requires_grad_() for weight in weights]
    for weight in ours:
        weight.gradient_sink = GradientSink(torch.zeros(weight.shape, device=device))
    for micro_batch in range(3):
        part = random(*x.shape, seed=10 + micro_batch)
        feed_forward_in_epilogues(part.to(device, LOW), *ours).sum().backward()
        reference(part, *exact).sum().backward()
    for weight, wanted in zip(ours, exact, strict=True):
        assert weight.grad is None
        assert_close(weight.gradient_sink.buffer, wanted.grad, TOLERANCE[LOW])


def test_it_is_what_our_own_kernels_compute(device):
    given = [value.to(device, LOW) for value in inputs()]
    found, gradients = values_and_gradients(feed_forward_in_epilogues, given)
    wanted, expected = values_and_gradients(feed_forward_fp32_wgrad, given)
    for ours, theirs in zip([*found, *gradients], [*wanted, *expected], strict=True):
        assert_close(ours, theirs, TOLERANCE[LOW])


def test_biases_are_left_to_one_step_after_the_other(device):
    function = build_feed_forward("quack", triton_swiglu, "fp32_wgrad", fp32_wgrad_linear)
    x, gate_up, down = (value.to(device, LOW) for value in inputs())
    assert torch.equal(function(x, (gate_up, None), (down, None)), feed_forward_in_epilogues(x, gate_up, down))
    zeros = torch.zeros(64, dtype=LOW, device=device), torch.zeros(16, dtype=LOW, device=device)
    apart = fp32_wgrad_linear(triton_swiglu(fp32_wgrad_linear(x, gate_up, zeros[0])), down, zeros[1])
    assert torch.equal(function(x, (gate_up, zeros[0]), (down, zeros[1])), apart)


def test_it_is_tried_before_it_is_taken(device, monkeypatch):
    monkeypatch.setattr(trial, "DEVICE", device)
    problem_in_trial.cache_clear()
    assert problem_in_trial(LOW) is None
    if device == "cpu":
        wrong = sys.modules["quack.gemm_interface"]
        monkeypatch.setattr(wrong, "gemm_gated", lambda *a, **k: tuple(1.1 * part for part in gated(*a, **k)))
        problem_in_trial.cache_clear()
        assert "its results were wrong by" in str(problem_in_trial(LOW))
    problem_in_trial.cache_clear()
