"""SwiGLU: silu(gate) * up, on the output of one fused gate-and-up projection: gate 0, up 0, gate 1, up 1, and so on."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops import trial
from zero2all.ops.implementation import Implementation, Situation, needs_liger, needs_quack, needs_triton


def gate_and_up(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 2 F) -> gates and ups, (..., F) each, apart: arithmetic on every other value takes twice as long."""
    gate, up = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    return gate.contiguous(), up.contiguous()


def torch_swiglu(pairs: Tensor) -> Tensor:
    """(..., 2 F) -> (..., F) with torch's silu."""
    gate, up = gate_and_up(pairs)
    return F.silu(gate) * up


def eager_swiglu(pairs: Tensor) -> Tensor:
    """The formula spelt out."""
    gate, up = gate_and_up(pairs)
    return gate * torch.sigmoid(gate) * up


def liger_swiglu(pairs: Tensor) -> Tensor:
    """liger-kernel's."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    h: Tensor = LigerSiLUMulFunction.apply(*gate_and_up(pairs))
    return h


def triton_swiglu(pairs: Tensor) -> Tensor:
    """Our kernel: one pass each way."""
    from zero2all.ops.kernels.swiglu import triton_swiglu as kernel

    return kernel(pairs)


def _needs_quack(situation: Situation) -> str | None:
    problem = needs_quack(situation)
    if problem is None and situation.linear not in ("", "fp32_wgrad"):
        problem = f"it is part of the matmuls of linear: fp32_wgrad, and linear is {situation.linear}"
    if problem is None and situation.keeps_results:
        problem = "recompute: selective keeps results of torch's operators only, and would compute it twice"
    return problem or problem_in_trial(situation.dtype)


@cache
def problem_in_trial(dtype: torch.dtype) -> str | None:
    """What goes wrong when QuACK computes a little feed-forward; None: nothing does."""
    from zero2all.ops.kernels.epilogue import feed_forward_in_epilogues

    def formula(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return torch_swiglu(x @ gate_up.t()) @ down.t()

    return trial.problem_of(feed_forward_in_epilogues, formula, [(256, 128), (512, 128), (128, 256)], dtype)


IMPLEMENTATIONS = (
    # Inside the matmuls around it; where those have biases, as `triton`.
    Implementation("quack", triton_swiglu, _needs_quack, compile_safe=False),
    Implementation("triton", triton_swiglu, needs_triton, compile_safe=False),
    Implementation("torch", torch_swiglu),
    Implementation("eager", eager_swiglu),
    Implementation("liger", liger_swiglu, needs_liger, compile_safe=False),
)
