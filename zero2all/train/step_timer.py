"""Where the time of a step goes.

On a GPU the marks are events in the stream: they cost a microsecond, nothing waits for them, and they are read long
after the step. Parts are measured back to back, so they add up to the step; of a part that the host prepared while the
device was still busy, only the time that the device waited is counted.
"""

from __future__ import annotations

import time

import torch

PARTS = ("collate", "forward", "loss", "backward", "reduce", "optimizer")

Mark = torch.cuda.Event | float
"""A point in time: an event in the stream of a GPU, or a reading of the host's clock."""


class StepTimer:
    """The parts of one step, in the order in which they end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before."""
        self._marks.append((part, mark_now(self._device)))

    @property
    def end(self) -> Mark:
        """The last mark."""
        return self._marks[-1][1]

    def seconds(self) -> dict[str, float]:
        """Seconds of each part; on a GPU only once the last mark has been passed."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] += seconds_between(before, after)
        return found


def mark_now(device: torch.device) -> Mark:
    """The end of all work queued so far; on a CPU, now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(before: Mark, after: Mark) -> float:
    """Between two marks of one device that have both been passed."""
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event), "marks are of one kind"
    assert isinstance(after, torch.cuda.Event), "marks are of one kind"
    return before.elapsed_time(after) / 1e3


class TimeOfDay:
    """When marks were passed, by the host's clock, which knows a span: after the last kernel of a step was queued and
    before the step was read. Within it the device's clock decides, from the last mark that the span corrected."""

    def __init__(self, mark: Mark, at: float) -> None:
        """`at`: about when `mark` was passed."""
        self._known = mark, at

    def of(self, mark: Mark, span: tuple[float, float]) -> float:
        """When `mark`, which must be later than all marks before, was passed. Seconds since the epoch."""
        before, at = self._known
        counted = at + seconds_between(before, mark)
        found = min(max(counted, span[0]), span[1])
        if found != counted:
            self._known = mark, found
        return found
