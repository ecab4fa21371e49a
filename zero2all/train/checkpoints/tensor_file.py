"""One safetensors file: written in one pass with its crc32c, read by range, or read and checked in one pass.

The format is eight bytes of header length, a JSON header, and the bytes of the tensors. It is written here rather than
by the library so that the checksum is computed while writing (a file of some GB is not read again), a full disk is
reported as the system's own error, and the bytes come directly from the host buffers. Any safetensors reader opens the
result.

`read_checked` reads a few MB at a time. While one piece is checked and converted, which the processor's cache still
holds, threads read the next ones. Where a target has the dtype of the file and is in host memory, it is read into
directly.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from zero2all.common.checksum import extended
from zero2all.common.errors import BadInputError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
"""What safetensors calls each dtype that a checkpoint may hold."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

LARGEST_HEADER_BYTES = 100_000_000
ALIGNMENT = 8
CHUNK_BYTES = 1 << 20
"""Written and checksummed at a time: the processor's cache still holds it."""
CHECK_BYTES = 1 << 20
READ_BYTES = 16 << 20
"""Read at a time, by each of a few threads: the memory that loading needs beside the tensors themselves. Up to 32 MB
the allocator keeps it; new pages for every read would take longer than the read."""
PIECE_BYTES, PIECES_AHEAD, READERS = 4 << 20, 8, 4
"""Of `read_checked`."""


@dataclass(frozen=True)
class TensorInfo:
    """dtype, shape and place of one tensor in a file's data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a file: where the data starts, and the place of every tensor."""

    data_start: int
    infos: dict[str, TensorInfo]


def is_shape(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can exist: its bytes fit into 62 bits."""
    return math.prod(shape) < 1 << 58


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """A place for every key -> (dtype, shape): wide dtypes first, so that everything is aligned without gaps."""
    infos, place = {}, 0
    for key, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-DTYPES[item[1][0]].itemsize, item[0])):
        end = place + byte_count(dtype, shape)
        infos[key], place = TensorInfo(dtype, shape, place, end), end
    return infos


def header_bytes(infos: Mapping[str, TensorInfo]) -> bytes:
    """The header of a file: length and JSON, padded with spaces so that the data is aligned."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for key, info in infos.items():
        described[key] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.begin, info.end]}
    text = json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def view_of(buffer: Tensor, info: TensorInfo) -> Tensor:
    """The tensor of `info` inside a buffer that is laid out like the file's data."""
    return buffer[info.begin : info.end].view(DTYPES[info.dtype]).view(info.shape)


def write_durably(path: Path, head: bytes, data: Tensor | None = None) -> dict[str, Any]:
    """Write a new file from bytes and, after them, a buffer; fsync it; returns its size and crc32c."""
    crc = google_crc32c.value(head)
    count = len(head)
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(head))
        if data is not None:
            array = data.numpy()
            for start in range(0, len(array), CHUNK_BYTES):
                chunk = array[start : start + CHUNK_BYTES]
                crc = extended(crc, chunk)
                _write_all(file.fileno(), memoryview(chunk.data))
            count += len(array)
        os.fsync(file.fileno())
    return {"bytes": count, "crc32c": f"{crc:08x}"}


def _write_all(handle: int, data: memoryview) -> None:
    """Write everything; a short write (a disk that has just become full) is repeated, which then raises."""
    while data:
        data = data[os.write(handle, data) :]


def file_crc32c(path: Path) -> str:
    """The crc32c of a file in the manifest's format, read with one small buffer."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        buffer = np.empty(min(CHECK_BYTES, max(1, os.fstat(file.fileno()).st_size)), dtype=np.uint8)
        while count := file.readinto(buffer.data):
            crc = extended(crc, buffer[:count])
    return f"{crc:08x}"


def read_header(path: Path) -> Header:
    """The header of a file after checking it against the file's size; needs no memory beyond the header itself."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER_BYTES, size - 8):
            raise BadInputError(f"{path} is not a readable safetensors file: its header is too long")
        text = file.read(length)
    try:
        described = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not a readable safetensors file: its header is not JSON ({error})") from error
    if not isinstance(described, dict):
        raise BadInputError(f"{path} is not a readable safetensors file: its header describes no tensors")
    described.pop("__metadata__", None)
    infos = {key: _parse_info(path, key, info, 8 + length) for key, info in described.items()}
    place = 0
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != place:
            raise BadInputError(f"{path}: its tensors overlap, or leave a hole, at byte {place} of the data")
        place = info.end
    if 8 + length + place != size:
        raise BadInputError(f"{path}: its header describes {place} bytes of data, the file holds {size - 8 - length}")
    return Header(8 + length, infos)


