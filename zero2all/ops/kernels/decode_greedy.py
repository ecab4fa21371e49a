"""The likeliest token of each row of logits, put where the next pass reads it: decoding goes on without the host.

Each program finds the largest logit of some columns; the last one of a row to arrive, by a counter, compares theirs. Of
equal logits the lowest id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero2all.ops.kernels.launch import overlapped, wait_for_earlier_kernels

BLOCK = 1024
MOST_PARTS = 64


@triton.jit
def _greedy(
    logits, never, best, ids, arrived, tokens, width,
    PARTS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_earlier_kernels(OVERLAP)
    span = tl.cdiv(tl.cdiv(width, PARTS), BLOCK) * BLOCK
    column = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    at = tl.minimum(part * span + column, width - 1)
    for first in range(part * span, tl.minimum((part + 1) * span, width), BLOCK):
        inside = first + column < width
        value = tl.load(logits + row * width + first + column, mask=inside, other=float("-inf"))
        value = tl.where(tl.load(never + first + column, mask=inside, other=1) != 0, float("-inf"), value)
        is_higher = value > most
        at = tl.where(is_higher, first + column, at)
        most = tl.where(is_higher, value, most)
    highest = tl.max(most, axis=0)
    tl.store(best + row * PARTS + part, highest)
    tl.store(ids + row * PARTS + part, tl.min(tl.where(most == highest, at, width - 1), axis=0))
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu") < PARTS - 1:
        return
    tl.store(arrived + row, 0)
    each = tl.arange(0, PARTS)
    most_of_part = tl.load(best + row * PARTS + each)
    is_best = most_of_part == tl.max(most_of_part, axis=0)
    token = tl.min(tl.where(is_best, tl.load(ids + row * PARTS + each), width - 1), axis=0)
    tl.store(tokens + row, token.to(tokens.dtype.element_ty))


class GreedyScratch:
    """Results of the parts of each row; for one launch at a time."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.best = torch.empty(batch, MOST_PARTS, dtype=torch.float32, device=device)
        self.ids = torch.empty(batch, MOST_PARTS, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(batch, dtype=torch.int32, device=device)


def decode_greedy(logits: Tensor, never: Tensor, tokens: Tensor, scratch: GreedyScratch) -> None:
    """logits (B, V) in float32 -> tokens (B,), the likeliest of those that `never` (V,) does not rule out."""
    batch, width = logits.shape
    parts = min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(width, BLOCK)))
    _greedy[(batch, parts)](
        logits, never, scratch.best, scratch.ids, scratch.arrived, tokens, width,
        PARTS=parts, BLOCK=BLOCK, num_warps=4, **overlapped(logits.device),
    )  # fmt: skip
