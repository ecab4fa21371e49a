"""Optimizer states and masters in host memory, and the pipeline that updates them there (`parallel.offload`).

The device keeps the low-precision weights and the float32 gradients. An update goes over the buckets piece by piece:

    device -> host   the gradients of a piece, times the clipping factor; then those of the bucket are set to zero
    host             AdamW on all cores (`zero2all.train.optimizers.flat_adamw`)
    host -> device   the new low-precision weights

Both copies have a stream of their own and go through a few pinned pieces; everything else on the host is pageable. A
worker thread drives them (torch releases Python's lock while it computes and copies). The main thread queues the next
forward pass meanwhile: before a block computes it waits for the weights of this block (`wait`).

One step late: the update of a step overlaps the whole next step, which computes with the weights before it. New weights
then stay on the host, in `late`, until that step has ended. The update begins with the last block; before a backward
pass adds to the gradients of a bucket, they must have been copied and set to zero (`wait_cleared`).

The worker never communicates with other processes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zero2all.common.errors import BadInputError, DiskError, exceeded_limit, is_disk_full
from zero2all.common.files import human_bytes
from zero2all.ops.gradient_sink import GradientSink
from zero2all.parallel.config import ParallelConfig

PIECE_VALUES = 1 << 24
"""Values that travel at once: long copies, and 100 MB of pinned memory for each piece."""
SLOTS = 3
"""Pieces on their way: one comes, one is updated, one goes."""

HostZeros = Callable[[str, int, torch.dtype], Tensor]
"""(name, number of values, dtype) -> a tensor of zeros on the host."""


# ---- where the states lie ----


def host_zeros(parallel: ParallelConfig, rank: int) -> HostZeros:
    """Host memory, or files that are mapped to memory."""
    if parallel.offload != "optimizer_disk":
        return lambda _name, count, dtype: torch.zeros(count, dtype=dtype)
    assert parallel.offload_folder is not None, "setup names the folder of the run"
    folder = Path(parallel.offload_folder)
    return lambda name, count, dtype: _zeros_in_file(folder / f"offload-{name}.rank{rank}", count, dtype)


def _zeros_in_file(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a new file. The file has no name any more when this returns: its space is free again as soon
    as the process ends, however it ends."""
    size, free = max(1, count * dtype.itemsize), 0
    try:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        if size > free:
            raise OSError(errno.ENOSPC, "it does not fit")
        with path.open("xb") as file:
            file.truncate(size)
            if hasattr(os, "posix_fallocate"):  # a full disk is found here, not in the middle of the run
                os.posix_fallocate(file.fileno(), 0, size)
        storage = torch.UntypedStorage.from_file(str(path), True, size)
    except (OSError, RuntimeError) as error:  # torch has no type for a file that cannot be mapped
        limit = exceeded_limit(error)
        if isinstance(error, OSError) and not is_disk_full(error) and not limit:
            raise BadInputError(
                f"parallel.offload_folder: {path.parent} cannot be used ({error.strerror or error}). Choose an "
                f"existing folder on a fast disk in which you may write."
            ) from error
        raise DiskError(
            f"parallel.offload = optimizer_disk needs {human_bytes(size)} for {path.stem} in {path.parent}, where "
            f"{human_bytes(free)} are free ({limit or error}). Free some space, or set parallel.offload_folder to "
            f"another disk."
        ) from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return torch.empty(0, dtype=dtype).set_(storage)[:count]  # type: ignore[arg-type]


# ---- the pipeline ----


@dataclass(frozen=True)
class HostBucket:
    """The own range of a bucket: its place in the buffers of the host, and its views on the device."""

    at: slice
    weights: Tensor
    gradients: Tensor
    cleared: Tensor  # all gradients of the bucket, to be set to zero


class Update(Protocol):
    """What happens on the host in one step."""

    def begin(self) -> None:
        """The step is not refused."""

    def apply(self, bucket: int, at: slice, gradient: Tensor, weights: Tensor) -> None:
        """Update a piece: `at` in the buffers of the host; `weights` takes the new low-precision ones."""


