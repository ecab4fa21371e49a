"""Wrong bits of a faulty machine: replicas are compared, and some steps are computed twice."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError
from zero2all.common.files import write_atomic
from zero2all.packed.loader import Batch, rank_rows
from zero2all.train.checkpoints.checks import ReplicasDifferError
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook, is_multiple
from zero2all.train.hooks.reports import RunLog
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep, StepResult
from zero2all.train.train_step import StepPlan, train_step

CLEARLY_FURTHER = 10.0
"""How many times further than the others a rank's value must be to be called the wrong one."""


class ReplicaCheck(Hook):
    """Replicas are compared every `resilience.replica_check_every_steps`, and before every save.

    After replicas have differed at a step, the run goes on from a checkpoint before it. When it reaches that step
    again, its bits say which rank had been wrong; of two replicas nothing else does. If the flipped weight has changed
    the steps of all ranks since, none has these bits, and the one that was much further away was wrong.
    """

    def __init__(
        self, context: RunContext, state: TrainState, log: RunLog, saves: Callable[[int], bool] = lambda _step: False
    ) -> None:
        """`saves`: whether a checkpoint is saved after a step, which compares them too."""
        self._context, self._state, self._log, self._saves = context, state, log, saves
        self._world, self._store = context.world, context.store
        self._path = context.run / "replicas.json"
        self._said: dict[str, Any] = self._world.run_on_rank0(self._read)

    def _read(self) -> dict[str, Any]:
        try:
            said: dict[str, Any] = jsonio.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        is_of_these = len(said.get("digests", ())) == self._world.size and "values" in said
        return said if is_of_these else {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep what the ranks held when their replicas differ in the block."""
        try:
            yield
        except ReplicasDifferError as error:
            if self._world.is_first:
                values = {"step": self._state.step, "digests": error.digests}
                values |= {"key": error.key, "at": error.at, "values": [str(each) for each in error.values]}
                write_atomic(self._path, jsonio.dumps_pretty(values))
            raise

    def is_due(self, step: int) -> bool:
        """Whether to compare after `step`, or to find out who was wrong at it."""
        compares = is_multiple(step, self._context.config.resilience.replica_check_every_steps)
        return compares or self._said.get("step") == step

    def at_pause(self) -> None:
        """Stop the run when replicas differ."""
        self._name_wrong_rank()
        step = self._state.step
        is_due = is_multiple(step, self._context.config.resilience.replica_check_every_steps)
        if is_due and not self._saves(step):
            with self._state.tensors() as tensors:
                self._store.check_replicas(tensors)

    def at_end(self) -> None:
        """The last step may be the one at which they differed."""
        self._name_wrong_rank()

    def _name_wrong_rank(self) -> None:
        """Name the rank, where this step is the one at which the replicas differed."""
        step = self._state.step
        if self._said.get("step") != step:
            return
        said, self._said = self._said, {}
        with self._state.tensors() as tensors:
            wrong = self._store.wrong_replicas(tensors, said["digests"])
            right = self._store.value_at(tensors, said["key"], said["at"])
        away = [abs(float(value) - right) for value in said["values"]]
        if self._world.is_first:
            self._path.unlink(missing_ok=True)
        if 0 < len(wrong) < self._world.size:
            ranks = ", ".join(map(str, wrong))
            self._log.warn(f"step {step} was computed again: rank {ranks} had other bits before, so it was wrong then")
        elif len(away) == self._world.size and max(away) > CLEARLY_FURTHER * sorted(away)[-2]:
            rank = away.index(max(away))
            self._log.warn(
                f"step {step} was computed again: value {said['at']} of {said['key']} is {right:g}, rank {rank} had "
                f"{said['values'][rank]}, which is the furthest from it, so rank {rank} was wrong then"
            )
        else:
            self._log.warn(f"step {step} was computed again: which of the ranks had been wrong cannot be told")


class Rerun(Hook):
    """One step out of every `resilience.rerun_every_steps`, drawn at random, is computed twice."""

    def __init__(self, context: RunContext, state: TrainState) -> None:
        self._context, self._state = context, state
        self._first: StepResult | None = None

    def before_step(self, batch: Batch, plan: StepPlan) -> None:
        """Compute everything but the update, where the step is one of them."""
        config, world, state = self._context.config, self._context.world, self._state
        self._first = None
        if is_rerun(state.step + 1, config.resilience.rerun_every_steps, config.train.seed):
            plan = dataclasses.replace(plan, is_rerun=True)
            self._first = train_step(state, batch, len(state.data.channels), config, world, plan).result()

    def after_step(self, pending: PendingStep) -> None:
        """Compare the second time with the first."""
        if self._first is not None:
            check_rerun(self._first, pending.result(), self._context.world.mesh.batch.size)


def is_rerun(step: int, every_steps: int, seed: int) -> bool:
    """Whether `step` is computed twice: one step out of every `every_steps`, drawn at random."""
    if not every_steps:
        return False
    window, place = divmod(step - 1, every_steps)
    return place == random.Random(f"{seed}/{window}").randrange(every_steps)


def check_rerun(first: StepResult, second: StepResult, batch_ranks: int) -> None:
    """AnomalyError when two computations of a step differ in a bit; it names the ranks whose rows differ."""
    rows = len(first.row_nats)
    differs = first.row_nats.view(np.uint64) != second.row_nats.view(np.uint64)
    wrong = []
    for rank in range(batch_ranks):
        start, count, _ = rank_rows(rows, rank, batch_ranks)
        wrong += [f"the loss of batch rank {rank}"] if differs[start : start + count].any() else []
    values = ((first.loss, second.loss, "the loss"), (first.grad_norm, second.grad_norm, "the gradient norm"))
    wrong = wrong or [name for one, other, name in values if np.float64(one).tobytes() != np.float64(other).tobytes()]
    if wrong:
        raise AnomalyError(
            f"Step {second.step} was computed twice from the same state and the same data, and the results differ in "
            f"{', '.join(wrong)}. This state was not saved. Memory or a GPU of that rank is faulty, or an operator is "
            f"not bit-exact: run the same command again to continue from the newest checkpoint, and exclude the "
            f"machine if it happens again."
        )
