"""How much memory each stage may take, out of a limit on the whole process."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress

import psutil

from zero2all.common.errors import UsageError
from zero2all.common.files import human_bytes

LARGE_ARRAY = 1 << 17
_M_MMAP_THRESHOLD = -3
PER_THREAD = 12 << 20
"""A worker's own tables, and the blocks that wait for it."""
FOR_READING = 40 << 20
"""Documents on their way from the files, the character tables, the pairs of the merge loop."""
LEAST = 32 << 20
"""Below this the tables could hardly hold the alphabet and its pairs."""
TABLE_SHARE = 0.55
"""While fragments become words, both are in memory: the table may take this share."""
PLACES_SHARE = 0.3
"""The least share that must be left for the places of pairs when the words are in memory."""


class Memory:
    """A limit on the resident memory of this process, or none."""

    def __init__(self, limit: int | None, threads: int) -> None:
        self.limit = limit
        self.free: int | None = None
        if limit is not None:
            reserved = _resident() + FOR_READING + threads * PER_THREAD
            self.free = limit - reserved
            if self.free < LEAST:
                raise UsageError(
                    f"A memory limit of {human_bytes(limit)} is too small to hold the alphabet and its pairs: the "
                    f"program itself takes {human_bytes(reserved)} with --threads {threads}. Set --max-memory to "
                    f"{human_bytes(reserved + LEAST)} or more, or lower --threads."
                )

    def for_tables(self) -> int | None:
        """Bytes for the big table of a counting pass."""
        return None if self.free is None else int(TABLE_SHARE * self.free)

    def for_words(self) -> int | None:
        """Bytes for all words together."""
        return None if self.free is None else int((1 - PLACES_SHARE) * self.free)

    def for_places(self) -> int | None:
        """Bytes for the places of pairs, now that the words are in memory."""
        if self.limit is None:
            return None
        return max(0, self.limit - _resident() - FOR_READING // 2)


def return_freed_memory() -> None:
    """Make glibc give the memory of large arrays back to the system as soon as they are freed.

    By default it keeps more and more of it in its heap. Training 45 MB of Chinese took 20 MB more that way.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_ARRAY)


def peak_resident() -> int:
    """The most memory that this process ever had resident, in bytes.

    Not `ru_maxrss` on Linux: a child inherits that of its parent.
    """
    with suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
