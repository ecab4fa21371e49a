"""Validation while a run trains. What the held-out loss is: `zero2all.train.validate`."""

import math
from contextlib import nullcontext
from typing import Any

from zero2all.common.fault import fault_point
from zero2all.resilience.heartbeat import beat
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import HELD_OUT
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook, is_multiple
from zero2all.train.hooks.reports import RunLog
from zero2all.train.sanity import check_last_loss, risen_loss
from zero2all.train.state import TrainState
from zero2all.train.validate import Scores, all_rows, held_out_metrics, held_out_scores


class Validation(Hook):
    """The held-out loss, every `validation.every_steps`."""

    def __init__(self, context: RunContext, state: TrainState, log: RunLog) -> None:
        self._context, self._state, self._log = context, state, log
        self.scores: Scores = {}
        """Of the last validation, by channel."""
        self._validated_step: int | None = None
        self.lowest: tuple[int, float] | None = None
        """The step with the lowest held-out loss so far, and that loss."""
        self._above_lowest = 0  # validations in a row whose loss had risen

    def is_due(self, step: int) -> bool:
        """Whether to validate after `step`."""
        return is_multiple(step, self._context.config.validation.every_steps)

    def at_pause(self) -> None:
        """Validate and log. Called by every process."""
        context, config, state = self._context, self._context.config, self._state
        beat("validate", state.step)
        fault_point("validate", state.step)
        state.weights.wait()
        with nullcontext() if state.outer is None else state.outer.in_model():
            self.scores = held_out_scores(state.model, context.valid, config, context.world, state.pipeline)
            found = {} if context.objective is None else context.objective.held_out(state)
        self._validated_step = state.step
        self._log.values(self.losses | found)
        self._compare(state.step)
        self._log.steps.end_pause()

    @property
    def losses(self) -> dict[str, float]:
        """The last validation as metrics."""
        return held_out_metrics(self.scores)

    def _compare(self, step: int) -> None:
        """Note the lowest loss; say once that the loss rises, when two validations in a row are above it."""
        loss = all_rows(self.scores).get("loss", math.nan)
        if self.lowest is None or not loss >= self.lowest[1]:
            self.lowest = (step, loss) if math.isfinite(loss) else self.lowest
            self._above_lowest = 0
            return
        notes = risen_loss(self.lowest, loss)
        self._above_lowest = self._above_lowest + 1 if notes else 0
        if self._above_lowest == 2 and step < self._state.last_step:  # the end says it in any case
            self._log.warn(*notes)

    def details(self, step: int) -> dict[str, Any]:
        """For the manifest of the checkpoint of `step`: its scores, if it was validated."""
        together = all_rows(self.scores) if step == self._validated_step else {}
        is_finite = bool(together) and all(map(math.isfinite, together.values()))
        return {HELD_OUT: {**together, "channels": self.scores}} if is_finite else {}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`."""
        with reading_record(checkpoint):
            lowest = checkpoint.record.get("lowest_held_out")  # older checkpoints have none
            self.lowest = None if lowest is None else (int(lowest[0]), float(lowest[1]))

    def note_last_loss(self) -> None:
        """What the held-out loss at the planned end says; a rise is also shown on the board."""
        risen = risen_loss(self.lowest, self.losses.get("eval/valid/loss", math.nan))
        for note in risen:
            self._log.warn(note)
        self._log.say(*check_last_loss(self.losses, self._context.config, can_train_longer=not risen))
