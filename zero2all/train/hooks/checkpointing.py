"""When a run saves, and what a checkpoint holds besides the state. How it is written: `zero2all.train.checkpoints`."""

import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from zero2all.common.errors import PreemptedError
from zero2all.common.manifest import fingerprint
from zero2all.config import config_values
from zero2all.resilience.heartbeat import beat
from zero2all.train.checkpoints.commit import SaveResult, SaveTicket
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook, is_multiple
from zero2all.train.hooks.guards import Guards
from zero2all.train.hooks.reports import RunLog
from zero2all.train.hooks.shard_check import ShardCheck
from zero2all.train.hooks.validation import Validation
from zero2all.train.state import TrainState
from zero2all.train.step_stats import StepResult


class Checkpointing(Hook):
    """Checkpoints on disk, every `checkpoint.every_steps`, and in memory; they are written in the background. A signal
    to stop is carried out here too: the run saves and ends."""

    def __init__(
        self, context: RunContext, state: TrainState, log: RunLog, guards: Guards, validation: Validation
    ) -> None:
        self._context, self._state, self._log = context, state, log
        self._store, self._guards, self._validation = context.store, guards, validation
        self.shard_check = ShardCheck(context, state, log)
        self._memory_steps = 0
        self._stop_requested = False
        """Whether any process was asked to stop, by the steps read so far; the same in every process."""

    def running(self) -> AbstractContextManager[object]:
        """Shards are checked in the background: what was trained on a damaged one is not saved."""
        return self.shard_check.running()

    def after_result(self, result: StepResult, _data_seconds: float) -> None:
        """Learn whether a process was asked to stop."""
        self._stop_requested |= result.stop_requested

    def saves(self, step: int) -> bool:
        """Whether to save after `step`, to disk or to memory."""
        every = self._context.config.checkpoint.every_steps
        return is_multiple(step, every) or is_multiple(step, self._memory_steps)

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`, or to end."""
        return self._stop_requested or self.saves(step)

    def at_pause(self) -> None:
        """Begin to save the state."""
        if self._stop_requested:
            self._preempt()
        if not is_multiple(self._state.step, self._context.config.checkpoint.every_steps):
            self.save_to_memory()
            return
        self.shard_check.stop_if_found()
        beat("save", self._state.step)
        self._save()
        self._log.steps.end_pause()

    def _preempt(self) -> None:
        """End the run because a signal asked for it, after saving where the config says so."""
        self.shard_check.stop_if_found()
        saves = self._context.config.resilience.save_on_signal
        if saves:
            self.save_now()
        self._log.event("preempted", {"saved": saves})
        step, name = self._state.step, self._context.config.train.name
        if not saves:
            raise PreemptedError(
                f"Training of `{name}` was stopped without a save (resilience.save_on_signal is false). Run the same "
                f"command again to continue from the last checkpoint."
            )
        raise PreemptedError(
            f"Training of `{name}` was stopped and saved at step {step}. Run the same command again to continue."
        )

    def _record(self) -> dict[str, Any]:
        state, anneal = self._state, self._state.anneal
        record = {
            **state.counters(),
            "guards": self._guards.state(),
            "anneal": asdict(anneal) if anneal else None,
            "stage": state.stage,
            "lowest_held_out": self._validation.lowest,
        }
        if state.outer is not None:
            state.outer.settle()
            record["outer"] = state.outer.record()
        return record

    def prepare_memory(self) -> None:
        """Make room for checkpoints in memory, where some will be made; without room there are none."""
        config, state, memory = self._context.config, self._state, self._store.memory
        every = config.resilience.memory_steps(config.checkpoint.every_steps, self._context.on_cpu)
        if (
            memory is None
            or not every
            or state.outer is not None
            or state.step // every == (state.last_step - 1) // every
        ):
            return
        with state.tensors() as tensors:
            problem = self._store.prepare_memory(tensors)
        if problem is not None:
            self._store.memory = None
            self._log.warn(f"no checkpoints in memory: {problem}. A restart continues from the disk.")
            return
        self._memory_steps = every
        if self._context.checkpoint is not None and self._context.checkpoint.in_memory:
            self.save_to_memory()  # with another number of processes the buffers are new ones

    def save_to_memory(self) -> None:
        """Begin to save the state to memory."""
        if self._store.memory is None:
            return
        state, started = self._state, time.monotonic()
        with state.tensors() as tensors:
            snapshot = Snapshot(tensors, self._record())
            done, bad = self._store.save_to_memory(state.step, snapshot, self._details())
        state.copied = None if isinstance(done, bool) else done
        problem = bad or self._store.memory.problem
        if problem is not None:
            self._log.warn_from_any_rank(f"a checkpoint in memory was not saved: {problem}")
        stall = "memory/checkpoint_stall" if done else "memory/checkpoint_skipped"
        self._log.values({stall: time.monotonic() - started})

    def _save(self, wait: bool = False) -> SaveTicket:
        """Begin to save the state, or with `wait` finish saving it."""
        state, record = self._state, self._record()
        with state.tensors() as tensors:
            return self._store.save(state.step, Snapshot(tensors, record), self._details(), wait=wait)

    def _details(self) -> dict[str, Any]:
        """What the manifest holds in addition to the state: the data and its order, the machine, the operators, the
        held-out loss where it was validated, and why it is not good, if there is doubt."""
        step, data = self._state.step, self._state.data
        doubt = self._guards.doubt(step)
        return {
            "inputs": fingerprint(config_values(self._context.config)),
            "data": data.fingerprint,
            "order": data.record,
            "tokenizer": data.splits[0].manifest["tokenizer"],
            "environment": self._context.environment,
            "ops": {choice.operator: asdict(choice) for choice in self._state.model.ops.choices},
            **self._validation.details(step),
            **({} if doubt is None else {NOT_GOOD: doubt}),
        }

    def save_now(self) -> None:
        """Save and wait; a save that fails ends the run."""
        beat("save", self._state.step)
        ticket = self._save(wait=True)
        self.report_finished()
        self._context.world.run_on_rank0(self._store.fence)  # another writer of the run is not a problem of the disk
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
        if result.problem and not result.was_skipped and self._context.holds_lock():
            self._log.say(f"The checkpoint of step {result.step} was not saved: {result.problem}. Training continues.")
