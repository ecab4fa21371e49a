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
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from zero2all.common.errors import DiskError, is_disk_full
from zero2all.corpus.readers.items import ReaderLimits, first_line_of

Read = Callable[[int], bytes]

CHUNK_BYTES = 1 << 20
INPUT_BYTES = 1 << 15
"""Compressed bytes taken at a time: the most that an error costs."""
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


_MAKE: dict[str, Callable[[], Any]] = {
    "gzip": _Gzip,
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES * 2),
}
_MAGIC = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ"}
_ERRORS = (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError)


def decompress(read: Read, compression: str, guard: Guard) -> Read:
    """The layer that undoes a compression."""
    if compression == "zstd":
        return ZstdStream(read, guard).read
    return _Decompressed(read, compression, guard).read


class _Decompressed:
    """One or more gzip, bzip2 or xz streams, one after the other."""

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


class ZstdStream:
    """One or more zst frames, one after the other."""

    def __init__(self, read: Read, guard: Guard) -> None:
        import zstandard

        self._guard, self._out = guard, 0
        self._fed, self._zstd_error = _Followed(read), zstandard.ZstdError
        context = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        self._reader = context.stream_reader(cast(BinaryIO, self._fed), read_size=INPUT_BYTES, read_across_frames=True)

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""
        data = b""
        try:
            while not data and not self._fed.is_at_end:
                reads = self._fed.reads
                data = self._reader.read1(size)
                if not data and self._fed.reads == reads:
                    raise StreamError("damaged_compression", "zstd: the library stopped before the end")
        except self._zstd_error as error:
            raise _damaged("zstd", error) from error
        if not data and not self._fed.walker.at_frame_end:
            raise StreamError("cut_off", "the zstd data ends inside a frame")
        self._out += len(data)
        self._guard.check(self._fed.walker.position, self._out, len(data))
        return data


class _Followed:
    """What the library reads from: the layer below, one block at a time.

    So an error in a block, which makes the library forget what it was about to give, costs only that block.
    """

    def __init__(self, read: Read) -> None:
        self.walker = FrameWalker()
        self.is_at_end = False
        self.reads = 0
        self._lower = read
        self._blocks: deque[bytes] = deque()

    def read(self, size: int) -> bytes:
        self.reads += 1
        if not self._blocks:
            data = self._lower(size)
            start = self.walker.position
            self.walker.feed(data)
            at = 0
            for end in self.walker.block_ends:
                self._blocks.append(data[at : end - start])
                at = end - start
            self.walker.block_ends.clear()
            if at < len(data):
                self._blocks.append(data[at:])
            self.is_at_end = not data  # the library takes an empty read for the end
        return self._blocks.popleft() if self._blocks else b""


class FrameWalker:
    """Follows the headers of zst frames and blocks in a stream that comes in chunks of any size (RFC 8878, section 3).

    The library says neither where frames end nor that a stream was cut off inside one.
    """

    def __init__(self) -> None:
        self.position = 0
        self.at_frame_end = True
        self.block_ends: list[int] = []
        """Ends of the blocks passed, until the list is cleared."""
        self._skip = 0
        self._wanted = 4
        self._step: Callable[[bytes], None] = self._magic
        self._held = b""
        self._has_checksum = False
        self.is_lost = False
        """What came is no zst frame."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        at = 0
        while at < len(data) and not self.is_lost:
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                self.position += step
                if self._skip == 0:
                    self.block_ends.append(self.position)
                    if self._wanted == 0:
                        self._frame_ended()
                continue
            piece = data[at : at + self._wanted - len(self._held)]
            self._held += piece
            at += len(piece)
            self.position += len(piece)
            self.at_frame_end = False
            if len(self._held) == self._wanted:
                header, self._held = self._held, b""
                self._step(header)

    def _frame_ended(self) -> None:
        self.at_frame_end = True
        self._step, self._wanted = self._magic, 4

    def _magic(self, header: bytes) -> None:
        if header == b"\x28\xb5\x2f\xfd":
            self._step, self._wanted = self._descriptor, 1
        elif header[1:] == b"\x2a\x4d\x18" and 0x50 <= header[0] <= 0x5F:
            self._step, self._wanted = self._skippable, 4
        else:
            self.is_lost = True

    def _skippable(self, header: bytes) -> None:
        self._skip, self._wanted = int.from_bytes(header, "little"), 0
        if not self._skip:
            self._frame_ended()

    def _descriptor(self, header: bytes) -> None:
        flags = header[0]
        single = bool(flags & 0x20)
        self._has_checksum = bool(flags & 0x04)
        size_bytes = (1 if single else 0, 2, 4, 8)[flags >> 6]
        self._skip = (0 if single else 1) + (0, 1, 2, 4)[flags & 3] + size_bytes
        self._step, self._wanted = self._block, 3

    def _block(self, header: bytes) -> None:
        value = int.from_bytes(header, "little")
        kind, size = value >> 1 & 3, value >> 3
        self._skip = 1 if kind == 1 else size
        if value & 1:
            self._skip += 4 if self._has_checksum else 0
            self._wanted = 0
            if not self._skip:
                self._frame_ended()


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
