"""Forward and backward of a micro-batch as one recording (a CUDA graph), where the host would be the limit.

Queueing a pass takes the host some thousand calls, 3 ms a block and more. With small micro-batches the device is done
sooner than that and waits. A recording is queued by one call: the device has the list of kernels and runs down it. The
kernels are the same, so are their results, bit for bit; only where their tensors lie is decided once. Hence what must
stay put: the shape of the batch (another one is recorded anew), the weights (they do), the tables of positions (looked
at), and float8 copies of weights, which are brought up to date before a replay instead of inside it.

What a pass decides on the host cannot be recorded: `zero2all.train.recording_choice` says where that is.
"""

from __future__ import annotations

import contextlib
import gc

import torch
from torch import Tensor

from zero2all.common.errors import UsageError
from zero2all.model.z2all import Z2all
from zero2all.ops.linear import fp8_linear

EAGER_PASSES = 2
"""Before a recording: kernels must be compiled and loaded by then."""
MOST_RECORDINGS = 16
"""Stages change the shape of a pass now and then; passes that change it in every step are better not recorded."""


class RecordedPasses:
    """Runs passes of one model; the first ones of a shape as they come, the others from a recording."""

    def __init__(self, model: Z2all, z_loss: float, device: torch.device, insists: bool = False) -> None:
        self._model, self._z_loss, self._device, self._insists = model, z_loss, device, insists
        # Of another priority than the streams that copy batches, so that it is none of them.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._key: tuple[object, ...] | None = None
        self._seen, self._recordings = 0, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._ids, self._shares, self._losses = (torch.empty(0),) * 3
        self.problem = ""
        """Why passes are not recorded any more, where that is so."""

    @property
    def is_recorded(self) -> bool:
        """Whether there is a recording."""
        return self._graph is not None

    def __call__(self, ids: Tensor, shares: Tensor) -> Tensor:
        """Ids (B, T + 1) and what each position counts (B, T) -> losses (B, T), which the next pass overwrites. The
        gradient is added where the weights keep it."""
        model = self._model
        key = (ids.shape, shares.dtype, model.cos.data_ptr(), model.sin.data_ptr(), model.training)
        if key != self._key:
            self._forget()
            self._key, self._seen = key, 0
        if not self.problem and self._graph is None and self._seen >= EAGER_PASSES:
            self._record(ids, shares)
        if self._graph is None:
            self._seen += 1
            return self._as_it_comes(ids, shares)
        self._ids.copy_(ids)
        self._shares.copy_(shares)
        fp8_linear.renew_copies(model.parameters())
        self._graph.replay()
        return self._losses

    def _as_it_comes(self, ids: Tensor, shares: Tensor) -> Tensor:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            losses = self._forward_backward(ids, shares)
        here.wait_stream(self._stream)
        for given in (ids, shares):
            given.record_stream(self._stream)
        losses.record_stream(here)
        return losses

    def _forward_backward(self, ids: Tensor, shares: Tensor) -> Tensor:
        total, losses = self._model.loss(ids[:, :-1], ids[:, 1:], shares, None, self._z_loss)
        total.backward()
        return losses

    def _record(self, ids: Tensor, shares: Tensor) -> None:
        self._recordings += 1
        if self._recordings > MOST_RECORDINGS:
            self.problem = f"its shape has changed {MOST_RECORDINGS} times"
            return
        fp8_linear.renew_copies(self._model.parameters())
        self._ids, self._shares = ids.clone(), shares.clone()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        self._capture()
        kept = torch.cuda.memory_reserved(self._device) - before
        if self._graph is not None and not self._insists and torch.cuda.mem_get_info(self._device)[0] < kept:
            # Validation and the optimizer had the memory of a pass to themselves in between. They must still have it.
            self.problem = f"it would keep {kept / 2**30:.1f} GiB to itself, and less than that would be left"
            self._forget()

    def _capture(self) -> None:
        graph, pool, here = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        try:
            # Other threads (a checkpoint being written) go on meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                self._losses = self._forward_backward(self._ids, self._shares)
        except Exception as error:  # the packages' compilers have errors of their own
            torch.cuda.set_stream(here)  # torch leaves the recording's stream in force when its end fails
            self.problem = reason_of(error)
            if self._insists:
                raise refusal(self.problem) from error
        else:
            self._graph = graph
            return
        del graph
        gc.collect()  # the error is forgotten by now, and with it all that its frames held
        _give_back(pool, self._device)

    def _forget(self) -> None:
        self._graph, self._losses = None, torch.empty(0)


def refusal(problem: str) -> UsageError:
    """Of a recording that was asked for."""
    return UsageError(f"train.cuda_graph = on: a pass of this run cannot be recorded: {problem}. Use auto or off.")


def reason_of(error: BaseException) -> str:
    """In a line, what went wrong before everything that went wrong because of it."""
    while error.__context__ is not None:
        error = error.__context__
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _give_back(pool: tuple[int, int], device: torch.device) -> None:
    """The memory of a recording that failed. Where its end fails, torch's allocator goes on believing in it."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError):
        if torch.cuda.memory_snapshot(pool):
            torch._C._cuda_releasePool(index, pool)
            torch.cuda.empty_cache()
