"""Where a run reports: metric rows and events for the run's folder, lines and a progress bar for the terminal.

Only rank 0 has metrics and a terminal. A terminal that is gone never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from zero2all.common import progress
from zero2all.parallel.world import World
from zero2all.track.writer import Run
from zero2all.train.state import TrainState


class RunLog:
    """The log of one process. Rows and events carry the step at which the run stands."""

    _bar: progress.Bar
    _shown_tokens: int

    def __init__(self, state: TrainState, world: World, metrics: Run | None, say: Callable[[str], None]) -> None:
        self._state, self._world, self._metrics, self._say = state, world, metrics, say

    def values(self, values: Mapping[str, Any]) -> None:
        """One row of metrics."""
        if self._metrics is not None:
            self._metrics.log(values, self._state.step, self._state.tokens)

    def event(self, kind: str, data: dict[str, Any], step: int | None = None) -> None:
        """One event, of this step unless another is named."""
        if self._metrics is not None:
            self._metrics.event(kind, self._state.step if step is None else step, data)

    def say(self, *lines: str) -> None:
        """Lines for the person who watches."""
        for line in lines:
            with suppress(OSError):
                self._say(line)

    def warn(self, problem: str, advice: str = "") -> None:
        """A warning as an event and on the terminal; `advice` is added on the terminal only."""
        self.event("warning", {"problem": problem})
        self.say(problem + advice)

    def warn_from_any_rank(self, problem: str) -> None:
        """The same from any process: those without metrics print it, too."""
        self.event("warning", {"problem": problem})
        progress.say(problem if self._world.size == 1 else f"rank {self._world.rank}: {problem}")

    @contextmanager
    def progress_bar(self, total_tokens: int) -> Iterator[None]:
        """Show a bar while the block runs."""
        self._shown_tokens, quiet = self._state.tokens, not self._world.is_first
        with progress.progress("train", total_tokens, "tok", done=self._shown_tokens, quiet=quiet) as self._bar:
            yield

    def show_progress(self, tokens: int, note: str) -> None:
        """Move the bar to `tokens`."""
        with suppress(OSError):
            self._bar.advance(tokens - self._shown_tokens, note=note)
        self._shown_tokens = tokens

    def set_total(self, total_tokens: int) -> None:
        """The run ends elsewhere than expected."""
        with suppress(OSError):
            self._bar.set_total(total_tokens)
