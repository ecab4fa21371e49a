"""Which sample is in each row of a step's global batch, and from which shard it comes.

A pure function of the data and the position, so any process can look up any step, also long after it was trained, and
the loader need not pass names along. A sample that crosses a shard border belongs to the shard that holds its middle;
a best-fit row lies in one shard by construction.

Cost: a lookup of 4,096 positions is kept for the steps that follow (`packed.loader.BlockLookup`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zero2all.packed.bestfit import BestFitIndex, open_best_fit
from zero2all.packed.loader import BlockLookup
from zero2all.packed.mixture import TrainingData


@dataclass(frozen=True)
class StepRows:
    """The rows of one step or of several in a row, over all ranks, in the order of the global batch. B rows."""

    first_token: int
    seq_len: int
    sources: np.ndarray  # (B,) index into `names`
    samples: np.ndarray  # (B,) which sample of its source
    shards: np.ndarray  # (B,) the shard of its source that it comes from
    channels: np.ndarray  # (B,) index into the channels of the run
    names: tuple[str, ...]  # sources of the run


class RowFinder:
    """Finds the rows of steps of one run; keeps what neighbouring steps need too."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data
        self._names = tuple(split.name for split in data.splits)
        self._lookup = BlockLookup()
        self._indexes: dict[tuple[int, int], BestFitIndex] = {}

    def rows(self, first_token: int, samples: int) -> StepRows:
        """The rows of the global batch of `samples` samples that begins at `first_token`, or of several in a row."""
        data = self._data
        segment = data.segment_at(first_token)
        sources, indices = self._lookup(segment, segment.position_at(first_token), samples)
        shards = np.empty(len(sources), dtype=np.int64)
        for source in np.unique(sources).tolist():
            here = sources == source
            middles = self._middles(source, segment.seq_len, indices[here])
            starts = data.splits[source].shard_starts
            shards[here] = np.searchsorted(starts, middles, side="right") - 1
        return StepRows(first_token, segment.seq_len, sources, indices, shards, data.channel_of[sources], self._names)

    def _middles(self, source: int, seq_len: int, indices: np.ndarray) -> np.ndarray:
        """A token of each sample that lies in the shard it belongs to."""
        if self._data.packing != "best_fit":
            return indices * seq_len + seq_len // 2
        index = self._indexes.get((source, seq_len))
        if index is None:
            index = self._indexes[source, seq_len] = open_best_fit(self._data.splits[source], seq_len)
        return index.starts[index.rows[indices].astype(np.int64)].astype(np.int64)
