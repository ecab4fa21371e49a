"""One pass over a file of tensors: read by several threads, checked in order, converted on the way to its targets.

A file is read a few MB at a time. While one piece is checked and converted, which the processor's cache still holds,
threads read the next ones. Where a target has the dtype of the file and is in host memory, it is read into directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from zero2all.train.checkpoints.tensor_file import (
    DTYPES,
    Header,
    TensorInfo,
    byte_count,
    extended_crc32c,
    file_start_crc32c,
    read_rows,
)

PIECE_BYTES = 4 << 20
READERS = 4
PIECES_AHEAD = 8


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
    crc = file_start_crc32c(handle, header)
    with ThreadPoolExecutor(READERS) as readers:
        for piece, values in _read_ahead(readers, handle, header, targets):
            crc = extended_crc32c(crc, values)
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
