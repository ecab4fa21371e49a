"""Linear layers that add their weight gradient to a float32 buffer, in bfloat16 and in float8.

The gradient of a weight with a sink (`zero2all.ops.gradient_sink`) is added to it in float32, over any number of
micro-batches; a weight without one gets an ordinary gradient.

float8: one scale per tensor, measured on the tensor itself. Weights and activations are e4m3 (more digits), gradients
e5m2 (more range). The backward needs the input only transposed, so that alone is kept, in one byte per value.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero2all.ops.gradient_sink import GradientSink, now_or_later, sink_of
from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.kernels.quantise import quantise, scale_from_peaks, scale_of
from zero2all.ops.kernels.swiglu import new_peaks, swiglu_backward, swiglu_forward
from zero2all.ops.precision import for_autocast, without_autocast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """dy^T x: added to the weight's sink where it has one, else returned; None where the weight is frozen."""
    if not weight.requires_grad:
        return None
    sink = sink_of(weight)
    if sink is None:
        return dy.t() @ x
    now_or_later(partial(_add_product, sink, dy, x))
    return None


def _add_product(sink: GradientSink, dy: Tensor, x: Tensor) -> None:
    target = sink.buffer
    if dy.is_cuda and target.dtype != dy.dtype:
        # The matmul's own epilogue adds: the gradient is never written in bfloat16.
        torch.addmm(target, dy.t(), x, out_dtype=target.dtype, out=target)
        sink.mark_ready()
    else:
        sink.add(dy.t() @ x)


class LinearFp32Wgrad(torch.autograd.Function):
    """Rows x W^T."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        return dy @ ctx.weight, add_weight_gradient(ctx.weight, dy, x)


class SwigluLinearFp32Wgrad(torch.autograd.Function):
    """Rows swiglu(pairs) W^T. The product of SwiGLU is not saved: the backward kernel computes it again."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, pairs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.weight = weight
        return swiglu_forward(pairs) @ weight.t()

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (pairs,) = ctx.saved_tensors
        dy = dy.contiguous()
        dpairs, h = swiglu_backward(dy @ ctx.weight, pairs, again=True)
        assert h is not None
        return dpairs, add_weight_gradient(ctx.weight, dy, h)


def linear_fp32_wgrad(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias for `zero2all.ops.linear`."""
    x, weight, bias = for_autocast(x, weight, bias)
    y: Tensor = LinearFp32Wgrad.apply(rows_of(x), weight).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def feed_forward_fp32_wgrad(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down(swiglu(gate_up(x))) for `zero2all.ops.linear`."""
    x, gate_up, down = for_autocast(x, gate_up, down)
    y: Tensor = SwigluLinearFp32Wgrad.apply(LinearFp32Wgrad.apply(rows_of(x), gate_up), down).view(x.shape)
    return y


class Float8Weight(NamedTuple):
    """A weight in float8, as it is and transposed, and the factor that gives its values back."""

    version: int
    straight: Tensor
    turned: Tensor
    scale: Tensor


Float8Copies = MutableMapping[Tensor, Float8Weight]
"""By weight; see `zero2all.ops.linear.Float8Linear`."""


def float8_weight(weight: Tensor, copies: Float8Copies) -> Float8Weight:
    """`weight` in float8. Computed only when the weight has changed, and then written to the same memory, because the
    CUDA graph of a pass (`zero2all.train.cuda_graph`) reads it there."""
    known = copies.get(weight)
    if known is None or known.version != weight._version:
        with torch.no_grad():
            scale = scale_of(weight, E4M3)
            straight, turned = quantise(weight, E4M3, scale)
            assert straight is not None
            assert turned is not None
            if known is None:
                known = Float8Weight(weight._version, straight, turned, scale)
            else:
                for kept, new in ((known.straight, straight), (known.turned, turned), (known.scale, scale)):
                    kept.copy_(new)
                known = known._replace(version=weight._version)
        copies[weight] = known
    return known


def _matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool, dtype: torch.dtype) -> Tensor:
    """a (M, K) b (N, K)^T, both with K contiguous, as the tensor cores require."""
    return torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast)


