"""Evaluates the checkpoints of a run as they are committed, in a process of its own beside training.

A checkpoint is done when its report lies in `runs/<name>/eval/`, which is written atomically. Whoever works on one
holds the claim on it (`train/checkpoints/retention.py`), so that several watchers share the work and retention does not
delete what is being read. A watcher that was killed leaves a stale claim and no report: the next one does that
checkpoint again. The figures go to the metrics before the report is written: those of a step that was done again stand
there twice, which every reader takes as one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.progress import say
from zero2all.evals.options import report_path, write_report
from zero2all.evals.report import figures
from zero2all.track.writer import MetricsWriter, has_finished
from zero2all.train.checkpoints.layout import checkpoint_folder, list_checkpoints, step_of
from zero2all.train.checkpoints.retention import claim_step

POLL_SECONDS = 5.0


@dataclass
class Watcher:
    """Evaluates the checkpoints of one run."""

    run: Path
    evaluate: Callable[[int], dict[str, Any]]
    """Loads the checkpoint of a step and returns its report."""
    is_wanted: Callable[[int], bool] = lambda _: True
    say: Callable[[str], None] = say
    poll_seconds: float = POLL_SECONDS
    is_done: Callable[[int], bool] | None = None
    """Whether a step has a report that will do; None: any report will."""
    on_report: Callable[[dict[str, Any]], Any] = lambda _: None
    """Called when a report has been written."""
    evaluated: list[int] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    """Steps that could not be evaluated, and why."""
    _by_others: set[int] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    """Steps that had a checkpoint when we looked."""
    _metrics: MetricsWriter | None = None
    """One file, made when the first row is to be written."""

    def watch(self, once: bool = False) -> None:
        """Evaluate what there is and what comes. Returns when training is done and nothing is left; with `once`, when
        nothing is left that no other watcher has claimed."""
        try:
            self._work(once)
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def _work(self, once: bool) -> None:
        is_waiting = False
        while True:
            has_ended = has_finished(self.run)  # asked before looking: no checkpoint is committed after the end
            left = self._left()
            if any(self._try(step) for step in left):
                is_waiting = False
                continue
            left = [step for step in left if step not in self.left_out]
            if once or (has_ended and not left):
                break
            if not is_waiting:
                self.say(f"waiting for another watcher at step {left[0]}" if left else "waiting for a checkpoint")
            is_waiting = True
            time.sleep(self.poll_seconds)

    def _left(self) -> list[int]:
        """Checkpoints that are to be evaluated, oldest first: the oldest is the next to be deleted."""
        steps = sorted(step_of(folder) for folder in list_checkpoints(self.run))
        dealt_with = {*self.left_out, *self.evaluated, *self._by_others}
        for step in sorted(self._seen - {*steps, *dealt_with}):
            if not self._done(step):
                self._name(step, "its checkpoint was deleted or moved before it was evaluated")
        self._seen.update(step for step in steps if self.is_wanted(step))
        return [step for step in steps if self.is_wanted(step) and step not in dealt_with and not self._done(step)]

    def _done(self, step: int) -> bool:
        is_done = report_path(self.run, step).is_file() if self.is_done is None else self.is_done(step)
        if is_done:
            self._by_others.add(step)  # a report stays: it need not be read again at every look
        return is_done

    def _try(self, step: int) -> bool:
        """Evaluate one checkpoint; False when another watcher has it, or it is left out."""
        with claim_step(self.run, step) as claim:
            if claim is None:
                return False
            if self._done(step):  # by another watcher, since we looked
                return True
            started = time.monotonic()
            try:
                report = self.evaluate(step)
            except Exception as error:
                self._leave_out(step, error)
                return False
            if not claim.is_held():
                self.say(f"step {step}: another watcher has taken over this step; the result found here is dropped")
                return True
            self._metrics = self._metrics or MetricsWriter(self.run, writer="eval")
            self._metrics.log(figures(report), report["step"], report.get("tokens", 0))
            write_report(report_path(self.run, report["step"]), report, self.say)
            self.evaluated.append(step)
            self.on_report(report)
            self.say(f"step {step}: evaluated in {time.monotonic() - started:.1f} s")
            return True

    def _leave_out(self, step: int, error: Exception) -> None:
        """A checkpoint that is gone or damaged ends nothing; any other error is for the caller."""
        if not checkpoint_folder(self.run, step).is_dir():
            reason = "its checkpoint was deleted or moved while it was being read"
        elif isinstance(error, BadInputError):
            reason = str(error)
        else:
            raise error
        self._name(step, reason)

    def _name(self, step: int, reason: str) -> None:
        self.left_out[step] = reason
        self.say(f"step {step} is left out: {reason}")
