"""Hands the trainer its rows of each step's global batch, read ahead in the background.

A batch is named by the token at which it begins, so the loader has no state to save. Rank r of W takes the r-th run of
ceil(rows / W) rows of a global batch. Where that does not divide, the last ranks get rows of weight 0 on top, so that
all ranks run the same shapes. Reading is done by threads: copying out of a memory map releases Python's lock. `process`
readers are for machines where the trainer itself needs the lock all the time; they map the files themselves.

For a GPU, rows are converted straight into page-locked memory, and copied from there on a stream of their own while the
step before still computes: batches are on the device by the time they are asked for. torch's host allocator hands the
page-locked memory out again once the copy is through.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from zero2all.common.progress import say
from zero2all.packed.mixture import TrainingData
from zero2all.packed.readers import ReaderProcesses
from zero2all.packed.samples import Borders, Documents
from zero2all.packed.shard_format import DamagedShardError
from zero2all.packed.stages import OrderSegment

LOOKUP_BLOCK = 4096
"""Positions looked up at once: a lookup of 256 costs nearly as much as one of 4096."""
KEPT_BLOCKS = 8

Array = Any
"""A numpy array, or after a transfer the torch tensor made of it."""
Allocate = Callable[[tuple[int, ...], str], np.ndarray]


@dataclass(frozen=True)
class Batch:
    """This rank's rows of one optimizer step. B rows, T = seq_len."""

    tokens: Array
    """(B, T + 1) int64: inputs are [:, :-1], targets [:, 1:]."""
    channels: Array
    """(B,) index into TrainingData.channels."""
    sources: Array
    """(B,) index into TrainingData.splits."""
    first_position: int
    """Place in its segment's order of the first row."""
    weights: Array | None = None
    """(B, T) float32: how much each target counts in the loss. None: all count 1."""
    counted: float | None = None
    """Sum of the weights. None: as many as there are targets."""
    documents: Documents | None = None
    """Where documents lie in the rows, when asked for."""
    document_ids: Array | None = None
    """(B, T + 1) int32: `documents.ids`, the part that goes to the device with the tokens."""
    first_token: int = 0
    """Token of the run at which the global batch begins."""
    step_samples: int | None = None
    """Samples of the global batch, over all ranks. None: as many as there are rows here."""
    samples: int | None = None
    """How many of these rows are real; the rest weigh 0. None: all."""
    first_row: int = 0
    """Place of the first row in the global batch."""

    @property
    def global_rows(self) -> int:
        """Rows of the global batch."""
        return len(self.tokens) if self.step_samples is None else self.step_samples

    @property
    def global_tokens(self) -> int:
        """Tokens of the global batch that are predicted."""
        return self.global_rows * (self.tokens.shape[1] - 1)

    @property
    def real_rows(self) -> int:
        """Rows of this rank without those that fill up."""
        return len(self.tokens) if self.samples is None else self.samples


@dataclass(frozen=True)
class LoaderOptions:
    """Which part of a batch this rank reads, and how it is fetched; none of it changes the global batch."""

    rank: int = 0
    ranks: int = 1
    documents: bool = False
    """Also say where documents lie in the rows."""
    prefetch_steps: int = 2
    readers: int = 1
    reader_kind: str = "thread"
    on_problem: Callable[[str], None] | None = None
    """Told in a sentence, by a thread of the loader, of what was mended on the way. None: it is printed."""


@dataclass(frozen=True)
class Delivery:
    """How batches get from the readers to a device."""

    allocate: Allocate = np.empty
    finish: Callable[[Batch], Batch] = lambda batch: batch
    """Applied to each batch as soon as it is read, by a thread of its own."""


IN_PLACE = Delivery()


