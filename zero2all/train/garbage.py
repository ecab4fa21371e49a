"""Python's garbage collector on a schedule, the same on every rank, and not in the middle of a step.

A collection visits every object of the program; with a model and its graph that takes a tenth of a second, and with
many ranks there is always one that collects while the others wait. So what exists before the first step is frozen, and
the rest is collected every EVERY_STEPS steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_STEPS = 1000


@contextmanager
def scheduled_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Yields a function to call after every step; after the block the collector is as before."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()

    def after_step(step: int) -> None:
        if step % EVERY_STEPS == 0:
            gc.collect(1)

    try:
        yield after_step
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
