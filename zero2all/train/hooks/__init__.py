"""What a run does besides its steps: one hook each, called at the moments of `zero2all.train.trainer.Trainer.fit`."""

from contextlib import AbstractContextManager, nullcontext

from zero2all.packed.loader import Batch
from zero2all.train.step_stats import PendingStep, StepResult
from zero2all.train.train_step import StepPlan


class Hook:
    """When the trainer calls a hook. Every process calls all hooks in the order of the trainer's list; a hook overrides
    what it needs:

    running(                                             around all steps
      before_step(n)  after_step(n)  after_result(n)     for each step; on a GPU after_result(n) comes after
                                                         after_step(n + 1), because the host is one step ahead
      at_pause()                                         after steps for which is_due() of any hook is true
      apply_changes()                                    between two steps
    )  at_end()
    """

    def running(self) -> AbstractContextManager[object]:
        """Around all steps, for what goes on in the background."""
        return nullcontext()

    def before_step(self, batch: Batch, plan: StepPlan) -> None:
        """The next step is planned."""

    def after_step(self, pending: PendingStep) -> None:
        """A step is queued; the device may still compute it."""

    def after_skip(self) -> None:
        """A batch was skipped: only the step and the position in the data have advanced."""

    def after_result(self, result: StepResult, data_seconds: float) -> None:
        """A step was read, in order; on a GPU while the next one runs. `data_seconds`: how
        long the host waited for its data."""

    def is_due(self, _step: int) -> bool:
        """Whether the run pauses for this hook after this step: the device is waited for, and the step is read."""
        return False

    def at_pause(self) -> None:
        """The pause, unless it is the end of the run."""

    def apply_changes(self) -> bool:
        """Take up what has changed from outside. True: the run is elsewhere or ends elsewhere, so that the data must be
        opened again."""
        return False

    def at_end(self) -> None:
        """After the last step, which is validated and saved."""


def is_multiple(step: int, every_steps: int) -> bool:
    """Whether `step` is a multiple of `every_steps`; 0 means never."""
    return every_steps > 0 and step % every_steps == 0
