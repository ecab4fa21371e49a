"""SwiGLU: silu(gate) * up, on the output of one fused gate-and-up projection.

Backward, with q = sigmoid(gate): dup = dh * gate * q, dgate = dh * up * q * (1 + gate * (1 - q)). The backward kernel
can write h itself again as well, so that nobody has to keep it. Both can note the largest magnitude they wrote, which
is what a float8 matmul behind them needs to know first (see `zero2all.ops.kernels.linear`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.autocast import for_autocast, without_autocast
from zero2all.ops.kernels.launch import rows_of

BLOCK = 1024
PEAK_SLOTS = 1024
"""Programs note their largest value in one of so many places, so that they do not queue for one."""


@triton.jit
def _forward(gate_up, h, peaks, width, blocks, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = row * (2 * width) + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h + row * width + columns, value.to(h.dtype.element_ty), mask=inside)
    if SLOTS:
        tl.atomic_max(peaks + program % SLOTS, tl.max(tl.abs(value), axis=0))


@triton.jit
def _backward(
    dh, gate_up, dgate_up, h, peaks, width, blocks, WRITE_H: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
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
    dgate = d * up * (q + silu * (1.0 - q))
    dup = d * silu
    tl.store(dgate_up + at, dgate.to(dgate_up.dtype.element_ty), mask=inside)
    tl.store(dgate_up + at + width, dup.to(dgate_up.dtype.element_ty), mask=inside)
    if SLOTS:
        tl.atomic_max(peaks + program % SLOTS, tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=0))
    if WRITE_H:
        tl.store(h + row * width + columns, (silu * up).to(h.dtype.element_ty), mask=inside)


def swiglu_forward(gate_up: Tensor, peaks: Tensor | None = None) -> Tensor:
    """Rows (N, 2 F) -> (N, F). `peaks`, from `new_peaks`, collects the largest magnitude."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    h = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    blocks = triton.cdiv(width, BLOCK)
    slots = 0 if peaks is None else PEAK_SLOTS
    _forward[(count * blocks,)](
        gate_up, h, gate_up if peaks is None else peaks, width, blocks, SLOTS=slots, BLOCK=BLOCK, num_warps=4
    )
    return h


def swiglu_backward(
    dh: Tensor, gate_up: Tensor, again: bool = False, peaks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of rows `gate_up`, and, with `again`, h itself once more. `peaks` as in the forward."""
    count, width = dh.shape
    dgate_up = torch.empty_like(gate_up)
    h = torch.empty_like(dh) if again else None
    blocks = triton.cdiv(width, BLOCK)
    slots = 0 if peaks is None else PEAK_SLOTS
    _backward[(count * blocks,)](
        dh, gate_up, dgate_up, dh if h is None else h, dh if peaks is None else peaks, width, blocks,
        WRITE_H=again, SLOTS=slots, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dgate_up, h


def new_peaks(device: torch.device) -> Tensor:
    """Where programs note the largest magnitude they saw; the largest of all is its maximum."""
    return torch.zeros(PEAK_SLOTS, dtype=torch.float32, device=device)


class Swiglu(torch.autograd.Function):
    """(..., 2 F) -> (..., F)."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        rows = rows_of(gate_up)
        ctx.save_for_backward(rows)
        return swiglu_forward(rows).view(*gate_up.shape[:-1], -1)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        dgate_up, _ = swiglu_backward(rows_of(dh), rows)
        return dgate_up.view(*dh.shape[:-1], -1)


def triton_swiglu(gate_up: Tensor) -> Tensor:
    """The registry's entry."""
    h: Tensor = Swiglu.apply(*for_autocast(gate_up))
    return h