@dataclass(frozen=True)
class _Piece:
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

    update: Update | None  # None: only send what is late
    scale: Tensor  # factor on the gradients, where they are
    refused: Tensor  # on the host
    ready: torch.cuda.Event | None  # both are there, and the gradients complete
    arrived: list[Signal] = field(default_factory=list)  # of each bucket: the weights on the device
    cleared: list[Signal] = field(default_factory=list)  # the gradients


class HostPipeline:
    """Updates the own ranges of a model on the host. `start`, `wait`, `wait_cleared` and `finish` are for the main
    thread (and that of autograd); everything else runs in the worker."""

    def __init__(
        self,
        buckets: Sequence[HostBucket],
        forward_order: Sequence[int],
        late: Tensor | None,
        device: torch.device,
    ) -> None:
        """`late`: host memory for the new low-precision weights, for updates one step late. `device`: where the model
        computes; the buckets are there too, or on the host (`zero2all.train.streamed`), where nothing has to travel."""
        self._buckets, self.late = buckets, late
        self._order = tuple(forward_order)
        self._device = device
        values = min(PIECE_VALUES, max(bucket.gradients.numel() for bucket in buckets))
        self._slots = [_Slot(values, buckets[0]) for _ in range(SLOTS)]
        travels = buckets[0].weights.is_cuda
        self._coming, self._going = (torch.cuda.Stream(device) if travels else None for _ in range(2))
        self._figures = torch.zeros(2, dtype=torch.float64, pin_memory=device.type == "cuda")
        """Factor on the gradients, and whether the step is refused."""
        start = _take_own_cores if device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload", initializer=start)
        self._job: _Job | None = None
        self._running: Future[None] | None = None
        self._has_late = False

    # ---- the main thread ----

    def start(self, update: Update | None, scale: Tensor, refused: Tensor) -> None:
        """Begin an update with the gradients as they are when the current stream gets here, times `scale`, or none if
        `refused`. Returns at once, unless the update before is not finished."""
        self.finish()
        ready = None
        self._figures.copy_(torch.stack((scale.double(), refused.double())), non_blocking=True)
        if self._device.type == "cuda":
            ready = torch.cuda.Event(blocking=True)  # the worker sleeps until then
            ready.record(torch.cuda.current_stream(self._device))
        is_here = scale.device == self._buckets[0].gradients.device
        job = _Job(update, scale if is_here else self._figures[0], self._figures[1], ready)
        job.arrived, job.cleared = ([Signal() for _ in self._buckets] for _ in range(2))
        self._job = job
        self._running = self._worker.submit(self._run, job)

    def send_late(self) -> bool:
        """Send the weights of the last update, where they are still on the host; whether there were any."""
        self.finish()
        if not self._has_late:
            return False
        self.start(None, *torch.ones(2, device=self._device).unbind())
        return True

    def wait(self, bucket: int) -> None:
        """Wait until the host has queued the new weights of a bucket; the current stream waits until they arrive."""
        if self._job is not None:
            self._wait_for(self._job.arrived[bucket])

    def wait_cleared(self, bucket: int) -> None:
        """The same until the gradients of the last step have left a bucket and are zero."""
        if self._job is not None and self._job.update is not None:
            self._wait_for(self._job.cleared[bucket])

    def finish(self) -> None:
        """Wait until the worker has nothing left to do."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def _wait_for(self, signal: Signal) -> None:
        event = signal.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    # ---- the worker ----

    def _run(self, job: _Job) -> None:
        try:
            if job.ready is not None:
                torch.cuda.set_device(self._device)
                job.ready.synchronize()
            with torch.no_grad():
                if self.late is not None:
                    self._send_late(job)
                if job.update is None:
                    return
                if bool(job.refused):
                    self._refuse(job)
                else:
                    self._update(job, job.update)
        except BaseException as error:
            for signal in (*job.arrived, *job.cleared):
                if not signal.done():
                    signal.set_exception(error)
            raise

    def _update(self, job: _Job, update: Update) -> None:
        update.begin()
        pieces = list(self._pieces(self._order if self.late is None else reversed(self._order)))
        queued = 0
        for number, piece in enumerate(pieces):
            while queued < min(number + SLOTS, len(pieces)):
                self._fetch(job, pieces[queued], self._slots[queued % SLOTS])
                queued += 1
            slot, length = self._slots[number % SLOTS], piece.at.stop - piece.at.start
            if slot.came is not None:
                slot.came.synchronize()
            weights = slot.weights[:length] if self.late is None else self.late[piece.at]
            update.apply(piece.bucket, piece.at, slot.gradient[:length], weights)
            if self.late is None:
                self._send(job, piece, slot, after=job.cleared[piece.bucket])
        self._has_late = self.late is not None
        self._let_gradients_go()

    def _fetch(self, job: _Job, piece: _Piece, slot: _Slot) -> None:
        """Queue the way of a piece to the host."""
        bucket, length = self._buckets[piece.bucket], piece.at.stop - piece.at.start
        with self._on(self._coming):
            if self._coming is not None and slot.left is not None:
                self._coming.wait_event(slot.left)
            gradient = bucket.gradients[piece.inner].mul_(job.scale)
            slot.gradient[:length].copy_(gradient, non_blocking=True)
            slot.came = _mark(self._coming)
            if piece.is_last:
                bucket.cleared.zero_()
                job.cleared[piece.bucket].set_result(_mark(self._coming))

    def _send(self, job: _Job, piece: _Piece, slot: _Slot, after: Signal | None = None) -> None:
        """Queue the way of a piece to the device; the bucket has arrived when this has happened `after` that."""
        length = piece.at.stop - piece.at.start
        with self._on(self._going):
            self._buckets[piece.bucket].weights[piece.inner].copy_(slot.weights[:length], non_blocking=True)
            slot.left = _mark(self._going)
            if not piece.is_last:
                return
            event = None if after is None else after.result()
            if self._going is not None and event is not None:
                self._going.wait_event(event)
            job.arrived[piece.bucket].set_result(_mark(self._going))

    def _send_late(self, job: _Job) -> None:
        """Send the weights that the update before has left on the host."""
        assert self.late is not None, "updates are one step late"
        if not self._has_late:
            for signal in job.arrived:
                signal.set_result(None)
            return
        for number, piece in enumerate(self._pieces(self._order)):
            slot = self._slots[number % SLOTS]
            if slot.left is not None:
                slot.left.synchronize()
            slot.weights[: piece.at.stop - piece.at.start].copy_(self.late[piece.at])
            self._send(job, piece, slot)
        self._has_late = False

    def _refuse(self, job: _Job) -> None:
        """Nothing changes but the gradients, which are set to zero."""
        with self._on(self._coming):
            for number, bucket in enumerate(self._buckets):
                bucket.cleared.zero_()
                event = _mark(self._coming)
                job.cleared[number].set_result(event)
                if self.late is None:
                    job.arrived[number].set_result(event)
        self._let_gradients_go()

    def _let_gradients_go(self) -> None:
        """When the worker has finished, the gradients are zero."""
        if self._coming is not None:
            self._coming.synchronize()

    def _pieces(self, order: Sequence[int] | Iterator[int]) -> Iterator[_Piece]:
        """The own ranges in pieces; an empty one has one, so that each bucket is signalled."""
        for number in order:
            at = self._buckets[number].at
            length = at.stop - at.start
            for first in range(0, max(1, length), PIECE_VALUES):
                last = min(first + PIECE_VALUES, length)
                here = slice(at.start + first, at.start + last)
                yield _Piece(number, slice(first, last), here, is_last=last == length)

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _take_own_cores() -> None:
    """The thread that queues kernels keeps one core busy. Of threads that share the work evenly, the one beside it
    would be late, and all others would wait for it."""
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))


class LateSink(GradientSink):
    """A sink whose buffer may be used once the gradients of the step before have left it."""

    def __init__(self, buffer: Tensor, wait: Callable[[], None]) -> None:
        super().__init__(buffer)
        self._wait = wait

    @property
    def buffer(self) -> Tensor:
        """Where to add, in the shape of the weight."""
        self._wait()
        return self._buffer


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """The end of what is queued on a stream."""
    if stream is None:
        return None
    event = torch.cuda.Event()
    event.record(stream)
    return event
