"""Hands the trainer one global batch per step, read ahead by a thread.

A batch is named by its positions in the order, so the loader has no state worth saving: it can start anywhere.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zero2all.packed.mixture import TrainingData

PREFETCH_STEPS = 2


@dataclass(frozen=True)
class Batch:
    """The samples of one optimizer step."""

    tokens: np.ndarray
    """(samples, seq_len + 1) int64: inputs are [:, :-1], targets [:, 1:]."""
    channels: np.ndarray
    """(samples,) index into TrainingData.channels."""
    sources: np.ndarray
    """(samples,) index into TrainingData.splits."""
    first_position: int
    """Position in the run's order of the first sample."""


def read_batch(data: TrainingData, seq_len: int, first_position: int, samples: int) -> Batch:
    """The samples at positions first_position .. first_position + samples."""
    positions = np.arange(first_position, first_position + samples, dtype=np.int64)
    sources, indices = data.order.lookup(positions)
    tokens = np.stack(
        [
            data.splits[source].read(int(index) * seq_len, seq_len + 1)
            for source, index in zip(sources, indices, strict=True)
        ]
    )
    channel_of = np.array([data.channels.index(split.channel) for split in data.splits], dtype=np.int64)
    return Batch(tokens, channel_of[sources], sources, first_position)


class Loader:
    """Iterate over the batches of `steps` steps from `first_position` on."""

    def __init__(
        self, data: TrainingData, seq_len: int, samples_per_step: int, first_position: int, steps: int
    ) -> None:
        self.wait_seconds = 0.0
        """How long the trainer waited for the batch it was handed last."""
        self._data, self._seq_len, self._samples = data, seq_len, samples_per_step
        self._positions = range(first_position, first_position + steps * samples_per_step, samples_per_step)
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=PREFETCH_STEPS)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="z2a-loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            started = time.perf_counter()
            item = self._ready.get()
            self.wait_seconds = time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading ahead."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _read_ahead(self) -> None:
        try:
            for position in self._positions:
                if not self._put(read_batch(self._data, self._seq_len, position, self._samples)):
                    return
            self._put(None)
        except BaseException as error:  # handed to the trainer, which raises it in its own thread
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
