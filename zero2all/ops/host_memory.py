"""Pinned host memory: what a GPU copies to and from directly, while it computes.

torch's own pinned allocator rounds a buffer up to a power of two (541 MB take 1,074 MB) and pins it in pages of 4 KB.
Here a buffer is as large as asked, on large pages where the system has them, which are pinned several times faster.
"""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device, not only the current one."""
REGION_BYTES = 1 << 30
"""Pinned at once for small buffers. A copy must not cross from one region into another."""


def large_pages(count: int) -> Tensor:
    """Zeros (uint8) in memory of their own."""
    memory = mmap.mmap(-1, count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: Tensor, device: torch.device) -> int:
    """Lock the pages of a tensor in place. Returns CUDA's error, 0 for none."""
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
    if error:
        with suppress(RuntimeError):  # clears the error, which the next kernel would report
            torch.zeros(1, device=device)
    return error


def unpin(memory: Tensor) -> None:
    """Unlock the pages of a tensor that was pinned."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


class PinnedMemory:
    """Buffers that are kept as long as this object is. They are pageable, and copies slower, where pinning fails."""

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        """`region_bytes`: less where all buffers together are smaller."""
        self._region, self._region_bytes = torch.empty(0, dtype=torch.uint8), region_bytes

    def buffer(self, count: int, device: torch.device) -> Tensor:
        """`count` bytes, from a new page on."""
        size = -(-count // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > self._region.numel():
            self._region = large_pages(max(size, self._region_bytes))
            if pin(self._region, device) == 0:
                weakref.finalize(self, unpin, self._region).atexit = False
        found, self._region = self._region[:count], self._region[size:]
        return found
