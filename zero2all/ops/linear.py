"""Linear layers of the blocks: x W^T + bias; and the whole feed-forward part: linear, SwiGLU, linear.

plain       torch's; the weight gradient has the weight's dtype
fp32_wgrad  the weight gradient is added in float32 to the weight's sink (`zero2all.ops.gradient_sink`)
fp8         float8 tensor cores, one scale per tensor; weight gradient as in fp32_wgrad
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.gradient_sink import now_or_later, sink_of
from zero2all.ops.implementation import Implementation, needs_float8, needs_triton
from zero2all.ops.swiglu import SwigluOp

if TYPE_CHECKING:
    from zero2all.ops.kernels.linear import Float8Weight

Parameters = tuple[Tensor, "Tensor | None"]
"""Weight and bias."""
LinearOp = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(x, weight, bias) -> y."""
FeedForwardOp = Callable[[Tensor, Parameters, Parameters], Tensor]
"""(x, gate and up, down) -> y; the rows of gate and up are in pairs, as SwiGLU takes them."""


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear."""
    return F.linear(x, weight, bias)


def fp32_wgrad_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's matmuls with a float32 weight gradient."""
    from zero2all.ops.kernels.linear import linear_fp32_wgrad

    return linear_fp32_wgrad(x, weight, bias)


class _DeferrableLinear(torch.autograd.Function):
    """x W^T, whose weight gradient `zero2all.ops.gradient_sink.deferring` can leave for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            now_or_later(partial(_add_product, ctx.weight, dy, x))
        return dy @ ctx.weight, None


def _add_product(weight: Tensor, dy: Tensor, x: Tensor) -> None:
    gradient = dy.flatten(0, -2).t() @ x.flatten(0, -2)
    sink = sink_of(weight)
    if sink is not None:
        sink.add(gradient)
    elif weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


def deferrable_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `plain_linear`, but its weight gradient can be left for later, as that of the other implementations can."""
    y: Tensor = _DeferrableLinear.apply(x, weight)
    return y if bias is None else y + bias


class Float8Linear:
    """float8 matmuls. Keeps a float8 copy of each weight it was called with, for as long as the weight exists."""

    def __init__(self) -> None:
        self.copies: MutableMapping[Tensor, Float8Weight] = WeakTensorKeyDictionary()
        """A copy is renewed in place when its weight has changed: once per optimizer step."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """One linear layer."""
        from zero2all.ops.kernels.linear import linear_8

        return linear_8(x, weight, bias, self.copies)

    def feed_forward(self, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Linear, SwiGLU and linear, fused."""
        from zero2all.ops.kernels.linear import feed_forward_8

        return feed_forward_8(x, gate_up, down, self.copies)

    def renew_copies(self, weights: Iterable[Tensor]) -> None:
        """Renew the copies of these weights now, where there are any, rather than in the next forward pass."""
        known = [weight for weight in weights if weight in self.copies]
        if known:
            from zero2all.ops.kernels.linear import float8_weight

            for weight in known:
                float8_weight(weight, self.copies)


fp8_linear = Float8Linear()

IMPLEMENTATIONS: tuple[Implementation[LinearOp], ...] = (
    Implementation("fp32_wgrad", fp32_wgrad_linear, needs_triton, compile_safe=False),
    Implementation("plain", plain_linear, footprint=Footprint(writes_weight_gradient=True)),
    Implementation(
        "fp8",
        fp8_linear,
        needs_float8,
        compile_safe=False,
        tolerance=8e-2,
        # The weights as they are and transposed; their gradients are added to the sinks from tensors of their own.
        footprint=Footprint(input_copy_bytes=1, weight_copy_bytes=2, writes_weight_gradient=True),
    ),
)


def is_fused(swiglu_name: str, linear_name: str) -> bool:
    """Whether these two are fused into one feed-forward: our kernels, which torch.compile cannot trace."""
    return swiglu_name in ("triton", "quack") and linear_name in ("fp32_wgrad", "fp8")


