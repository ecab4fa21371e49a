"""The feed-forward with SwiGLU in the epilogues of QuACK's matmuls; without a GPU, formulas stand in for these."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.ops import formulas
from tests.ops.agreement import assert_agrees, assert_sinks_gather, random
from zero2all.ops import trial
from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues
from zero2all.ops.linear import feed_forward as build_feed_forward
from zero2all.ops.linear import fp32_wgrad_linear
from zero2all.ops.swiglu import problem_in_trial, triton_swiglu

LOW = torch.bfloat16


def gated(x: Tensor, weight: Tensor, *, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    """x weight, in pairs of gate and up, and swiglu of it."""
    assert (activation, tuned) == ("swiglu", False)
    pairs = (x @ weight).float()
    return pairs.to(x.dtype), (torch.nn.functional.silu(pairs[:, 0::2]) * pairs[:, 1::2]).to(x.dtype)


def dgated(dy: Tensor, weight: Tensor, pairs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """The gradient of `pairs`, whose swiglu has the gradient dy weight, and that swiglu."""
    assert options.keys() == {"activation", "dynamic_scheduler", "tuned"}
    assert (options["activation"], options["tuned"]) == ("swiglu", False)
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


def inputs() -> list[Tensor]:
    return [random(2, 8, 16), random(64, 16, seed=1) / 4, random(16, 32, seed=2) / 4]


def test_feed_forward_is_linear_swiglu_linear_and_its_weight_gradients_go_to_the_sinks(device):
    x, *weights = inputs()
    function = build_feed_forward("quack", triton_swiglu, "fp32_wgrad", fp32_wgrad_linear)

    def ours(x, up, down):
        return function(x, (up, None), (down, None))

    assert_agrees(ours, formulas.feed_forward, inputs(), LOW, device=device)
    assert_sinks_gather(feed_forward_in_epilogues, formulas.feed_forward, [x], weights, device=device)


def test_it_is_tried_before_it_is_taken(device, monkeypatch):
    monkeypatch.setattr(trial, "DEVICE", device)
    assert problem_in_trial.__wrapped__(LOW) is None  # without what it keeps
    if device == "cpu":
        wrong = sys.modules["quack.gemm_interface"]
        monkeypatch.setattr(wrong, "gemm_gated", lambda *a, **k: tuple(1.1 * part for part in gated(*a, **k)))
        assert "its results were wrong by" in str(problem_in_trial.__wrapped__(LOW))
