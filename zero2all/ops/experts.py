"""The experts of a block: each expert is a SwiGLU of its own for the tokens that chose it.

Tokens come sorted by expert. On a GPU in bfloat16 the matmuls of all experts are one kernel (torch's `grouped_mm`),
which reads on the device where the tokens of each expert end, so that the host does not wait. Elsewhere the experts
compute one after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import has_triton
from zero2all.ops.swiglu import SwigluOp


def run_experts(x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor, swiglu: SwigluOp) -> Tensor:
    """Tokens (M, C), sorted by expert, and the gate of each (M,) -> gate * expert(token), (M, C). `gate_up` (E, 2 F, C)
    has its rows in pairs, as SwiGLU takes them; `down` is (E, C, F); `ends` (E,) says where the tokens of each end."""
    is_aligned = down.shape[2] % 8 == 0 and down.shape[1] % 8 == 0  # rows of 16 bytes
    if x.is_cuda and x.dtype == torch.bfloat16 and is_aligned and has_triton() and len(x):
        from zero2all.ops.kernels.experts import GroupedExperts

        y: Tensor = GroupedExperts.apply(x, gates, gate_up, down, ends.to(torch.int32))
        return y
    return looped_experts(x, gates, gate_up, down, ends, swiglu)


def looped_experts(x: Tensor, gates: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor, swiglu: SwigluOp) -> Tensor:
    """One expert after the other; the host reads how many tokens each has. The gate is applied between the matmuls,
    where rows are shortest."""
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    found = []
    # unbind: its backward writes the gradient of all experts once.
    for own, gate, up_weight, down_weight in zip(
        x.split(counts), gates.split(counts), gate_up.unbind(), down.unbind(), strict=True
    ):
        h = swiglu(F.linear(own, up_weight))
        found.append(F.linear(h * gate.to(h.dtype).unsqueeze(1), down_weight))
    return torch.cat(found)


def sum_rows(rows: Tensor, places: Tensor, per_token: int) -> Tensor:
    """For each token the sum of its `per_token` rows (M, C), which lie at `places` (M,)."""
    if rows.is_cuda and rows.dtype != torch.float64 and has_triton():
        from zero2all.ops.kernels.experts import sum_rows as kernel

        return kernel(rows, places, per_token)
    return rows.index_select(0, places).unflatten(0, (-1, per_token)).sum(dim=1)