def feed_forward(swiglu_name: str, swiglu: SwigluOp, linear_name: str, linear: LinearOp) -> FeedForwardOp:
    """The feed-forward of these two: fused where both are our kernels and there are no biases, else step by step."""

    def step_by_step(x: Tensor, gate_up: Parameters, down: Parameters) -> Tensor:
        return linear(swiglu(linear(x, *gate_up)), *down)

    if not is_fused(swiglu_name, linear_name):
        return step_by_step

    fused = _fused(swiglu_name, linear_name)

    def fused_without_biases(x: Tensor, gate_up: Parameters, down: Parameters) -> Tensor:
        if gate_up[1] is None and down[1] is None:
            return fused(x, gate_up[0], down[0])
        return step_by_step(x, gate_up, down)

    return fused_without_biases


def _fused(swiglu_name: str, linear_name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if linear_name == "fp8":
        return fp8_linear.feed_forward
    if swiglu_name == "quack":
        from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues

        return feed_forward_in_epilogues
    from zero2all.ops.kernels.linear import feed_forward_fp32_wgrad

    return feed_forward_fp32_wgrad


def feed_forward_footprint(swiglu: Implementation[SwigluOp], linear: Implementation[LinearOp]) -> Footprint:
    """What the feed-forward of these two saves, beside its own input, and needs in its backward pass."""
    fused, copy_bytes = is_fused(swiglu.name, linear.name), linear.footprint.input_copy_bytes

    def saved(sizes: Sizes) -> float:
        gates_and_ups = _gates_and_ups(sizes)
        if fused:  # the product is computed again in the backward pass, or saved as a float8 copy
            return gates_and_ups + copy_bytes * sizes.intermediate_size
        product = (copy_bytes or sizes.value_bytes) * sizes.intermediate_size
        return gates_and_ups + swiglu.footprint.saved(sizes) + product

    def forward(sizes: Sizes) -> tuple[Moment, ...]:
        result = float(sizes.value_bytes * sizes.hidden_size)
        if fused:  # h, in float8 too
            return (Moment((sizes.value_bytes + copy_bytes) * sizes.intermediate_size + result),)
        return (Moment(result), *swiglu.footprint.forward(sizes))

    def backward(sizes: Sizes) -> tuple[Moment, ...]:
        if fused:
            return _fused_moments(swiglu.name, linear.name, sizes)
        inner, input_gradient = (
            float(sizes.value_bytes * sizes.intermediate_size),
            sizes.value_bytes * sizes.hidden_size,
        )
        matrix = inner * sizes.hidden_size if linear.footprint.writes_weight_gradient else 0.0
        product = float(copy_bytes or sizes.value_bytes) * sizes.intermediate_size
        copies = 2.0 * copy_bytes
        (of_swiglu,) = swiglu.footprint.backward(sizes)
        return (
            Moment(inner + copies * sizes.hidden_size, matrix),
            Moment(inner + of_swiglu.per_token - product),
            Moment((2 * inner + 2 * copies * sizes.intermediate_size) + input_gradient - saved(sizes), 2 * matrix),
        )

    return Footprint(saved, forward, backward, is_fused=fused, kept_results=_gates_and_ups)


def _gates_and_ups(sizes: Sizes) -> float:
    """What the first projection returns."""
    return 2.0 * sizes.value_bytes * sizes.intermediate_size


def _fused_moments(swiglu_name: str, linear_name: str, sizes: Sizes) -> tuple[Moment, ...]:
    """Of `FeedForward8`, `FeedForwardInEpilogues`, or `SwigluLinearFp32Wgrad` and `LinearFp32Wgrad`."""
    inner, input_gradient = float(sizes.value_bytes * sizes.intermediate_size), sizes.value_bytes * sizes.hidden_size
    if linear_name == "fp8":  # dh, and the gradients of gate and up, also in float8, straight and turned
        copies, matrix = 4.0 * sizes.intermediate_size, 2 * inner * sizes.hidden_size
        return (Moment(3 * inner + copies + input_gradient, matrix),)
    if swiglu_name == "quack":  # the gradients of gate and up, and h again, which is dropped
        return Moment(3 * inner), Moment(2 * inner + input_gradient)
    # dh, the gradients of gate and up, and h again; then all but gate and up are freed.
    return Moment(4 * inner), Moment(2 * inner + input_gradient - _gates_and_ups(sizes))
