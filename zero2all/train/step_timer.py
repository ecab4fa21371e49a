"""Where the time of a step goes, and garbage collection that does not fall into the middle of one."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

PARTS = ("collate", "forward", "loss", "backward", "reduce", "optimizer")
"""Of every step; that of a pipeline also has "bubble", the waits for other stages."""

Mark = torch.cuda.Event | float
"""A point in time: an event in the stream of a GPU, or a reading of the host's clock."""
COLLECT_STEPS = 1000
MOST_MARKS = 1_000_000


class StepTimer:
    """Where the time of a step goes: its parts, in the order in which they end.

    On a GPU the marks are events in the stream: nothing waits for them, and they are read long after the step. Parts
    are measured back to back, so they add up to the step; of a part that the host prepared while the device was busy,
    only the time that the device waited is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.number: int = _recent[-1].number + 1 if _recent else 0
        _recent.append(self)
        self._marks: list[tuple[str, Mark]] = []
        self.mark("")

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before."""
        self._marks.append((part, mark_now(self._device)))

    def unfinished(self) -> tuple[int, str] | None:
        """How many marks the device has passed, and the part that ends at the next one; None: all."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the thread that asks would use the first GPU
        for place, (part, mark) in enumerate(self._marks):
            if not isinstance(mark, float) and not mark.query():
                return MOST_MARKS * self.number + place, part
        return None

    @property
    def end(self) -> Mark:
        """The last mark."""
        return self._marks[-1][1]

    def seconds(self) -> dict[str, float]:
        """Seconds of each part; on a GPU only once the last mark has been passed."""
        found = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            found[part] = found.get(part, 0.0) + seconds_between(before, after)
        return found


_recent: deque[StepTimer] = deque(maxlen=2)
"""The host is at most one step ahead of the device."""


def unfinished_part() -> tuple[int, str] | None:
    """The first part of the last steps that the device has not finished, and a number that grows with its progress;
    None: all are finished, or there is no GPU. Asked when a process hangs, from another thread."""
    return next((found for timer in tuple(_recent) if (found := timer.unfinished()) is not None), None)


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


def bubble_share(seconds: Mapping[str, float]) -> float:
    """The share of the passes of a step that this process of a pipeline waited for others. Rank 0 has the first stage,
    which begins first and ends last, so that it sees the whole bubble."""
    parts = [seconds[name] for name in ("collate", "forward", "loss", "backward", "bubble")]
    return parts[-1] / max(sum(parts), 1e-9)


class TimeOfDay:
    """When marks were passed, by the host's clock. The host knows only that it was after the last kernel of the step
    was queued, and before the step was read. Within these bounds the device's clock, counted from the last mark,
    decides."""

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


@contextmanager
def scheduled_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Python's garbage collector on a schedule, the same on every rank, and not in the middle of a step.

    With a model and its graph a collection takes a tenth of a second, and of many ranks there is always one that
    collects while the others wait. So what exists before the first step is frozen, and the rest is collected every
    COLLECT_STEPS steps. Yields a function to call after every step.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def after_step(step: int) -> None:
        if step % COLLECT_STEPS == 0:
            gc.collect(1)

    try:
        yield after_step
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
