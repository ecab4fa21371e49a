"""Bytes in order, whatever they are wrapped in.

A layer is a function `read(size)` that returns about `size` bytes, none at the end, and raises `StreamError` when what
is below it is damaged. `Stream`, on top, is what format readers use: there the error ends the bytes and is remembered,
so that everything before the damage is read and the damage is reported once.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

from zero2all.common.errors import DiskError, is_disk_full
from zero2all.corpus.readers.items import ReaderLimits, first_line_of

Read = Callable[[int], bytes]

CHUNK_BYTES = 1 << 20
INPUT_BYTES = 1 << 15
"""Compressed bytes taken at a time: the most that an error costs."""
ZSTD_BYTES = 1 << 11
"""The same of zst, whose smallest block, of 4 bytes, may become 128 KB."""
MAX_WINDOW_BYTES = 1 << 27
"""The most memory a zst or xz stream may ask for (xz -9 needs 65 MB); beyond it the stream is reported, not read."""


class StreamError(Exception):
    """Nothing behind this place can be read."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail
        self.lost_bytes = 0
        """Bytes skipped before this place, where they were counted."""


class Stream:
    """What the format readers read from."""

    def __init__(self, read: Read, file: BinaryIO | None = None) -> None:
        self.file = file
        """The same bytes with random access, where that is cheap."""
        self.broken: StreamError | None = None
        self._lower = read
        self._head = b""

    def read_or_raise(self, size: int) -> bytes:
        """Up to `size` bytes; for another layer on top."""
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        if self.broken is not None:
            raise self.broken
        try:
            data = self._lower(size)
        except StreamError as error:
            self.broken = error
            raise
        except OSError as error:  # the disk or the network share failed while reading
            self.broken = StreamError("read_error", first_line_of(error))
            raise self.broken from error
        if len(data) > size:  # some layers give what they have
            data, self._head = data[:size], data[size:]
        return data

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        """Up to `size` bytes; none at the end, or where `broken` says why there are no more."""
        try:
            return self.read_or_raise(size)
        except StreamError:
            return b""

    def peek(self, size: int) -> bytes:
        """The next bytes, which stay unread. Fewer only at the end."""
        pieces = [self._head]
        missing = size - len(self._head)
        self._head = b""
        while missing > 0 and (piece := self.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self._head = b"".join(pieces) + self._head
        return self._head[:size]

    def unread(self, data: bytes) -> None:
        """Put bytes back."""
        self._head = data + self._head

    def skip(self, size: int) -> int:
        """Skip bytes; returns how many there were."""
        left = size
        while left > 0 and (data := self.read(min(left, CHUNK_BYTES))):
            left -= len(data)
        return size - left


class UnitProgress:
    """Tells the caller how many bytes of a unit were consumed: never more than it has, and all of them in the end."""

    def __init__(self, on_bytes: Callable[[int], None], total: int) -> None:
        self._on_bytes, self._left = on_bytes, total

    def add(self, amount: int) -> None:
        """`amount` more bytes were read."""
        amount = min(amount, self._left)
        if amount > 0:
            self._left -= amount
            self._on_bytes(amount)

    def finish(self) -> None:
        """Nothing more will be read."""
        self.add(self._left)


class Guard:
    """Refuses decompression bombs, by the ratio of one stream and of the whole file."""

    def __init__(self, file_bytes: int, limits: ReaderLimits) -> None:
        self._file_bytes, self._limits = file_bytes, limits
        self._total = 0

    def check(self, bytes_in: int, bytes_out: int, more: int) -> None:
        """A stream has given `bytes_out` for `bytes_in`, `more` of them just now."""
        limits = self._limits
        self._total += more
        for out, size, what in ((bytes_out, bytes_in, "the stream"), (self._total, self._file_bytes, "the whole file")):
            if out > limits.ratio_from_bytes and out > limits.max_ratio * max(size, 1):
                raise StreamError(
                    "bomb",
                    f"{size:,} bytes of {what} unpacked to {out:,}: more than {limits.max_ratio:g} to 1. If "
                    "the data is really like this, unpack it yourself",
                )


class FileSlice(io.RawIOBase):
    """Some bytes of a file, read like a file. Several parts may share one handle: each seeks before it reads."""

    def __init__(self, file: BinaryIO, start: int, size: int, progress: UnitProgress | None = None) -> None:
        self._file, self._start, self._size, self._at, self._progress = file, start, size, 0, progress

    def readable(self) -> bool:  # noqa: D102
        return True

    seekable = readable

    def tell(self) -> int:  # noqa: D102
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:  # noqa: D102
        base = 0 if whence == os.SEEK_SET else self._at if whence == os.SEEK_CUR else self._size
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: D102
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int = -1) -> bytes:  # noqa: D102
        left = max(self._size - self._at, 0)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        self._at += len(data)
        if self._progress is not None:
            self._progress.add(len(data))
        return data


