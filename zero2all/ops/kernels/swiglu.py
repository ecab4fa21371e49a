"""SwiGLU: silu(gate) * up, on the output of one gate-and-up projection: gate 0, up 0, gate 1, up 1, and so on.

Gate and up of a unit lie side by side, so rows do not matter: a program takes the next BLOCK units. It reads their
pairs as contiguous memory, 16 bytes per thread at a time, and splits them in registers; everything else a thread reads
and writes belongs to the same units, so that nothing has to move between threads.

Backward, with q = sigmoid(gate): dup = dh * gate * q, dgate = dh * up * q * (1 + gate * (1 - q)). The backward kernel
can also write h again, so that it need not be saved. Both can record the largest magnitude they wrote, which gives the
scale of a float8 matmul after them (see `zero2all.ops.kernels.linear`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import rows_of
from zero2all.ops.precision import for_autocast, without_autocast

BLOCK = 1024
PEAK_SLOTS = 1024
"""Places where programs record their largest value: many, so that they do not wait for each other."""


@triton.jit
def load_pairs(pairs, first, left, BLOCK: tl.constexpr):
    """Gates and ups of the BLOCK units from `first` on, of which `left` exist, in float32."""
    value = tl.arange(0, 2 * BLOCK)
    both = tl.load(pairs + 2 * first + value, mask=value < 2 * left, other=0.0)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _own_units(pairs, BLOCK: tl.constexpr):
    """0 to BLOCK; each thread takes as many consecutive units as 16 bytes of pairs hold."""
    return tl.max_contiguous(tl.arange(0, BLOCK), 64 // pairs.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _swiglu_forward(pairs, h, peaks, units, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    left = units - first
    gate, up = load_pairs(pairs, first, left, BLOCK)
    product = gate * tl.sigmoid(gate) * up
    unit = _own_units(pairs, BLOCK)
    tl.store(h + first + unit, product.to(h.dtype.element_ty), mask=unit < left)
    if SLOTS:
        tl.atomic_max(peaks + program % SLOTS, tl.max(tl.abs(product), axis=0))


@triton.jit
def _swiglu_backward(
    dh, pairs, dpairs, h, peaks, units, WRITE_H: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    left = units - first
    gate, up = load_pairs(pairs, first, left, BLOCK)
    unit = _own_units(pairs, BLOCK)
    d = tl.load(dh + first + unit, mask=unit < left, other=0.0).to(tl.float32)
    q = tl.sigmoid(gate)
    silu = gate * q
    dgate = d * up * (q + silu * (1.0 - q))
    dup = d * silu
    both = tl.interleave(dgate.to(dpairs.dtype.element_ty), dup.to(dpairs.dtype.element_ty))
    value = tl.arange(0, 2 * BLOCK)
    tl.store(dpairs + 2 * first + value, both, mask=value < 2 * left)
    if SLOTS:
        tl.atomic_max(peaks + program % SLOTS, tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), axis=0))
    if WRITE_H:
        tl.store(h + first + unit, (silu * up).to(h.dtype.element_ty), mask=unit < left)


def swiglu_forward(pairs: Tensor, peaks: Tensor | None = None) -> Tensor:
    """Rows (N, 2 F) -> (N, F). `peaks`, from `new_peaks`, collects the largest magnitude."""
    count, width = pairs.shape[0], pairs.shape[1] // 2
    h = torch.empty(count, width, dtype=pairs.dtype, device=pairs.device)
    slots = 0 if peaks is None else PEAK_SLOTS
    _swiglu_forward[(triton.cdiv(h.numel(), BLOCK),)](
        pairs, h, pairs if peaks is None else peaks, h.numel(), SLOTS=slots, BLOCK=BLOCK, num_warps=4
    )
    return h


def swiglu_backward(
    dh: Tensor, pairs: Tensor, again: bool = False, peaks: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of rows `pairs`, and, with `again`, h again. `peaks` as in the forward."""
    dpairs = torch.empty_like(pairs)
    h = torch.empty_like(dh) if again else None
    slots = 0 if peaks is None else PEAK_SLOTS
    _swiglu_backward[(triton.cdiv(dh.numel(), BLOCK),)](
        dh, pairs, dpairs, dh if h is None else h, dh if peaks is None else peaks, dh.numel(),
        WRITE_H=again, SLOTS=slots, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return dpairs, h


def new_peaks(device: torch.device) -> Tensor:
    """Where programs record the largest magnitude they saw; the maximum over it is the largest of all."""
    return torch.zeros(PEAK_SLOTS, dtype=torch.float32, device=device)


class Swiglu(torch.autograd.Function):
    """(..., 2 F) -> (..., F)."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, pairs: Tensor) -> Tensor:
        rows = rows_of(pairs)
        ctx.save_for_backward(rows)
        return swiglu_forward(rows).view(*pairs.shape[:-1], pairs.shape[-1] // 2)  # -1 would not do without rows

    @staticmethod
    @without_autocast
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        dpairs, _ = swiglu_backward(rows_of(dh), rows)
        return dpairs.view(*dh.shape[:-1], 2 * dh.shape[-1])


def triton_swiglu(pairs: Tensor) -> Tensor:
    """See `zero2all.ops.swiglu`."""
    h: Tensor = Swiglu.apply(*for_autocast(pairs))
    return h
