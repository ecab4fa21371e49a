"""crc32c of memory while the interpreter goes on, in several threads.

`google_crc32c.extend` holds the interpreter. Beside a training loop that is expensive: the loop gives the interpreter
up in every operator and then waits for it up to 5 ms each time, so a checksum of 15 GB costs it seconds. The same
library, called through ctypes, holds nothing. Where its file is not found the slow way remains, in small pieces.
"""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c

from zero2all.common.files import joined_crc32c

PIECE_BYTES = 256 << 20
"""Large, because the checksums of pieces are joined in Python."""
SMALL_BYTES = 1 << 20
"""At a time where the interpreter is held."""


@functools.cache
def _native() -> Callable[[int, int, int], int] | None:
    """crc32c_extend(crc, address, count) of the library that google_crc32c brings."""
    folder = Path(google_crc32c.__file__).parent
    for path in sorted(folder.parent.glob(f"{folder.name}.libs/libcrc32c*.so*")):
        try:
            extend = ctypes.CDLL(str(path)).crc32c_extend
        except (OSError, AttributeError):
            continue
        extend.restype, extend.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        return extend
    return None


def extended(crc: int, data: Any) -> int:
    """A crc32c extended by a contiguous numpy array of bytes."""
    native = _native()
    if native is not None:
        return int(native(crc, data.ctypes.data, data.size))
    for start in range(0, data.size, SMALL_BYTES):
        crc = google_crc32c.extend(crc, data[start : start + SMALL_BYTES])
    return int(crc)


def crc32c(data: Any, threads: int) -> int:
    """The crc32c of a contiguous numpy array of bytes."""
    return joined(data.size, lambda start, end: extended(0, data[start:end]), threads)


def joined(count: int, piece_crc: Callable[[int, int], int], threads: int) -> int:
    """The crc32c of `count` bytes from those of their pieces, each from `start` to `end`."""
    starts = range(0, count, PIECE_BYTES)
    ends = [min(start + PIECE_BYTES, count) for start in starts]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        pieces = zip(pool.map(piece_crc, starts, ends), starts, ends, strict=True)
        return int(joined_crc32c((f"{crc:08x}", end - start) for crc, start, end in pieces), 16)
