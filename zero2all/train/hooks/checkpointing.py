"""What a run does besides its steps: validate, save, log update ratios, watch its folder.

One small object each; the loop asks `is_due` and decides the order.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError
from zero2all.common.files import write_atomic
from zero2all.model.config import ParameterKind
from zero2all.packed.loader import rank_rows
from zero2all.parallel.layout import layout_table
from zero2all.parallel.world import World
from zero2all.train.anneal import ANNEAL_FILE
from zero2all.train.checkpoints.checks import ReplicasDifferError
from zero2all.train.checkpoints.commit import SaveResult, SaveTicket
from zero2all.train.checkpoints.manifest import HELD_OUT, NOT_GOOD
from zero2all.train.checkpoints.run_lock import RunLock
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.hooks.guards import Control
from zero2all.train.hooks.reports import RunLog
from zero2all.train.sanity import risen_loss
from zero2all.train.setup import Prepared
from zero2all.train.state import TrainState
from zero2all.train.step_stats import StepResult
from zero2all.train.validate import Scores, all_rows, held_out_metrics, held_out_scores

MOST_SAMPLED_VALUES = 1 << 16
"""Of one parameter, for its update ratio."""
CLEARLY_FURTHER = 10.0
"""How many times further than the others a rank's value must be to be called the wrong one."""
WATCH_SECONDS = 0.5


def is_due(step: int, every_steps: int) -> bool:
    """Whether `step` is a multiple of `every_steps`; 0 means never."""
    return every_steps > 0 and step % every_steps == 0


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


class Validation:
    """The held-out loss, every `eval.every_steps`."""

    def __init__(self, prepared: Prepared, log: RunLog) -> None:
        self._prepared, self._log = prepared, log
        self.scores: Scores = {}
        """Of the last validation, by channel."""
        self._validated_step: int | None = None
        self.lowest: tuple[int, float] | None = None
        """The step with the lowest held-out loss so far, and that loss."""
        self._above_lowest = 0  # validations in a row whose loss had risen

    def is_due(self, step: int) -> bool:
        """Whether to validate after `step`."""
        return is_due(step, self._prepared.config.eval.every_steps)

    def run(self) -> None:
        """Validate and log. Called by every process."""
        prepared, config, state = self._prepared, self._prepared.config, self._prepared.state
        state.weights.synchronize()
        with nullcontext() if state.outer is None else state.outer.in_model():
            self.scores = held_out_scores(
                state.model, prepared.valid, config.data, config.eval, prepared.world, config.parallel, state.pipeline
            )
        self._validated_step = state.step
        self._log.values(self.losses)
        self._compare(state.step)

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
        if self._above_lowest == 2 and step < self._prepared.last_step:  # the end says it in any case
            self._log.warn(*notes)

    def details(self, step: int) -> dict[str, Any]:
        """For the manifest of the checkpoint of `step`: its scores, if it was validated."""
        together = all_rows(self.scores) if step == self._validated_step else {}
        is_finite = bool(together) and all(map(math.isfinite, together.values()))
        return {HELD_OUT: {**together, "channels": self.scores}} if is_finite else {}


