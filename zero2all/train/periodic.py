"""What a run does periodically: validate, save a checkpoint, log update ratios. One small object each.

The loop asks `is_due` and decides the order; garbage collection (`zero2all.train.garbage`) has its own file.
"""

from __future__ import annotations

from zero2all.train.anneal import anneal_values
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.run_lock import RunLock
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.checkpoints.writer import SaveResult, SaveTicket
from zero2all.train.control import Control
from zero2all.train.ratios import UpdateRatios
from zero2all.train.run_log import RunLog
from zero2all.train.setup import Prepared
from zero2all.train.validate import held_out_losses


def is_due(step: int, every_steps: int) -> bool:
    """Whether `step` is a multiple of `every_steps`; 0 means never."""
    return every_steps > 0 and step % every_steps == 0


class Validation:
    """The held-out loss, every `eval.every_steps`."""

    def __init__(self, prepared: Prepared, log: RunLog) -> None:
        self._prepared, self._log = prepared, log
        self.losses: dict[str, float] = {}
        """Of the last validation."""

    def is_due(self, step: int) -> bool:
        """Whether to validate after `step`."""
        return is_due(step, self._prepared.config.eval.every_steps)

    def run(self) -> None:
        """Validate and log. Called by every process."""
        prepared, config = self._prepared, self._prepared.config
        self.losses = held_out_losses(prepared.state.model, prepared.valid, config.data, config.eval, prepared.world)
        self._log.values(self.losses)


class UpdateRatioLog:
    """How far a step moves the weights, every `track.update_ratios_every_steps`."""

    def __init__(self, prepared: Prepared, log: RunLog) -> None:
        self._state, self._world, self._log = prepared.state, prepared.world, log
        self._every_steps = prepared.config.track.update_ratios_every_steps
        self._ratios: UpdateRatios | None = None

    def before_step(self) -> None:
        """Keep a sample of the weights when the next step is due."""
        self._ratios = UpdateRatios(self._state) if is_due(self._state.step + 1, self._every_steps) else None

    def after_step(self) -> None:
        """Compare and log. Called by every process."""
        if self._ratios is not None:
            self._log.values(self._ratios.after(self._world))
        self._ratios = None


class CheckpointSaver:
    """Checkpoints, every `checkpoint.every_steps`; they are written in the background."""

    def __init__(
        self, prepared: Prepared, store: CheckpointStore, control: Control, lock: RunLock, log: RunLog
    ) -> None:
        self._prepared, self._store, self._control = prepared, store, control
        self._lock, self._log = lock, log

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`."""
        return is_due(step, self._prepared.config.checkpoint.every_steps)

    def save(self, stage: str, wait: bool = False) -> SaveTicket:
        """Begin to save the state, or with `wait` finish saving it."""
        state, details = self._prepared.state, self._prepared.details
        document = {
            **state.counters(),
            "guards": self._control.state(),
            "anneal": anneal_values(self._prepared.anneal),
            "stage": stage,
        }
        doubt = self._control.doubt()
        if doubt is not None:
            details[NOT_GOOD] = doubt
        with state.tensors() as tensors:
            ticket = self._store.save(state.step, Snapshot(tensors, document), details, wait=wait)
        if ticket.result is None or ticket.result.folder is not None:
            self._control.saved()
        return ticket

    def save_now(self, stage: str) -> None:
        """Save and wait; a save that fails ends the run."""
        ticket = self.save(stage, wait=True)
        self.report_finished()
        self._prepared.world.run_on_rank0(self._lock.check)  # another writer of the run is not a problem of the disk
        ticket.folder()

    def report_finished(self) -> None:
        """Log the saves that finished since the last call."""
        for result in self._store.poll():
            self._report(result)

    def _report(self, result: SaveResult) -> None:
        facts = {
            "folder": result.folder.name if result.folder else None,
            "problem": result.problem,
            "stall_seconds": result.stall_seconds,
            "seconds": result.write_seconds,
            "ended_at": result.ended_at,
            "bytes": result.total_bytes,
            "deleted": result.deleted_steps,
            "notes": result.notes,
        }
        self._log.event("checkpoint" if result.folder else "checkpoint_failed", facts, result.step)
        if result.problem and not result.was_skipped and self._lock.is_held():
            self._log.say(f"The checkpoint of step {result.step} was not saved: {result.problem}. Training goes on.")
