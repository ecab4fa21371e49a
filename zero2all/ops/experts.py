"""The experts of a block: each expert is a SwiGLU of its own for the tokens that chose it.

Tokens come sorted by expert. On a GPU in bfloat16 the matmuls of all experts are one kernel (torch's `grouped_mm`),
which reads on the device where the tokens of each expert end, so that the host does not wait. Elsewhere the experts
compute one after the other.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.footprint import Footprint, Moment, Sizes
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


INDEX_BYTES = 8
"""Of the number of an expert or a token."""


def mixture_footprint(feed_forward: Footprint, swiglu: Footprint) -> Footprint:
    """What router and experts (`zero2all.model.moe`) save beside their input and need in their backward pass. Where the
    feed-forward is fused, so are the experts; `feed_forward` is that of the shared experts."""

    def inner(sizes: Sizes) -> float:
        return float(sizes.value_bytes * sizes.experts_per_token * sizes.expert_size)

    def shared(sizes: Sizes) -> Sizes:
        return replace(sizes, intermediate_size=sizes.shared_size)

    def saved(sizes: Sizes) -> float:
        chosen = sizes.experts_per_token
        found = float(sizes.wide_bytes * sizes.router_rows)  # the scores
        found += chosen * (4 * INDEX_BYTES + 3 * sizes.wide_bytes)  # who is chosen, in which order; gates
        found += sizes.value_bytes * chosen * sizes.hidden_size  # the tokens, sorted by expert
        found += 2 * inner(sizes)  # gates and ups
        if not feed_forward.is_fused:  # and their product, as it is and times the gate of the expert
            of_all = replace(sizes, intermediate_size=chosen * sizes.expert_size)
            found += 2 * inner(sizes) + swiglu.saved(of_all)
        return found + (feed_forward.saved(shared(sizes)) if sizes.shared_size else 0.0)

    def forward(sizes: Sizes) -> tuple[Moment, ...]:
        returned = float(sizes.value_bytes * sizes.experts_per_token * sizes.hidden_size)
        if feed_forward.is_fused:  # h, and what experts return
            return (Moment(inner(sizes) + returned),)
        return (Moment(2 * returned),)  # of each expert, and of all one after the other

    def backward(sizes: Sizes) -> tuple[Moment, ...]:
        value, chosen, hidden = sizes.value_bytes, sizes.experts_per_token, sizes.hidden_size
        pairs = float(value * chosen * hidden)  # the gradient of what experts return, or get
        matrices = float(value * sizes.experts * sizes.expert_size * hidden)  # all experts' down projections
        first = feed_forward.backward(shared(sizes)) if sizes.shared_size else ()
        done = value * hidden - feed_forward.saved(shared(sizes)) if sizes.shared_size else 0.0
        return (
            *first,
            Moment(done + pairs + 4 * inner(sizes)),
            Moment(done + pairs + 3 * inner(sizes), matrices),
            Moment(done + 2 * pairs + 2 * inner(sizes), 2 * matrices),
        )

    def kept_results(sizes: Sizes) -> float:
        of_experts = 2 * sizes.experts_per_token * sizes.expert_size + 2 * sizes.shared_size
        return float(sizes.value_bytes * of_experts)

    def kept_besides(sizes: Sizes) -> float:  # what the experts return; the router's logits
        returned = sizes.value_bytes * sizes.experts_per_token * sizes.hidden_size
        return float(returned + sizes.wide_bytes * sizes.router_rows)

    fused = feed_forward.is_fused
    return Footprint(saved, forward, backward, is_fused=fused, kept_results=kept_results, kept_besides=kept_besides)
