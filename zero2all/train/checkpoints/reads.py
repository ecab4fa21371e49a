"""What to read for a tensor: parts of stored pieces, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from zero2all.train.checkpoints.index import Index, Piece


@dataclass(frozen=True)
class Read:
    """One part of a stored piece, and where it goes."""

    piece: Piece
    offsets: tuple[int, ...]
    """Where the part begins within the piece."""
    lengths: tuple[int, ...]
    target: Tensor
    """A view into the caller's tensor, of shape `lengths`."""


def whole_reads(tensors: Mapping[str, Tensor], index: Index) -> Iterator[Read]:
    """The reads for tensors that this process holds whole: every piece, all of it."""
    for name, tensor in tensors.items():
        for piece in index[name].pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
            yield Read(piece, (0,) * len(box), piece.shape, tensor.detach()[box])
