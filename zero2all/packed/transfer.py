"""Batches on the device by the time they are asked for.

Rows are converted straight into page-locked memory, and copied from there on a stream of their own while the step
before still computes. torch's host allocator hands the page-locked memory out again once the copy is through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from zero2all.packed.loader import Batch, Delivery, Loader, LoaderOptions
from zero2all.packed.mixture import TrainingData


def batches_on(
    device: torch.device,
    data: TrainingData,
    tokens_per_step: int,
    first_token: int,
    steps: int,
    options: LoaderOptions | None = None,
) -> Loader:
    """A loader whose batches hold tensors on `device`; on the CPU they share memory with what was read."""
    if device.type != "cuda":
        delivery = Delivery(finish=partial(_mapped, convert=torch.from_numpy))
    else:
        to_device = _ToDevice(device)
        delivery = Delivery(to_device.allocate, to_device.send)
    return Loader(data, tokens_per_step, first_token, steps, options, delivery)


class _ToDevice:
    """Page-locked memory and the stream that empties it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.consumer = torch.cuda.current_stream(device)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Like np.empty. A new thread begins on the first GPU, where this process may have no business."""
        with torch.cuda.device(self.device):
            return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    def send(self, batch: Batch) -> Batch:
        """Start the copies, and make sure that no kernel runs before they are through."""
        with torch.cuda.stream(self.stream):
            sent = _mapped(batch, self._copy)
            done = torch.cuda.Event()
            done.record(self.stream)
        # This blocks the reading thread only: a batch that is handed out is on the device.
        done.synchronize()
        return sent

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(array)
        sent = (host if host.is_pinned() else host.pin_memory()).to(self.device, non_blocking=True)
        sent.record_stream(self.consumer)  # its memory is not handed out again while the trainer's kernels read it
        return sent


def _mapped(batch: Batch, convert: Callable[[np.ndarray], torch.Tensor]) -> Batch:
    arrays = {name: getattr(batch, name) for name in ("tokens", "channels", "weights", "document_ids")}
    converted: dict[str, Any] = {name: convert(array) for name, array in arrays.items() if array is not None}
    return replace(batch, **converted)
