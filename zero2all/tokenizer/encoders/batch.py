"""What an encoder returns for a list of texts: all ids in one array, and where each text's begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedBatch:
    """The ids of several texts; `batch[i]` are those of text i, without a copy."""

    ids: np.ndarray
    """uint32, all texts one after the other."""
    offsets: np.ndarray
    """int64: text i has ids[offsets[i] : offsets[i + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, text: int) -> np.ndarray:
        if not 0 <= text < len(self):
            raise IndexError(f"text {text} of a batch of {len(self)}")
        return self.ids[self.offsets[text] : self.offsets[text + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[text] for text in range(len(self)))


def batch_of(rows: Sequence[Sequence[int] | np.ndarray]) -> EncodedBatch:
    """A batch from the ids of each text."""
    arrays = [np.asarray(row, dtype=np.uint32) for row in rows]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return EncodedBatch(np.concatenate(arrays) if arrays else np.empty(0, np.uint32), offsets)


def joined(batches: Sequence[EncodedBatch]) -> EncodedBatch:
    """Several batches as one."""
    starts = np.cumsum([0, *(len(batch.ids) for batch in batches)], dtype=np.int64)
    offsets = [batch.offsets[:-1] + start for batch, start in zip(batches, starts, strict=False)]
    return EncodedBatch(np.concatenate([batch.ids for batch in batches]), np.concatenate([*offsets, starts[-1:]]))