class UpdateRatios:
    """How far a step moves the weights, every `track.update_ratios_every_steps`.

    The length of the update over that of the weights, per kind of parameter: about 1e-3 is healthy for matrices under
    AdamW. Computed from every n-th value before and after the update; the result stays on the device.
    """

    def __init__(self, state: TrainState, world: World, log: RunLog | None = None, every_steps: int = 1) -> None:
        self._state, self._world, self._log, self._every_steps = state, world, log, every_steps
        self._before: dict[ParameterKind, Tensor] | None = None

    def before_step(self) -> None:
        """Keep a sample of the weights when the next step is due."""
        self._before = self._samples() if is_due(self._state.step + 1, self._every_steps) else None

    @torch.no_grad()
    def after_step(self) -> dict[str, Tensor]:
        """Compare and log `update_ratio/<kind>`, where it is due. Called by every process."""
        before, self._before = self._before, None
        if before is None:
            return {}
        now = self._samples()
        kinds = sorted({one.kind for one in layout_table(self._state.model.config)})  # also those of other stages
        sums = torch.zeros(len(kinds), 2, dtype=torch.float64, device=self._world.device)
        for at, kind in enumerate(kinds):
            if kind in now:
                moved = (now[kind] - before[kind]).square().sum()
                sums[at] = torch.stack((moved, before[kind].square().sum()))
        moved, lengths = self._world.mesh.world.sum(sums).unbind(1)
        ratios = (moved / lengths.clamp(min=1e-30)).sqrt()
        values = {f"update_ratio/{kind}": ratio for kind, ratio in zip(kinds, ratios, strict=True)}
        if self._log is not None:
            self._log.values(values)
        return values

    @torch.no_grad()
    def _samples(self) -> dict[ParameterKind, Tensor]:
        samples = self._state.weights.master_samples(MOST_SAMPLED_VALUES)
        kinds = {one.name: one.kind for one in layout_table(self._state.model.config)}
        found: dict[ParameterKind, list[Tensor]] = {}
        for name, values in samples.items():
            found.setdefault(kinds[name], []).append(values.double())
        return {kind: torch.cat(parts) for kind, parts in found.items()}


