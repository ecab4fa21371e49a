"""One safetensors file: written in one pass with its crc32c, and read by range.

The format is eight bytes of header length, a JSON header, and the bytes of the tensors. It is written here rather than
by the library so that the checksum is computed while writing (a file of some GB is not read again), a full disk is
reported as the system's own error, and the bytes come directly from the host buffers. Any safetensors reader opens the
result.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
READERS = 4
"""Threads that read at the same time."""


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


def read_rows(handle: int, header: Header, info: TensorInfo, first: int, count: int) -> Tensor:
    """`count` rows from `first` on (the whole of a tensor without dimensions)."""
    row_bytes = byte_count(info.dtype, info.shape[1:]) if info.shape else info.end - info.begin
    place = header.data_start + info.begin + first * row_bytes
    buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
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