def _forward8(
    x: Tensor, weight: Tensor, copies: Float8Copies, peaks: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and for the backward pass the input transposed and its scale. With `peaks`, x need not be measured."""
    scale = scale_of(x, E4M3) if peaks is None else scale_from_peaks(peaks, E4M3)
    straight, turned = quantise(x, E4M3, scale)
    w = float8_weight(weight, copies)
    assert straight is not None
    assert turned is not None
    return _matmul(straight, w.straight, scale, w.scale, True, x.dtype), turned, scale


def _backward8(
    dy: Tensor, turned: Tensor, scale: Tensor, weight: Tensor, copies: Float8Copies, peaks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """dx and, where the weight has no sink, dweight. With `peaks`, dy need not be measured."""
    dy_scale = scale_of(dy, E5M2) if peaks is None else scale_from_peaks(peaks, E5M2)
    dy_straight, dy_turned = quantise(dy, E5M2, dy_scale)
    assert dy_straight is not None
    assert dy_turned is not None
    w = float8_weight(weight, copies)
    dx = _matmul(dy_straight, w.turned, dy_scale, w.scale, FAST_BACKWARD, dy.dtype)

    def dweight() -> Tensor:
        return _matmul(dy_turned, turned, dy_scale, scale, FAST_BACKWARD, dy.dtype)

    sink = sink_of(weight)
    if sink is None:
        return dx, dweight() if weight.requires_grad else None
    now_or_later(lambda: sink.add(dweight()))
    return dx, None


FAST_BACKWARD = True
"""Whether gradients are summed with the tensor cores' fast, less precise accumulator."""


class Linear8(torch.autograd.Function):
    """Rows x W^T in float8."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, copies: Float8Copies) -> Tensor:
        y, turned, scale = _forward8(x, weight, copies)
        ctx.save_for_backward(turned, scale)
        ctx.weight, ctx.copies = weight, copies
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        turned, scale = ctx.saved_tensors
        return *_backward8(dy.contiguous(), turned, scale, ctx.weight, ctx.copies), None


class FeedForward8(torch.autograd.Function):
    """Rows down(swiglu(gate_up(x))) in float8: one function, so that SwiGLU's kernels, which read every value anyway,
    can measure the scales of the matmuls after them."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, copies: Float8Copies) -> Tensor:
        pairs, x_turned, x_scale = _forward8(x, gate_up, copies)
        peaks = new_peaks(x.device)
        h = swiglu_forward(pairs, peaks)
        y, h_turned, h_scale = _forward8(h, down, copies, peaks)
        ctx.save_for_backward(pairs, x_turned, x_scale, h_turned, h_scale)
        ctx.weights, ctx.copies = (gate_up, down), copies
        return y

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pairs, x_turned, x_scale, h_turned, h_scale = ctx.saved_tensors
        (gate_up, down), copies = ctx.weights, ctx.copies
        dh, ddown = _backward8(dy.contiguous(), h_turned, h_scale, down, copies)
        peaks = new_peaks(dy.device)
        dpairs, _ = swiglu_backward(dh, pairs, peaks=peaks)
        dx, dgate_up = _backward8(dpairs, x_turned, x_scale, gate_up, copies, peaks)
        return dx, dgate_up, ddown, None


def linear_8(x: Tensor, weight: Tensor, bias: Tensor | None, copies: Float8Copies) -> Tensor:
    """x W^T + bias for `zero2all.ops.linear`."""
    x, weight, bias = for_autocast(x, weight, bias)
    y: Tensor = Linear8.apply(rows_of(x), weight, copies).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def feed_forward_8(x: Tensor, gate_up: Tensor, down: Tensor, copies: Float8Copies) -> Tensor:
    """down(swiglu(gate_up(x))) for `zero2all.ops.linear`."""
    x, gate_up, down = for_autocast(x, gate_up, down)
    y: Tensor = FeedForward8.apply(rows_of(x), gate_up, down, copies).view(x.shape)
    return y
