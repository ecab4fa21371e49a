"""Where the gradient of a weight goes: one buffer over all passes of a step, and a signal when a pass has added to it.

Kernels that add to the buffer themselves (in float32, inside the matmul) return nothing to autograd, so autograd cannot
tell when a gradient is complete. Each weight therefore has a sink: a kernel adds to its buffer and calls `mark_ready`;
what autograd computes is handed to it by a hook (`take_from_autograd`). The owner of the buffers
(`zero2all.train.weights`) learns from the signal when it may send a gradient to other processes.

The products that give the gradients of matrices can be left for later (`deferring`): a pipeline computes them when it
would otherwise wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class GradientSink:
    """Takes the gradient of one weight."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    @property
    def buffer(self) -> Tensor:
        """Where to add, in the shape of the weight."""
        return self._buffer

    def mark_ready(self) -> None:
        """Something was added to the buffer; on a GPU the addition is queued. Where nobody waits for it, nothing is
        done."""

    def add(self, gradient: Tensor) -> None:
        """Add a gradient."""
        self.buffer.add_(gradient)
        self.mark_ready()


_deferred: list[Callable[[], None]] | None = None
"""Work that is left for later; None: it is done at once. A backward pass on a GPU runs in a thread of its own, so this
is one variable for all threads: a process runs one backward pass at a time."""


@contextmanager
def deferring(queue: list[Callable[[], None]]) -> Iterator[None]:
    """While the block runs, put the products that give the gradients of matrices into `queue`."""
    global _deferred
    before, _deferred = _deferred, queue
    try:
        yield
    finally:
        _deferred = before


def now_or_later(add_product: Callable[[], None]) -> None:
    """Add the gradient of a matrix to where it belongs, or put it into the queue of `deferring`."""
    if _deferred is None:
        add_product()
    else:
        _deferred.append(add_product)


def sink_of(weight: Tensor) -> GradientSink | None:
    """The sink of a weight; None: its gradient belongs to autograd."""
    return getattr(weight, "gradient_sink", None)


def take_from_autograd(weight: Tensor) -> torch.utils.hooks.RemovableHandle:
    """Let the weight's sink take what autograd leaves in `.grad`, at once, and free it."""

    def take(changed: Tensor) -> None:
        sink, gradient = sink_of(changed), changed.grad
        if sink is not None and gradient is not None:
            sink.add(gradient)
            changed.grad = None

    return weight.register_post_accumulate_grad_hook(take)