class CheckpointSaver:
    """Checkpoints, every `checkpoint.every_steps`; they are written in the background."""

    def __init__(
        self,
        prepared: Prepared,
        store: CheckpointStore,
        control: Control,
        validation: Validation,
        lock: RunLock,
        log: RunLog,
    ) -> None:
        self._prepared, self._store, self._control, self._validation = prepared, store, control, validation
        self._lock, self._log = lock, log
        self._memory_steps = 0

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`."""
        return is_due(step, self._prepared.config.checkpoint.every_steps)

    def _record(self, stage: str) -> dict[str, Any]:
        state, anneal = self._prepared.state, self._prepared.anneal
        record = {
            **state.counters(),
            "guards": self._control.state(),
            "anneal": asdict(anneal) if anneal else None,
            "stage": stage,
            "lowest_held_out": self._validation.lowest,
        }
        if state.outer is not None:
            state.outer.settle()
            record["outer"] = state.outer.record()
        return record

    def prepare_memory(self, stage: str) -> None:
        """Make room for checkpoints in memory, where some will be made; without room there are none."""
        config, state, memory = self._prepared.config, self._prepared.state, self._store.memory
        every = config.resilience.memory_steps(config.checkpoint.every_steps, self._prepared.on_cpu)
        if (
            memory is None
            or not every
            or state.outer is not None
            or state.step // every == (self._prepared.last_step - 1) // every
        ):
            return
        with state.tensors() as tensors:
            problem = self._store.prepare_memory(tensors)
        if problem is not None:
            self._store.memory = None
            self._log.warn(f"no checkpoints in memory: {problem}. A restart continues from the disk.")
            return
        self._memory_steps = every
        if self._prepared.checkpoint is not None and self._prepared.checkpoint.in_memory:
            self.save_to_memory(stage)  # with another number of processes the buffers are new ones

    def is_due_in_memory(self, step: int) -> bool:
        """Whether to save to memory after `step`."""
        return is_due(step, self._memory_steps)

    def save_to_memory(self, stage: str) -> None:
        """Begin to save the state to memory."""
        if self._store.memory is None:
            return
        state, started = self._prepared.state, time.monotonic()
        with state.tensors() as tensors:
            snapshot = Snapshot(tensors, self._record(stage))
            done, bad = self._store.save_to_memory(state.step, snapshot, self._details())
        state.copied = None if isinstance(done, bool) else done
        problem = bad or self._store.memory.problem
        if problem is not None:
            self._log.warn_from_any_rank(f"a checkpoint in memory was not saved: {problem}")
        stall = "memory/checkpoint_stall" if done else "memory/checkpoint_skipped"
        self._log.values({stall: time.monotonic() - started})

    def compare_replicas(self) -> None:
        """Stop the run when replicas differ."""
        with self._prepared.state.tensors() as tensors:
            self._store.check_replicas(tensors)

    def save(self, stage: str, wait: bool = False) -> SaveTicket:
        """Begin to save the state, or with `wait` finish saving it."""
        state, record = self._prepared.state, self._record(stage)
        with state.tensors() as tensors:
            return self._store.save(state.step, Snapshot(tensors, record), self._details(), wait=wait)

    def _details(self) -> dict[str, Any]:
        """What the manifest holds in addition to the state: also its held-out loss, where it was validated, and why it
        is not good, if there is doubt."""
        step = self._prepared.state.step
        doubt = self._control.doubt(step)
        return self._prepared.details | self._validation.details(step) | ({} if doubt is None else {NOT_GOOD: doubt})

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
            self._log.say(f"The checkpoint of step {result.step} was not saved: {result.problem}. Training continues.")


class ReplicaDoubt:
    """After replicas have differed at a step, the run goes on from a checkpoint before it. When it reaches that step
    again, its bits say which rank had been wrong; of two replicas nothing else does. If the flipped weight has changed
    the steps of all ranks since, none has these bits, and the one that was much further away was wrong."""

    def __init__(self, prepared: Prepared, store: CheckpointStore, log: RunLog) -> None:
        self._prepared, self._store, self._log = prepared, store, log
        self._path = prepared.run / "replicas.json"
        self._said: dict[str, Any] = prepared.world.run_on_rank0(self._read)

    def _read(self) -> dict[str, Any]:
        try:
            said: dict[str, Any] = jsonio.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        is_of_these = len(said.get("digests", ())) == self._prepared.world.size and "values" in said
        return said if is_of_these else {}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the ranks held when their replicas differ in the block."""
        try:
            yield
        except ReplicasDifferError as error:
            if self._prepared.world.is_first:
                values = {"step": self._prepared.state.step, "digests": error.digests}
                values |= {"key": error.key, "at": error.at, "values": [str(each) for each in error.values]}
                write_atomic(self._path, jsonio.dumps_pretty(values))
            raise

    def look(self, step: int) -> None:
        """Name the rank, where `step` is the one at which the replicas differed."""
        if self._said.get("step") != step:
            return
        said, self._said = self._said, {}
        with self._prepared.state.tensors() as tensors:
            wrong = self._store.wrong_replicas(tensors, said["digests"])
            right = self._store.value_at(tensors, said["key"], said["at"])
        away = [abs(float(value) - right) for value in said["values"]]
        if self._prepared.world.is_first:
            self._path.unlink(missing_ok=True)
        if 0 < len(wrong) < self._prepared.world.size:
            ranks = ", ".join(map(str, wrong))
            self._log.warn(f"step {step} was computed again: rank {ranks} had other bits before, so it was wrong then")
        elif len(away) == self._prepared.world.size and max(away) > CLEARLY_FURTHER * sorted(away)[-2]:
            rank = away.index(max(away))
            self._log.warn(
                f"step {step} was computed again: value {said['at']} of {said['key']} is {right:g}, rank {rank} had "
                f"{said['values'][rank]}, which is the furthest from it, so rank {rank} was wrong then"
            )
        else:
            self._log.warn(f"step {step} was computed again: which of the ranks had been wrong cannot be told")


class FolderWatch:
    """What others change in the run's folder: a request to anneal, the lock of a run that was taken over.

    Rank 0 looks. While it waits for a slow network disk all others would wait for it, so of several processes a thread
    looks, every WATCH_SECONDS.
    """

    def __init__(self, prepared: Prepared, lock: RunLock) -> None:
        self._prepared, self._lock = prepared, lock
        self._request = prepared.run / ANNEAL_FILE
        self.found = False
        """Whether there was something when rank 0 last looked."""

    def look(self) -> bool:
        """Look now."""
        self.found = self._is_anneal_requested() or not self._lock.is_held()
        return self.found

    def _is_anneal_requested(self) -> bool:
        try:
            return self._prepared.anneal is None and self._request.exists()
        except OSError:  # of the disk; the next look may succeed
            return False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let a thread look while the block runs, on rank 0 of several processes."""
        world = self._prepared.world
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
            self.look()
