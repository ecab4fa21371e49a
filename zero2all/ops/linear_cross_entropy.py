"""The head and the loss: hidden states, head, targets and token weights -> (weighted sum of losses, losses).

The sum is what backward is called on; the losses of the tokens are to look at. Columns of the head from `vocab_size`
on are padding. off: all logits at once, through the `cross_entropy` operator. triton: chunk by chunk, see the kernel.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from zero2all.ops.implementation import Implementation, needs_triton


def plain_linear_cross_entropy(cross_entropy):  # noqa
    def function(hidden, head, targets, weights, vocab_size):
        logits = F.linear(hidden, head)[..., :vocab_size]
        losses = cross_entropy(logits.flatten(0, -2), targets.flatten()).view(targets.shape)
        return (losses * weights).sum(), losses.detach()

    return function


def triton_linear_cross_entropy(hidden, head, targets, weights, vocab_size):
    from zero2all.ops.kernels.linear_cross_entropy import triton_linear_cross_entropy as kernel

    return kernel(hidden, head, targets, weights, vocab_size)


IMPLEMENTATIONS = (
    Implementation("triton", triton_linear_cross_entropy, needs_triton),
    Implementation("off", plain_linear_cross_entropy),
)
