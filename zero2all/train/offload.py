"""Optimizer states and masters in host memory, and the pipeline that updates them there (`parallel.offload`).

The device keeps the low-precision weights and the float32 gradients. An update goes over the buckets piece by piece:

    device -> host   the gradients of a piece, times the clipping factor; then those of the bucket are set to zero
    host             AdamW on all cores (`zero2all.train.optimizers.flat_adamw`)
    host -> device   the new low-precision weights

Both copies have a stream of their own and go through a few pinned pieces; everything else on the host is pageable. A
worker thread drives them (torch releases Python's lock while it computes and copies). The main thread queues the next
forward pass meanwhile: before a block computes it waits for the weights of this block (`wait`).

The worker never communicates with other processes.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

PIECE_VALUES = 1 << 24
"""Values that travel at once: long copies, and 100 MB of pinned memory for each piece."""
SLOTS = 3
"""Pieces on their way: one comes, one is updated, one goes."""


@dataclass(frozen=True)
class HostBucket:
    """The own range of a bucket: its place in the buffers of the host, and its views on the device."""

    at: slice
    weights: Tensor
    gradients: Tensor
    all_gradients: Tensor  # those of the whole bucket, which are set to zero


class Update(Protocol):
    """What happens on the host in one step."""

    def begin(self) -> None:
        """The step is not refused."""

    def apply(self, bucket: int, at: slice, gradient: Tensor, weights: Tensor) -> None:
        """Update a piece: `at` in the buffers of the host; `weights` takes the new low-precision ones."""


@dataclass(frozen=True)
class _BucketPiece:
    bucket: int
    inner: slice  # in the own range of the bucket
    at: slice  # in the buffers of the host
    is_last: bool  # of its bucket


class _Slot:
    """Pinned memory for a piece on its way."""

    def __init__(self, values: int, bucket: HostBucket) -> None:
        is_pinned = bucket.weights.is_cuda
        self.gradient = torch.empty(values, dtype=bucket.gradients.dtype, pin_memory=is_pinned)
        self.weights = torch.empty(values, dtype=bucket.weights.dtype, pin_memory=is_pinned)
        self.came: torch.cuda.Event | None = None
        self.left: torch.cuda.Event | None = None


Signal = Future[torch.cuda.Event | None]
"""Set once the worker has queued something: the event that ends it, None on a CPU."""


@dataclass
class _Job:
    """What the worker does for one step."""

    update: Update
    scale: Tensor  # factor on the gradients, where they are
    refused: Tensor  # on the host
    ready: torch.cuda.Event | None  # both are there, and the gradients complete
    arrived: list[Signal] = field(default_factory=list)  # of each bucket: the weights on the device
    cleared: list[torch.cuda.Event | None] = field(default_factory=list)  # of each bucket: its gradients are zero


class HostPipeline:
    """Updates the own ranges of a model on the host. `start`, `wait` and `finish` are for the main thread (and that of
    autograd); everything else runs in the worker."""

    def __init__(self, buckets: Sequence[HostBucket], forward_order: Sequence[int]) -> None:
        self._buckets = buckets
        self._order = tuple(forward_order)
        self._device = device = buckets[0].weights.device
        values = min(PIECE_VALUES, max(bucket.gradients.numel() for bucket in buckets))
        self._slots = [_Slot(values, buckets[0]) for _ in range(SLOTS)]
        is_gpu = device.type == "cuda"
        self._coming, self._going = (torch.cuda.Stream(device) if is_gpu else None for _ in range(2))
        self._refused = torch.zeros((), dtype=torch.bool, pin_memory=is_gpu)
        """Whether the step is refused, on the host."""
        start = _take_own_cores if is_gpu else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload", initializer=start)
        self._job: _Job | None = None
        self._running: Future[None] | None = None

    def start(self, update: Update, scale: Tensor, refused: Tensor) -> None:
        """Begin an update with the gradients as they are when the current stream gets here, times `scale`, or none if
        `refused`. Returns at once, unless the update before is not finished."""
        self.finish()
        ready = None
        self._refused.copy_(refused.to(torch.bool), non_blocking=True)
        if self._device.type == "cuda":
            ready = torch.cuda.Event(blocking=True)  # the worker sleeps until then
            ready.record(torch.cuda.current_stream(self._device))
        self._job = job = _Job(update, scale, self._refused, ready)
        job.arrived = [Signal() for _ in self._buckets]
        job.cleared = [None for _ in self._buckets]
        self._running = self._worker.submit(self._run, job)

    def wait(self, bucket: int) -> None:
        """Wait until the host has queued the new weights of a bucket; the current stream waits until they arrive."""
        if self._job is not None:
            event = self._job.arrived[bucket].result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

    def finish(self) -> None:
        """Wait until the worker has nothing left to do."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def _run(self, job: _Job) -> None:
        try:
            if job.ready is not None:
                torch.cuda.set_device(self._device)
                job.ready.synchronize()
            with torch.no_grad():
                if bool(job.refused):
                    self._refuse(job)
                else:
                    self._update(job)
        except BaseException as error:
            for signal in job.arrived:
                if not signal.done():
                    signal.set_exception(error)
            raise

    def _update(self, job: _Job) -> None:
        job.update.begin()
        pieces = list(self._pieces())
        queued = 0
        for number, piece in enumerate(pieces):
            while queued < min(number + SLOTS, len(pieces)):
                self._fetch(job, pieces[queued], self._slots[queued % SLOTS])
                queued += 1
            slot, length = self._slots[number % SLOTS], piece.at.stop - piece.at.start
            if slot.came is not None:
                slot.came.synchronize()
            job.update.apply(piece.bucket, piece.at, slot.gradient[:length], slot.weights[:length])
            self._send(job, piece, slot)
        self._let_gradients_go()

    def _fetch(self, job: _Job, piece: _BucketPiece, slot: _Slot) -> None:
        """Queue the way of a piece to the host."""
        bucket, length = self._buckets[piece.bucket], piece.at.stop - piece.at.start
        with self._on(self._coming):
            if self._coming is not None and slot.left is not None:
                self._coming.wait_event(slot.left)
            gradient = bucket.gradients[piece.inner].mul_(job.scale)
            slot.gradient[:length].copy_(gradient, non_blocking=True)
            slot.came = _mark(self._coming)
            if piece.is_last:
                bucket.all_gradients.zero_()
                job.cleared[piece.bucket] = _mark(self._coming)

    def _send(self, job: _Job, piece: _BucketPiece, slot: _Slot) -> None:
        """Queue the way of a piece to the device. The bucket has arrived when its gradients are zero, too."""
        length = piece.at.stop - piece.at.start
        with self._on(self._going):
            self._buckets[piece.bucket].weights[piece.inner].copy_(slot.weights[:length], non_blocking=True)
            slot.left = _mark(self._going)
            if not piece.is_last:
                return
            cleared = job.cleared[piece.bucket]
            if self._going is not None and cleared is not None:
                self._going.wait_event(cleared)
            job.arrived[piece.bucket].set_result(_mark(self._going))

    def _refuse(self, job: _Job) -> None:
        """Skip the update: only the gradients change, to zero."""
        with self._on(self._coming):
            for number, bucket in enumerate(self._buckets):
                bucket.all_gradients.zero_()
                job.arrived[number].set_result(_mark(self._coming))
        self._let_gradients_go()

    def _let_gradients_go(self) -> None:
        """When the worker has finished, the gradients are zero."""
        if self._coming is not None:
            self._coming.synchronize()

    def _pieces(self) -> Iterator[_BucketPiece]:
        """The own ranges in pieces, in the order of the forward pass; an empty one has one, so that each bucket is
        signalled."""
        for number in self._order:
            at = self._buckets[number].at
            length = at.stop - at.start
            for first in range(0, max(1, length), PIECE_VALUES):
                last = min(first + PIECE_VALUES, length)
                here = slice(at.start + first, at.start + last)
                yield _BucketPiece(number, slice(first, last), here, is_last=last == length)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _take_own_cores() -> None:
    """The thread that queues kernels keeps one core busy. Of threads that share the work evenly, the one beside it
    would be late, and all others would wait for it."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """The end of what is queued on a stream."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event