# ---- compressed streams ---------------------------------------------------------------------------------------


class _Gzip:
    """zlib with the interface of bz2 and lzma."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._tail = b""

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._zlib.decompress(self._tail + data if self._tail else data, max_length)
        self._tail = self._zlib.unconsumed_tail
        return out


class _Zstd:
    """A zst frame with the interface of bz2 and lzma. The library gives all that its input becomes at once, so it gets
    little at a time."""

    def __init__(self) -> None:
        import zstandard

        self._frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        self._error = zstandard.ZstdError
        self._tail = b""

    @property
    def eof(self) -> bool:
        return self._frame.eof

    @property
    def needs_input(self) -> bool:
        return not self._tail

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data + self._tail

    def decompress(self, data: bytes, max_length: int) -> bytes:  # noqa: ARG002
        data = self._tail + data
        self._tail = data[ZSTD_BYTES:]
        try:
            return self._frame.decompress(data[:ZSTD_BYTES])
        except self._error as error:
            raise ValueError(str(error)) from error


_MAKE: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES * 2),
    "zstd": _Zstd,
}
_MAGIC = {
    "gzip": b"\x1f\x8b",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ",
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([kind, 0x2A, 0x4D, 0x18]) for kind in range(0x50, 0x60))),
}
_ERRORS = (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError)


def decompress(read: Read, compression: str, guard: Guard) -> Read:
    """The layer that undoes a compression."""
    return _Decompressed(read, compression, guard).read


class _Decompressed:
    """One or more streams of a compression, one after the other."""

    def __init__(self, read: Read, compression: str, guard: Guard) -> None:
        self._lower, self._compression, self._guard = read, compression, guard
        self._stream = _MAKE[compression]()
        self._waiting = b""
        self._in = self._out = 0

    def read(self, size: int) -> bytes:
        data = self._next(size)
        self._guard.check(self._in, self._out, len(data))
        return data

    def _next(self, size: int) -> bytes:
        while True:
            if self._stream.eof and not self._next_stream():
                return b""
            data, self._waiting = self._waiting, b""
            ended = False
            if not data and self._stream.needs_input:
                data = self._lower(INPUT_BYTES)
                self._in += len(data)
                ended = not data
            try:
                out: bytes = self._stream.decompress(data, size)
            except _ERRORS as error:
                raise _damaged(self._compression, error) from error
            if out:
                self._out += len(out)
                return out
            if ended and not self._stream.eof:
                raise StreamError("cut_off", f"the {self._compression} data ends before its end mark")

    def _next_stream(self) -> bool:
        rest = self._stream.unused_data.lstrip(b"\0")
        while len(rest) < 6 and (more := self._lower(INPUT_BYTES)):
            self._in += len(more)
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(_MAGIC[self._compression]):
            raise StreamError("trailing_data", f"there is something after the end of the {self._compression} data")
        self._stream, self._waiting = _MAKE[self._compression](), rest
        return True


def _damaged(compression: str, error: Exception) -> StreamError:
    reason = "needs_memory" if "emory" in str(error) else "damaged_compression"
    return StreamError(reason, f"{compression}: {first_line_of(error)}")


def spooled(stream: Stream, limits: ReaderLimits) -> BinaryIO:
    """All of a stream in a temporary file without a name, for formats that need random access."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        size = 0
        while data := stream.read_or_raise(CHUNK_BYTES):
            size += len(data)
            if size > limits.max_spool_bytes:
                detail = f"unpacking needs more than {limits.max_spool_bytes:,} bytes (max_spool_bytes)"
                raise StreamError("too_large", detail)
            file.write(data)
        file.seek(0)
    except BaseException as error:
        file.close()
        if is_disk_full(error):  # nothing is wrong with the input
            raise DiskError(
                f"The disk for temporary files, {tempfile.gettempdir()}, is full. Free some space there, or "
                "name another folder in the variable TMPDIR, and run the same command again."
            ) from error
        raise
    return file