def rank_rows(samples: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Of a global batch: this rank's first row, how many rows are its own, and how many every rank has."""
    per_rank = -(-samples // ranks)
    first = min(rank * per_rank, samples)
    return first, min(per_rank, samples - first), per_rank


def read_batch(
    data: TrainingData,
    first_token: int,
    samples: int,
    options: LoaderOptions | None = None,
    lookup: Callable[[OrderSegment, int, int], tuple[np.ndarray, np.ndarray]] | None = None,
    allocate: Allocate = np.empty,
) -> Batch:
    """This rank's rows of the global batch of `samples` samples that begins at `first_token`."""
    options = options or LoaderOptions()
    segment = data.segment_at(first_token)
    readers = data.samples[segment.number]
    assert readers is not None, "a run never goes back to a segment that lies before the position it was opened at"
    first_row, own, rows = rank_rows(samples, options.rank, options.ranks)
    position = segment.position_at(first_token) + first_row
    if lookup is None:
        sources, indices = segment.order.lookup(np.arange(position, position + own, dtype=np.int64))
    else:
        sources, indices = lookup(segment, position, own)
    tokens = allocate((rows, segment.seq_len + 1), "int64")
    weighted = own < rows or any(readers[source].weighted for source in set(sources.tolist()))
    weights = allocate((rows, segment.seq_len), "float32") if weighted else None
    borders = Borders() if options.documents else None
    for row, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
        readers[source].read(index, tokens[row], None if weights is None else weights[row], borders, row)
    _check_ids(data, tokens[:own], sources, indices)
    if own < rows:
        tokens[own:] = 0
        sources = np.append(sources, np.zeros(rows - own, dtype=np.int64))
        if weights is not None:
            weights[own:] = 0
    documents = borders.documents(rows, segment.seq_len + 1) if borders is not None else None
    return Batch(
        tokens,
        data.channel_of[sources],
        sources,
        position,
        weights=weights,
        counted=None if weights is None else float(weights.sum(dtype=np.float64)),
        documents=documents,
        document_ids=None if documents is None else documents.ids,
        first_token=first_token,
        step_samples=samples,
        samples=own,
        first_row=first_row,
    )


def _check_ids(data: TrainingData, tokens: np.ndarray, sources: np.ndarray, indices: np.ndarray) -> None:
    """Refuse ids that no tokenizer gave: a model would read beyond its embedding, which a GPU reports as a crash."""
    vocab_size = int(data.splits[0].manifest["vocab_size"])
    if tokens.size and int(tokens.max()) >= vocab_size:
        row, column = (int(place) for place in np.argwhere(tokens >= vocab_size)[0])
        split = data.splits[int(sources[row])]
        raise DamagedShardError(
            f"{split.folder}: token {column} of sample {int(indices[row]):,} has the id "
            f"{int(tokens[row, column])}, but the data was packed with {vocab_size:,} ids. A file was damaged "
            "or changed after packing. `z2a data verify` names it, `z2a pack` rewrites it."
        )


class BlockLookup:
    """`Order.lookup` in large blocks that are kept for the steps that follow."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def __call__(self, segment: OrderSegment, position: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sources and samples at `count` positions from `position` on."""
        if count > LOOKUP_BLOCK:
            return segment.order.lookup(np.arange(position, position + count, dtype=np.int64))
        first, last = position // LOOKUP_BLOCK, (position + max(count, 1) - 1) // LOOKUP_BLOCK
        blocks = [self._block(segment, number) for number in range(first, last + 1)]
        offset = position - first * LOOKUP_BLOCK
        sources, indices = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
        return sources[offset : offset + count], indices[offset : offset + count]

    def _block(self, segment: OrderSegment, number: int) -> tuple[np.ndarray, np.ndarray]:
        key = (segment.number, number)
        block = self._blocks.get(key)  # two threads may both look a block up; they find the same
        if block is None:
            start = number * LOOKUP_BLOCK
            block = self._blocks[key] = segment.order.lookup(np.arange(start, start + LOOKUP_BLOCK, dtype=np.int64))
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return block


class StepReader:
    """Reads this rank's rows of the step that begins at a token."""

    def __init__(self, data: TrainingData, tokens_per_step: int, options: LoaderOptions) -> None:
        self._data, self._tokens_per_step, self._options = data, tokens_per_step, options
        self._lookup = BlockLookup()

    def __call__(self, first_token: int, allocate: Allocate = np.empty) -> Batch:
        """The rows, in memory that `allocate` gives."""
        samples = self._tokens_per_step // self._data.segment_at(first_token).seq_len
        return read_batch(self._data, first_token, samples, self._options, self._lookup, allocate)


class Loader:
    """Iterate over the batches of `steps` steps of `tokens_per_step` tokens, from `first_token` on."""

    def __init__(
        self,
        data: TrainingData,
        tokens_per_step: int,
        first_token: int,
        steps: int,
        options: LoaderOptions | None = None,
        delivery: Delivery = IN_PLACE,
    ) -> None:
        self.options = options or LoaderOptions()
        self.wait_seconds = 0.0
        """How long the trainer waited for the batch it was handed last."""
        self.total_wait_seconds = 0.0
        self._delivery = delivery
        self._firsts = iter(range(first_token, first_token + steps * tokens_per_step, tokens_per_step))
        # Without `on_problem`, because a process is sent a pickle of it.
        self._reader = StepReader(data, tokens_per_step, replace(self.options, on_problem=None))
        self._processes: ReaderProcesses | None = None
        if self.options.reader_kind == "process":
            # Pickled, the data is a list of paths: every process maps the files itself.
            self._processes = ReaderProcesses(self._reader, self.options.on_problem or say)
        self._pool = ThreadPoolExecutor(self.options.readers, thread_name_prefix="z2a-loader")
        self._ahead: deque[Future[Batch]] = deque()
        for _ in range(self.options.prefetch_steps):
            self._ask_for_next()

    def __iter__(self) -> Iterator[Batch]:
        while self._ahead:
            started = time.perf_counter()
            batch = self._ahead[0].result()
            self.wait_seconds = time.perf_counter() - started
            self.total_wait_seconds += self.wait_seconds
            self._ahead.popleft()
            self._ask_for_next()
            yield batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._firsts = iter(())
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()
        self._pool.shutdown(wait=True)
        self._ahead.clear()

    def _ask_for_next(self) -> None:
        first_token = next(self._firsts, None)
        if first_token is not None:
            self._ahead.append(self._pool.submit(self._read, first_token))

    def _read(self, first_token: int) -> Batch:
        if self._processes is not None:
            return self._delivery.finish(self._processes(first_token))
        return self._delivery.finish(self._reader(first_token, self._delivery.allocate))


def batches_on(
    device: torch.device,
    data: TrainingData,
    tokens_per_step: int,
    first_token: int,
    steps: int,
    options: LoaderOptions | None = None,
) -> Loader:
    """A loader whose batches hold tensors on `device`; on the CPU they share memory with what was read."""
    if device.type != "cuda":
        delivery = Delivery(finish=partial(_mapped, convert=torch.from_numpy))
    else:
        to_device = _ToDevice(device)
        delivery = Delivery(to_device.allocate, to_device.send)
    return Loader(data, tokens_per_step, first_token, steps, options, delivery)


class _ToDevice:
    """Page-locked memory and the stream that empties it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.consumer = torch.cuda.current_stream(device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Like np.empty. A new thread begins on the first GPU, where this process may have no business."""
        with torch.cuda.device(self.device):
            return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    def send(self, batch: Batch) -> Batch:
        """Start the copies, and make sure that no kernel runs before they are through."""
        with torch.cuda.stream(self.stream):
            sent = _mapped(batch, self._copy)
            done = torch.cuda.Event()
            done.record(self.stream)
        # This blocks the reading thread only: a batch that is handed out is on the device.
        done.synchronize()
        return sent

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        sent = (host if host.is_pinned() else host.pin_memory()).to(self.device, non_blocking=True)
        sent.record_stream(self.consumer)  # its memory is not handed out again while the trainer's kernels read it
        return sent


def _mapped(batch: Batch, convert: Callable[[np.ndarray], torch.Tensor]) -> Batch:
    arrays = {name: getattr(batch, name) for name in ("tokens", "channels", "weights", "document_ids")}
    converted: dict[str, Any] = {name: convert(array) for name, array in arrays.items() if array is not None}
    return replace(batch, **converted)
