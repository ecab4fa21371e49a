"""The language-model head and its loss, chunk by chunk, so that the logits of all tokens never exist at once.

Per chunk: logits by one matmul into a buffer that is used again, loss and gradient in place (`cross_entropy`), then
the gradients of hidden states and head by two more matmuls. That is the arithmetic of the plain head and no more,
because the gradient is made in the forward pass, when the logits are at hand. The price: the weight of each token in
the loss must be known then.

A chunk of 8192 rows keeps the matmuls large enough to fill the GPU and the buffer at about 1 GB for 64k columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero2all.ops.kernels.cross_entropy import cross_entropy_in_place
from zero2all.ops.kernels.launch import rows_of

CHUNK_ROWS = 8192


class LinearCrossEntropy(torch.autograd.Function):
    """(hidden, head, targets, weights, vocab_size, z) -> (sum of weights * losses, the losses)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        losses = torch.empty(count, dtype=torch.float32, device=hidden.device)
        needs_gradient = any(ctx.needs_input_grad[:2])
        logits = torch.empty(min(count, CHUNK_ROWS), head.shape[0], dtype=hidden.dtype, device=hidden.device)
        dhidden = torch.empty_like(hidden) if needs_gradient else None
        dhead = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if needs_gradient else None
        for first in range(0, count, CHUNK_ROWS):
            rows = slice(first, min(first + CHUNK_ROWS, count))
            here = logits[: rows.stop - rows.start]
            torch.mm(hidden[rows], head.t(), out=here)
            losses[rows] = cross_entropy_in_place(here, targets[rows], weights[rows], vocab_size, z)
            if dhidden is not None and dhead is not None:
                torch.mm(here, head, out=dhidden[rows])
                if here.is_cuda and here.dtype != torch.float32:
                    torch.addmm(dhead, here.t(), hidden[rows], out_dtype=torch.float32, out=dhead)
                else:
                    dhead.add_(here.t() @ hidden[rows])
        ctx.save_for_backward(dhidden, dhead)
        ctx.head = head
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dhidden, dhead = ctx.saved_tensors
        main = getattr(ctx.head, "main_grad", None)
        dhidden = dhidden * dloss.to(dhidden.dtype)
        if main is None:
            return dhidden, (dhead * dloss).to(ctx.head.dtype), None, None, None, None
        main.addcmul_(dhead, dloss.to(main.dtype).expand_as(dhead))
        return dhidden, None, None, None, None, None


def triton_linear_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, vocab_size: int, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The registry's entry."""
    total, losses = LinearCrossEntropy.apply(
        rows_of(hidden), head, targets.reshape(-1), weights.reshape(-1), vocab_size, z
    )
    return total, losses.view(targets.shape)
