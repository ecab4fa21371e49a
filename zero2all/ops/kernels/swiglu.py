"""SwiGLU: silu(gate) * up, on the output of one fused gate-and-up projection.

Backward, with q = sigmoid(gate): dup = dh * gate * q, dgate = dh * up * q * (1 + gate * (1 - q)). The backward kernel
can write h itself again as well, so that nobody has to keep it (see `zero2all.ops.linear`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import rows_of

BLOCK = 1024


@triton.jit
def _forward(gate_up, h, width, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * (2 * width) + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row * width + columns, (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dh, gate_up, dgate_up, h, width, blocks, WRITE_H: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * (2 * width) + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    q = tl.sigmoid(gate)
    silu = gate * q
    tl.store(dgate_up + at, (d * up * (q + silu * (1.0 - q))).to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dgate_up + at + width, (d * silu).to(dgate_up.dtype.element_ty), mask=inside)
    if WRITE_H:
        tl.store(h + row * width + columns, (silu * up).to(h.dtype.element_ty), mask=inside)


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Rows (N, 2 F) -> (N, F)."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    h = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, BLOCK)
    _forward[(count * blocks,)](gate_up, h, width, blocks, BLOCK=BLOCK, num_warps=4)
    return h


def swiglu_backward(dh: Tensor, gate_up: Tensor, again: bool = False) -> tuple[Tensor, Tensor | None]:
    """The gradient of rows `gate_up`, and, with `again`, h itself once more."""
    count, width = dh.shape
    dgate_up = torch.empty_like(gate_up)
    h = torch.empty_like(dh) if again else None
    blocks = triton.cdiv(width, BLOCK)
    _backward[(count * blocks,)](
        dh, gate_up, dgate_up, dh if h is None else h, width, blocks, WRITE_H=again, BLOCK=BLOCK, num_warps=4
    )
    return dgate_up, h


class Swiglu(torch.autograd.Function):
    """(..., 2 F) -> (..., F)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = rows_of(gate_up)
        ctx.save_for_backward(rows)
        return swiglu_forward(rows).view(*gate_up.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> Tensor:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        dgate_up, _ = swiglu_backward(rows_of(dh), rows)
        return dgate_up.view(*dh.shape[:-1], -1)


def triton_swiglu(gate_up: Tensor) -> Tensor:
    """The registry's entry."""
    h: Tensor = Swiglu.apply(gate_up)
    return h