def _parse_info(path: Path, key: str, info: Any, data_start: int) -> TensorInfo:
    match info:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if dtype in DTYPES:
            known = all(type(size) is int and 0 <= size < 1 << 58 for size in shape) and is_shape(tuple(shape))
            if known and begin >= 0 and end - begin == byte_count(dtype, tuple(shape)):
                if (data_start + begin) % DTYPES[dtype].itemsize:
                    raise BadInputError(f"{path}: {key[:80]!r} does not begin at a multiple of its element's size")
                return TensorInfo(dtype, tuple(shape), begin, end)
    raise BadInputError(f"{path}: its header describes {key[:80]!r} as {str(info)[:120]}, which cannot be")


def read_rows(
    handle: int, header: Header, info: TensorInfo, first: int, count: int, into: Tensor | None = None
) -> Tensor:
    """`count` rows from `first` on (the whole of a tensor without dimensions), read into memory of their own or of
    `into`, a contiguous tensor of this shape and dtype on the CPU."""
    row_bytes = byte_count(info.dtype, info.shape[1:]) if info.shape else info.end - info.begin
    place = header.data_start + info.begin + first * row_bytes
    buffer = torch.empty(count * row_bytes, dtype=torch.uint8) if into is None else into.view(-1).view(torch.uint8)
    view = memoryview(buffer.numpy().data)
    while view:
        done = os.preadv(handle, [view], place)
        if done == 0:
            raise BadInputError(
                "a file of the checkpoint ended before its tensors did: it was truncated after it was checked"
            )
        view, place = view[done:], place + done
    shape = (count, *info.shape[1:]) if info.shape else ()
    return buffer.view(DTYPES[info.dtype]).view(shape)


class _Piece(NamedTuple):
    """Consecutive rows of a tensor in the file, and where they go; None: nowhere, they are only checked."""

    info: TensorInfo
    first: int
    rows: int
    target: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rows."""
        return (self.rows, *self.info.shape[1:]) if self.info.shape else ()

    @property
    def is_read_in_place(self) -> bool:
        """Whether the bytes of the file are those of the target."""
        target = self.target
        return (
            target is not None
            and target.device.type == "cpu"
            and target.dtype == DTYPES[self.info.dtype]
            and target.is_contiguous()
        )


class _Coming(NamedTuple):
    """A piece that is being read."""

    piece: _Piece
    buffer: Tensor | None  # None: it is read in place
    values: Future[Tensor]


@torch.no_grad()
def read_checked(handle: int, header: Header, targets: Mapping[str, Tensor]) -> str:
    """Fill the targets of the tensors in a file, by their keys; returns the crc32c of the whole file."""
    crc = int(google_crc32c.value(os.pread(handle, header.data_start, 0)))
    with ThreadPoolExecutor(READERS) as readers:
        for piece, values in _read_ahead(readers, handle, header, targets):
            crc = extended(crc, values.view(-1).view(torch.uint8).numpy())
            if piece.target is not None and not piece.is_read_in_place:
                piece.target.copy_(values)
    return f"{crc:08x}"


def _read_ahead(
    readers: ThreadPoolExecutor, handle: int, header: Header, targets: Mapping[str, Tensor]
) -> Iterator[tuple[_Piece, Tensor]]:
    """All pieces of a file in their order, each with its values, which are valid until the next one is asked for."""
    coming: deque[_Coming] = deque()
    # Used again and again: memory that one thread allocates and another frees may be given back late.
    spare = [torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(PIECES_AHEAD)]
    for piece in _pieces(header, targets):
        if len(coming) == PIECES_AHEAD:
            done = coming.popleft()
            yield done.piece, done.values.result()
            if done.buffer is not None:
                spare.append(done.buffer)
        buffer = None if piece.is_read_in_place else spare.pop()
        into = piece.target if buffer is None else _view(buffer, piece)
        values = readers.submit(read_rows, handle, header, piece.info, piece.first, piece.rows, into)
        coming.append(_Coming(piece, buffer, values))
    for done in coming:
        yield done.piece, done.values.result()


def _view(buffer: Tensor, piece: _Piece) -> Tensor:
    """The beginning of a buffer as the rows of a piece; another buffer where one row alone is longer than it."""
    count = byte_count(piece.info.dtype, piece.shape)
    room = buffer if count <= len(buffer) else torch.empty(count, dtype=torch.uint8)
    return room[:count].view(DTYPES[piece.info.dtype]).view(piece.shape)


def _pieces(header: Header, targets: Mapping[str, Tensor]) -> Iterator[_Piece]:
    """In the order of the file."""
    for key, info in sorted(header.infos.items(), key=lambda item: item[1].begin):
        target = targets.get(key)
        if not info.shape:
            yield _Piece(info, 0, 1, target)
            continue
        at_once = max(1, PIECE_BYTES // max(1, byte_count(info.dtype, info.shape[1:])))
        for first in range(0, info.shape[0], at_once):
            rows = min(at_once, info.shape[0] - first)
            yield _Piece(info, first, rows, None if target is None else target[first : first + rows])
