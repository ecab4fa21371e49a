"""What others change in the run's folder while it trains: a request to anneal, the lock of a run that was taken over.

Rank 0 looks. While it waits for a slow network disk all others would wait for it, so of several processes a thread
looks, every WATCH_SECONDS, and the stats of the next step tell the others.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from zero2all.common.errors import UsageError
from zero2all.config.schedule import steps_with_anneal
from zero2all.train.anneal import ANNEAL_FILE, anneal_from, anneal_in_words, is_requested, read_anneal, withdraw_request
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook
from zero2all.train.hooks.guards import Guards
from zero2all.train.hooks.reports import RunLog
from zero2all.train.run_data import data_with_anneal
from zero2all.train.state import TrainState
from zero2all.train.step_stats import StepResult

WATCH_SECONDS = 0.5


class Anneal(Hook):
    """Begins an anneal that was requested with `z2a anneal`: the run gets a new end. A lost lock is LostRunError, on
    every rank."""

    def __init__(self, context: RunContext, state: TrainState, log: RunLog, guards: Guards) -> None:
        self._context, self._state, self._log, self._guards = context, state, log, guards
        self.found = False
        """Whether there was something when rank 0 last looked."""
        self._has_news = False
        """Whether rank 0 said so in the steps read so far; the same in every process."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a thread look, on rank 0 of several processes."""
        world = self._context.world
        if world.size == 1 or not world.is_first:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="z2a-folder", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(WATCH_SECONDS)  # a disk that hangs must not hold up the end

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(WATCH_SECONDS):
            self._look()

    def _look(self) -> bool:
        self.found = self._is_requested() or not self._context.holds_lock()
        return self.found

    def _is_requested(self) -> bool:
        try:
            run, is_begun = self._context.run, self._state.anneal is not None
            return is_requested(run) if is_begun else (run / ANNEAL_FILE).exists()
        except OSError:  # of the disk; the next look may succeed
            return False

    def after_result(self, result: StepResult, _data_seconds: float) -> None:
        """Learn what rank 0 has found."""
        self._has_news |= result.folder_changed

    def has_news(self) -> bool:
        """Whether to see what is in the run's folder: the same in every process. One that is alone looks by itself;
        several are told by the stats, except after the last step, which no stats follow."""
        if self._context.world.size == 1:
            return self._look()
        return self._has_news or self._state.step == self._state.last_step

    def apply_changes(self) -> bool:
        """Begin an anneal, if one was requested."""
        if not self.has_news():
            return False
        self._has_news = self.found = False
        values, problem = self._context.world.run_on_rank0(self._read)
        if problem is not None:
            self._log.warn(problem, "\nTraining continues with its schedule.")
        if values is None:
            return False
        state, anneal = self._state, anneal_from(values)
        assert anneal is not None
        state.data = data_with_anneal(self._context.config, self._context.workspace, state, anneal)
        state.anneal, state.last_step = anneal, steps_with_anneal(self._context.config.train.steps, anneal)
        self._guards.read_from(state.data)
        if state.outer is not None:
            state.outer.end_at(state.last_step)
        self._log.set_total(state.tokens_at_end(self._context.config.train.tokens_per_step))
        self._log.event("anneal", values)
        self._log.say(anneal_in_words(anneal))
        return True

    def _read(self) -> tuple[dict[str, Any] | None, str | None]:
        """The anneal that was requested, or why it cannot be done."""
        self._context.store.fence()
        check = partial(data_with_anneal, self._context.config, self._context.workspace, self._state)
        try:
            found = read_anneal(self._context.run, self._state.step, check, self._state.anneal)
            if found == self._state.anneal:
                return None, None
            return None if found is None else asdict(found), None
        except UsageError as error:
            withdraw_request(self._context.run, self._state.anneal)
            return None, str(error)
