"""Cross-entropy on logits that are overwritten by their own gradient.

One program per row runs over the row in blocks twice: once for the largest logit and the sum of exponentials, once
to write weight * (softmax - onehot) where the logits stood. Columns from `vocab_size` on are padding: they take no
part in the sum and get gradient 0, so they can neither be predicted nor learn. A target below 0 is ignored.
The z-loss adds z * logsumexp^2 to each token's loss, which keeps the logits from drifting.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 16384, 32
"""Best of 16 pairs on an H200 (64,320 columns): 65 % of what a copy moves; one load of the whole row: 45 %."""


@triton.jit
def _losses_and_gradient(
    logits, targets, weights, losses, row_stride, vocab_size, columns_in_all, z, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    target = tl.load(targets + row)
    weight = tl.load(weights + row).to(tl.float32)
    counted = target >= 0
    columns = tl.arange(0, BLOCK)

    largest = float("-inf")
    total = 0.0
    for first in range(0, vocab_size, BLOCK):
        x = tl.load(start + first + columns, mask=first + columns < vocab_size, other=float("-inf")).to(tl.float32)
        peak = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - peak) + tl.sum(tl.exp(x - peak), axis=0)
        largest = peak
    logsum = largest + tl.log(total)
    at_target = tl.load(start + tl.where(counted, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counted, logsum - at_target + z * logsum * logsum, 0.0))

    weight = tl.where(counted, weight, 0.0)
    slope = weight * (1.0 + 2.0 * z * logsum)
    for first in range(0, columns_in_all, BLOCK):
        at = first + columns
        x = tl.load(start + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - logsum) * slope - tl.where(at == target, weight, 0.0)
        tl.store(start + at, gradient.to(logits.dtype.element_ty), mask=at < columns_in_all)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0) -> Tensor:
    """Turns `logits` (N, V) into d(sum of weights * losses)/dlogits and returns the losses (N,) in float32."""
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _losses_and_gradient[(logits.shape[0],)](
        logits, targets, weights, losses, logits.stride(0), vocab_size, logits.shape[1], z,
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])), num_warps=WARPS,
    )  # fmt: skip
    return losses
