"""The state of a run, and its copy in host memory.

The training loop waits only for the copy. Its buffers are allocated once, before the first step, and laid out exactly
like the files: one buffer per file, every tensor in its place. Copies from a GPU use their own stream, all at once, and
the loop waits for them, because the next step changes the weights. They go through one pinned block, whether they end
on the disk or in memory, one save at a time.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero2all.ops.host_memory import large_pages, pin, unpin
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints.planning import FilePlan, SaveLayout, boxes_of
from zero2all.train.checkpoints.tensor_file import view_of


@dataclass(frozen=True)
class Snapshot:
    """What to save: this rank's parts of tensors named 'group/name' ('model/norm.weight',
    'optimizer/exp_avg/norm.weight'), and counters.

    The record is JSON; rank 0 saves its own. Numbers that JSON cannot hold come back as strings that `float()` reads.
    """

    parts: Mapping[str, TensorPart]
    record: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None = None) -> Snapshot:
        """The snapshot of a process that holds whole tensors."""
        return Snapshot({name: TensorPart.whole(tensor) for name, tensor in tensors.items()}, record or {})


@dataclass(frozen=True)
class Staged:
    """The part of a snapshot that this rank writes, in host memory. Valid until the next save of the same store."""

    step: int
    layout: SaveLayout
    files: list[tuple[FilePlan, Tensor]]  # with the data of each file, byte for byte (uint8)
    record: bytes  # the snapshot's record as JSON text
    details: dict[str, Any]
    problem: str | None = None  # why this rank's part could not be copied; then nothing is committed


class PinnedBlock:
    """Host memory that the GPU writes to directly. Pinned once: that takes a second for 10 GB, and blocks the GPU."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self._say = device, say
        self.lock = threading.Lock()
        """Held from the first copy of a save until its data is elsewhere."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def reserve(self, sizes: Sequence[int]) -> None:
        """Grow where that is needed; waits for a save under way."""
        needed = page_starts(sizes)[1]
        with self.lock:
            if needed > self._memory.numel():
                larger = large_pages(needed)
                self.free()
                self._memory = larger
                self._pin()

    def views(self, sizes: Sequence[int]) -> list[Tensor]:
        """Buffers of these sizes, each from a new page, for which memory is reserved."""
        starts, _ = page_starts(sizes)
        return [self._memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def free(self) -> None:
        """Give the memory back."""
        if self._is_pinned:
            unpin(self._memory)
        self._memory, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _pin(self) -> None:
        """Lock the pages in place."""
        error = pin(self._memory, self.device)
        self._is_pinned = error == 0
        if not self._is_pinned:
            self._say(
                f"Host memory for checkpoints could not be pinned (CUDA error {error}): saves will delay "
                f"training longer. Raise the limit on locked memory (ulimit -l) to fix that."
            )


def page_starts(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers begin that lie one behind the other, each from a new page; and where the last page ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return starts, end


class HostBuffers:
    """Memory for one snapshot, kept for the life of a plan."""

    def __init__(
        self, layout: SaveLayout, block: PinnedBlock | None = None, buffers: list[Tensor] | None = None
    ) -> None:
        """`block`: where the tensors of a GPU go through; `buffers`: memory that is there already, one for each
        file."""
        self._files, self._block = layout.files, block
        self._stream = torch.cuda.Stream(block.device) if block is not None else None
        sizes = [file.data_bytes for file in layout.files]
        if block is not None:
            block.reserve(sizes)
        self._own = buffers or [torch.zeros(size if block is None else 0, dtype=torch.uint8) for size in sizes]

    @property
    def buffers(self) -> list[Tensor]:
        """One for each file."""
        return self._own if self._block is None else self._block.views([file.data_bytes for file in self._files])

    def copy(self, parts: Mapping[str, TensorPart]) -> float:
        """Copy the boxes that this rank writes; when it returns `parts` may be changed. Returns the seconds it took."""
        started = time.monotonic()
        copied = self.begin_copy(parts)
        if copied is not None:
            copied.synchronize()
        return time.monotonic() - started

    def begin_copy(self, parts: Mapping[str, TensorPart]) -> torch.cuda.Event | None:
        """The same without waiting for a GPU: until the event that it returns, nothing but the weights may change. Its
        stream waits for their copy, because split masters are only joined for as long as the caller holds them."""
        boxes = {name: boxes_of(part) for name, part in parts.items()}
        pairs = [
            (source.name, view_of(buffer, file.infos[key]), boxes[source.name][source.number][1])
            for file, buffer in zip(self._files, self.buffers, strict=True)
            for key, source in file.sources.items()
        ]
        if self._stream is None:
            for _, target, source in pairs:
                target.copy_(source)
            return None
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for group in (True, False):
                    for name, target, source in pairs:
                        if name.startswith("model/") is group:
                            target.copy_(source, non_blocking=True)
                            if source.is_cuda:
                                source.record_stream(self._stream)
                    copied = torch.cuda.Event()
                    copied.record(self._stream)
                    if group:
                        current.wait_event(copied)
        except BaseException:
            self._stream.synchronize()  # what was queued still writes to the block
            raise
        return copied

    def staged(self) -> list[tuple[FilePlan, Tensor]]:
        """The files with their content."""
        return list(zip(self._files, self.buffers, strict=True))

    def release(self) -> None:
        """Free the memory, apart from the block."""
        self._own = []
