"""Where the time of a step goes.

On a GPU the marks are events in the stream: they cost a microsecond, nothing waits for them, and they are read when
the step is long over. Parts are measured back to back, so they add up to the step; a part that the host prepared while
the device still worked on the one before shows only what the device had to wait for.
"""

from __future__ import annotations

import time

import torch

PARTS = ("collate", "forward", "loss", "backward", "reduce", "optimizer")


class Anatomy:
    """The parts of one step, in the order in which they end."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, torch.cuda.Event | float]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part; on a GPU only once the last mark has been passed."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += _between(before, after)
        return found


def _between(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event), "all marks of a step are of one kind"
    assert isinstance(after, torch.cuda.Event), "all marks of a step are of one kind"
    return before.elapsed_time(after) / 1e3
