"""What a process holds of a tensor that several processes share.

A layout cuts a tensor twice. Tensor parallelism cuts a box out of it (a range along each dimension); the box of a
process is the whole tensor where it does not. ZeRO and FSDP then flatten the box, row by row, and each process keeps
a range of consecutive values. A `TensorPart` says which range of which box of which tensor its values are, so
optimizers, checkpoints and norms need to know nothing about the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A range along each dimension of a tensor."""

    offsets: Sizes
    lengths: Sizes

    @staticmethod
    def whole(shape: Sizes) -> Box:
        """All of it."""
        return Box((0,) * len(shape), shape)

    @staticmethod
    def share(shape: Sizes, dimension: int, rank: int, ranks: int) -> Box:
        """One of `ranks` equal ranges along a dimension."""
        assert shape[dimension] % ranks == 0, f"{shape} is cut in {ranks} along dimension {dimension}"
        length = shape[dimension] // ranks
        offsets = tuple(rank * length if at == dimension else 0 for at in range(len(shape)))
        return Box(offsets, tuple(length if at == dimension else size for at, size in enumerate(shape)))

    @property
    def slices(self) -> tuple[slice, ...]:
        """It as an index."""
        return tuple(slice(first, first + n) for first, n in zip(self.offsets, self.lengths, strict=True))


@dataclass(frozen=True, eq=False)
class TensorPart:
    """Consecutive values of a box of a tensor, in this process."""

    values: Tensor
    """Of shape (rows, …) where the range holds whole rows of the box, else one-dimensional; empty where this process
    holds nothing."""
    shape: Sizes  # of the whole tensor
    box: Box
    start: int = 0  # of the range in the flattened box
    group: dist.ProcessGroup | None = None
    """The processes that hold the other ranges of the box; None: this process holds all of it."""

    @staticmethod
    def whole(tensor: Tensor) -> TensorPart:
        """A tensor that is not cut."""
        shape = tuple(tensor.shape)
        return TensorPart(tensor, shape, Box.whole(shape))

    @staticmethod
    def of_range(
        values: Tensor, shape: Sizes, start: int, group: dist.ProcessGroup | None, box: Box | None = None
    ) -> TensorPart:
        """The range from `start` on of a box, or of the whole tensor; `values` are contiguous."""
        whole, box = shape, box or Box.whole(shape)
        shape = box.lengths
        row = math.prod(shape[1:])
        if len(shape) > 1 and start % max(1, row) == 0 and values.numel() % max(1, row) == 0:
            values = values.view(-1, *shape[1:])
        else:
            values = values.view(-1) if shape else values.view(())
        return TensorPart(values, whole, box, start, group)

    @property
    def offsets(self) -> Sizes:
        """Where the box begins in the tensor."""
        return self.box.offsets

    @property
    def lengths(self) -> Sizes:
        """The lengths of the box."""
        return self.box.lengths

    @property
    def has_whole_rows(self) -> bool:
        """Whether `values` has the dimensions of the tensor."""
        return self.values.dim() == len(self.shape)

    def like(self, values: Tensor) -> TensorPart:
        """Other values at the same place: a gradient, a moment."""
        return replace(self, values=values)

    def by_row(self, values: Tensor, row_shape: Sizes) -> TensorPart:
        """A tensor that has `row_shape` values for each row of this one, cut at the same rows."""
        assert self.has_whole_rows, "the range cuts rows"
        rows_before = self.start // max(1, math.prod(self.lengths[1:]))
        return TensorPart(
            values,
            (self.shape[0], *row_shape),
            Box((self.offsets[0], *(0 for _ in row_shape)), (self.lengths[0], *row_shape)),
            rows_before * math.prod(row_shape),
            self.group,
        )

    def boxes(self) -> Iterator[tuple[Sizes, Tensor]]:
        """The same values as boxes of the whole tensor: (where it begins, a view of its shape). A range that begins and
        ends within rows is a part of a row, whole rows, and a part of a row."""
        for offsets, lengths, first in _boxes_of_range(self.lengths, self.start, self.start + self.values.numel()):
            at = tuple(own + inner for own, inner in zip(self.offsets, offsets, strict=True))
            if self.values.shape == lengths:  # the only box, in whatever memory layout
                yield at, self.values
            else:
                yield at, self.values.view(-1)[first : first + math.prod(lengths)].view(lengths)

    def index(self) -> Tensor:
        """The place of each value in the flattened whole tensor: int32, in the shape of `values`."""
        device = self.values.device
        at = torch.arange(self.start, self.start + self.values.numel(), dtype=torch.int32, device=device)
        if self.lengths == self.shape:
            return at.view(self.values.shape)
        index, stride = torch.zeros_like(at), 1
        for length, offset, whole in zip(
            reversed(self.lengths), reversed(self.offsets), reversed(self.shape), strict=True
        ):
            index += (at % length + offset) * stride
            at, stride = at // length, stride * whole
        return index.view(self.values.shape)

    def sum(self, value: Tensor) -> Tensor:
        """Add up, in place, what each process computed from its part."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value


def _boxes_of_range(shape: Sizes, start: int, stop: int) -> Iterator[tuple[Sizes, Sizes, int]]:
    """(offsets, lengths, place of the first value in the range) of the boxes that make up a range of a flattened
    tensor, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,), 0) if shape else ((), (), 0)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        for offsets, lengths, at in _boxes_of_range(shape[1:], start - first * row, stop - first * row):
            yield (first, *offsets), (1, *lengths), at
        return
    if start % row:
        border = (first + 1) * row
        yield from _boxes_of_range(shape, start, border)
        for offsets, lengths, at in _boxes_of_range(shape, border, stop):
            yield offsets, lengths, at + border - start
        return
    whole_rows = (stop - start) // row
    yield (first, *(0 for _ in shape[1:])), (whole_rows, *shape[1:]), 0
    for offsets, lengths, at in _boxes_of_range(shape, start + whole_rows * row, stop):
        yield offsets, lengths, at + whole_rows * row
