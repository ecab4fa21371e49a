"""SwiGLU: silu(gate) * up, on the output of one gate-and-up projection: gate 0, up 0, gate 1, up 1, and so on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops import trial
from zero2all.ops.footprint import Footprint, Moment, Sizes
from zero2all.ops.implementation import Implementation, OpContext, needs_quack, needs_triton

SwigluOp = Callable[[Tensor], Tensor]
"""(..., 2 F) -> (..., F)."""


def gate_and_up(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2 F) -> gates and ups, (..., F), each contiguous: arithmetic on every other value takes twice as long."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return gate.contiguous(), up.contiguous()


def torch_swiglu(pairs: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F) with torch's silu."""
    gate, up = gate_and_up(pairs)
    return F.silu(gate) * up


def eager_swiglu(pairs: Tensor) -> Tensor:
    """The formula."""
    gate, up = gate_and_up(pairs)
    return gate * torch.sigmoid(gate) * up


def triton_swiglu(pairs: Tensor) -> Tensor:
    """Our kernel: one pass each way."""
    from zero2all.ops.kernels.swiglu import triton_swiglu as kernel

    return kernel(pairs)


def _needs_quack(context: OpContext) -> str | None:
    problem = needs_quack(context)
    if problem is None and context.linear not in ("", "fp32_wgrad"):
        problem = f"it is part of the matmuls of linear: fp32_wgrad, and linear is {context.linear}"
    if problem is None and context.keeps_results:
        problem = "recompute: selective keeps only results of torch's operators, and would compute it twice"
    return problem or problem_in_trial(context.dtype)


@cache
def problem_in_trial(dtype: torch.dtype) -> str | None:
    """What goes wrong when QuACK computes a small feed-forward; None: nothing does."""
    from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues

    def formula(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return torch_swiglu(x @ gate_up.t()) @ down.t()

    return trial.problem_of(feed_forward_in_epilogues, formula, [(256, 128), (512, 128), (128, 256)], dtype)


def _saved_by_torch(sizes: Sizes) -> float:
    """silu(gate)."""
    return float(sizes.value_bytes * sizes.intermediate_size)


def _saved_by_eager(sizes: Sizes) -> float:
    """sigmoid(gate) and gate * sigmoid(gate)."""
    return 2.0 * sizes.value_bytes * sizes.intermediate_size


def _gradient(sizes: Sizes) -> tuple[Moment, ...]:
    """The gradients of gate and up."""
    return (Moment(2.0 * sizes.value_bytes * sizes.intermediate_size),)


def _pairs_beside_copies(sizes: Sizes) -> tuple[Moment, ...]:
    """The input, of which contiguous copies of gates and ups are saved."""
    return (Moment(2.0 * sizes.value_bytes * sizes.intermediate_size),)


KERNEL = Footprint(backward=_gradient)

IMPLEMENTATIONS: tuple[Implementation[SwigluOp], ...] = (
    # Computed inside the matmuls before and after it; where those have biases, as `triton`.
    Implementation("quack", triton_swiglu, _needs_quack, compile_safe=False, footprint=KERNEL),
    Implementation("triton", triton_swiglu, needs_triton, compile_safe=False, footprint=KERNEL),
    Implementation("torch", torch_swiglu, footprint=Footprint(_saved_by_torch, _pairs_beside_copies, _gradient)),
    Implementation("eager", eager_swiglu, footprint=Footprint(_saved_by_eager, _pairs_beside_copies, _gradient)),
)
