"""The state of a run, and its copy in host memory.

The training loop waits only for the copy. Its buffers are allocated once, pinned where there is a GPU, and laid out
exactly like the files: one buffer per file, every tensor in its place. Copies from a GPU use their own stream, all at
once, and the loop waits for them, because the next step changes the weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero2all.parallel.parts import Part
from zero2all.train.checkpoints.planning import FilePlan, SaveLayout, boxes_of
from zero2all.train.checkpoints.tensor_file import view_of

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one."""


@dataclass(frozen=True)
class Snapshot:
    """What to save: this rank's parts of tensors named 'group/name' ('model/norm.weight',
    'optimizer/exp_avg/norm.weight'), and counters.

    The record is JSON; rank 0 saves its own. Numbers that JSON cannot hold come back as strings that `float()` reads.
    """

    parts: Mapping[str, Part]
    record: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], record: Mapping[str, Any] | None = None) -> Snapshot:
        """The snapshot of a process that holds whole tensors."""
        return Snapshot({name: Part.whole(tensor) for name, tensor in tensors.items()}, record or {})


@dataclass(frozen=True)
class Staged:
    """The part of a snapshot that this rank writes, in host memory. Valid until the next save of the same store."""

    step: int
    layout: SaveLayout
    files: list[tuple[FilePlan, Tensor]]  # with the data of each file, byte for byte (uint8)
    record: bytes  # the snapshot's record as JSON text
    details: dict[str, Any]


class HostBuffers:
    """Memory for one snapshot, kept for the life of a plan."""

    def __init__(
        self,
        layout: SaveLayout,
        device: torch.device | None,
        say: Callable[[str], None],
        make: Callable[[], list[Tensor]] | None = None,
        in_background: bool = False,
    ) -> None:
        """`device` is where most tensors are; memory is pinned when that is a GPU, which takes seconds for 10 GB and
        may be done `in_background`. `make` finds the memory, one buffer for each file; None: allocate it."""
        self._files, self._say = layout.files, say
        self._make = make or (lambda: [torch.zeros(file.data_bytes, dtype=torch.uint8) for file in layout.files])
        self._pinned: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._stream = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._prepare, name="host-buffers", daemon=True)
        self._thread.start()
        if not in_background:
            self.wait()

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._thread.is_alive()

    @property
    def problem(self) -> str | None:
        """Why there is no memory, as far as is known."""
        return None if self._problem is None else str(self._problem)

    def wait(self) -> None:
        """Wait for the memory; raises why there is none."""
        self._thread.join()
        if self._problem is not None:
            raise self._problem

    @property
    def buffers(self) -> list[Tensor]:
        """The memory, one buffer for each file."""
        self.wait()
        return self._buffers

    def _prepare(self) -> None:
        try:
            self._buffers = self._make()
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # else this thread would use the first GPU
                self._pin()
        except BaseException as error:
            self._problem = error

    def copy(self, parts: Mapping[str, Part]) -> float:
        """Copy the boxes that this rank writes; when it returns `parts` may be changed. Returns the seconds it took."""
        started = time.monotonic()
        copied = self.begin_copy(parts)
        if copied is not None:
            copied.synchronize()
        return time.monotonic() - started

    def begin_copy(self, parts: Mapping[str, Part]) -> torch.cuda.Event | None:
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
        return copied

    def staged(self) -> list[tuple[FilePlan, Tensor]]:
        """The files with their content."""
        return list(zip(self._files, self.buffers, strict=True))

    def release(self) -> None:
        """Free the memory."""
        self._thread.join()
        for buffer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._pinned, self._buffers = [], []

    def _pin(self) -> None:
        """Lock the pages in place. torch's own pinned allocator would round a buffer up to a power of two."""
        for buffer in self._buffers:
            if buffer.numel() == 0:
                continue
            error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), PORTABLE)
            if int(error) != 0:
                self._forget_error()
                self._say(
                    f"Host memory for checkpoints could not be pinned (CUDA error {int(error)}): saves will delay "
                    f"training longer. Raise the limit on locked memory (ulimit -l) to fix that."
                )
                return
            self._pinned.append(buffer)

    def _forget_error(self) -> None:
        """Clear the error of a refused CUDA call, which the next kernel of the trainer would report otherwise."""
        assert self._stream is not None, "only pinning can be refused"
        with suppress(RuntimeError):
            torch.zeros(1, device=self._stream.device)
