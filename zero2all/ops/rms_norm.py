"""Residual add and RMSNorm: s = x + branch; s / sqrt(mean(s^2) + eps) * weight, in at least float32 inside.

Every implementation takes (x, branch or None, weight, eps) and returns the normalised sum, in the weight's dtype, and
the sum, in the residual's: a float32 residual under bfloat16 weights stays float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.implementation import Implementation, needs_triton
from zero2all.ops.precision import widened

RmsNormOp = Callable[[Tensor, "Tensor | None", Tensor, float], tuple[Tensor, Tensor]]
"""(residual, branch, weight, eps) -> (the normalised sum, the sum)."""


def _added(x: Tensor, branch: Tensor | None) -> Tensor:
    return x if branch is None else x + branch.to(x.dtype)


def eager_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The formula, in the order Llama does it: normalise in float32, cast back, then scale."""
    x = _added(x, branch)
    wide = widened(x)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(weight.dtype), x


def torch_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """torch's rms_norm, which fuses the passes on the GPU."""
    x = _added(x, branch)
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps), x


def triton_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Our kernel: sum and norm in one pass each way."""
    from zero2all.ops.kernels.rms_norm import triton_add_rms_norm

    return triton_add_rms_norm(x, branch, weight, eps)


def lean_rms_norm(x: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Our kernel; its backward pass reads not the sum but the norm's output, which the next layer saves anyway."""
    from zero2all.ops.kernels.rms_norm import triton_add_rms_norm

    return triton_add_rms_norm(x, branch, weight, eps, lean=True)


def _saved_by_eager(sizes: Sizes) -> float:
    """The sum, widened; the sum normalised; and the root mean square."""
    return float(sizes.wide_bytes * sizes.hidden_size + sizes.value_bytes * sizes.hidden_size + sizes.wide_bytes)


def _saved_by_kernel(sizes: Sizes) -> float:
    """The sum and a float32 root mean square."""
    return sizes.residual_bytes * sizes.hidden_size + 4.0


def _saved_in_low_precision(sizes: Sizes) -> float:
    """The same, the sum in the dtype of the weights."""
    return sizes.value_bytes * sizes.hidden_size + 4.0


def _sum_in_low_precision(sizes: Sizes) -> tuple[Moment, ...]:
    """The sum, where a narrower copy of it is saved."""
    return (Moment(sizes.residual_bytes * sizes.hidden_size if sizes.residual_bytes != sizes.value_bytes else 0.0),)


def _sum_of_eager(sizes: Sizes) -> tuple[Moment, ...]:
    """The sum, where a wider copy of it is saved."""
    return (Moment(sizes.residual_bytes * sizes.hidden_size if sizes.residual_bytes < sizes.wide_bytes else 0.0),)


def _sum_of_lean(sizes: Sizes) -> tuple[Moment, ...]:
    return (Moment(float(sizes.residual_bytes * sizes.hidden_size)),)


def _saved_sum(sizes: Sizes) -> tuple[Moment, ...]:
    """Nothing: the sum is saved."""
    del sizes
    return (Moment(),)


def _gradient(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradient of the sum, and a copy for a narrower branch."""
    narrow = sizes.value_bytes if sizes.residual_bytes != sizes.value_bytes else 0
    return (Moment((sizes.residual_bytes + narrow) * sizes.hidden_size),)


def _gradient_in_steps(sizes: Sizes) -> tuple[Moment, ...]:
    """Five products of the formula in float32 exist at once."""
    return (Moment(5.0 * sizes.wide_bytes * sizes.hidden_size),)


KERNEL = Footprint(_saved_by_kernel, _saved_sum, _gradient)
IN_STEPS = Footprint(_saved_by_eager, _sum_of_eager, _gradient_in_steps)
LOW_PRECISION = Footprint(_saved_in_low_precision, _sum_in_low_precision, _gradient)
LEAN = Footprint(lambda _: 4.0, _sum_of_lean, _gradient)

IMPLEMENTATIONS: tuple[Implementation[RmsNormOp], ...] = (
    Implementation("triton", triton_rms_norm, needs_triton, compile_safe=False, footprint=KERNEL),
    Implementation("eager", eager_rms_norm, footprint=IN_STEPS),
    Implementation("torch", torch_rms_norm, footprint=LOW_PRECISION),
    Implementation("triton_lean", lean_rms_norm, needs_triton, compile_safe=False, tolerance=2e-2, footprint=LEAN),
)
