"""The checkpoints of one run, for the training loop: save in the background, find the newest, delete old ones.

    store = CheckpointStore(run, group, Retention(keep_last=2))
    store.prepare(parts)                               # before step 0: plan, host memory
    found = store.newest(set_aside=True)
    if found: found.load_into(parts)
    ...
    store.save(step, Snapshot(parts, counters), details)
    for result in store.poll(): ...                    # every step: events
    store.close()

Methods that say so must be called by all ranks at the same point. When `save` has returned, the parts may change.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from zero2all.common import jsonio
from zero2all.common.errors import AnomalyError, BadInputError, UserError
from zero2all.common.peers import open_peers
from zero2all.parallel.parts import TensorPart
from zero2all.train.checkpoints.checks import box_digests, compare_replicas, first_damaged, value_at
from zero2all.train.checkpoints.commit import (
    SaveError,
    SaveResult,
    SaveTicket,
    Writer,
    bytes_needed,
    commit,
    lack_of_space,
)
from zero2all.train.checkpoints.find import Say, find_newest, move_damaged, open_at, say_aloud
from zero2all.train.checkpoints.layout import checkpoint_folder, list_checkpoints, note_latest, step_of
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.manifest import NOT_GOOD, OtherVersionError
from zero2all.train.checkpoints.memory import MemoryStore
from zero2all.train.checkpoints.planning import SaveLayout, plan_save, signature_of
from zero2all.train.checkpoints.retention import (
    Retention,
    VerifiedSteps,
    is_good,
    note_proven,
    pin,
    prune,
    sweep,
    withdraw_after,
)
from zero2all.train.checkpoints.run_lock import Fence, no_fence
from zero2all.train.checkpoints.snapshot import HostBuffers, PinnedBlock, Snapshot, Staged


@dataclass(frozen=True)
class SaveRules:
    """How checkpoints are written."""

    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does while the one before is still being written."""
    largest_file_bytes: int = 4 << 30
    peer_timeout_seconds: float = 1800.0


class CheckpointStore:
    """See the module docstring."""

    def __init__(
        self,
        run: Path,
        group: dist.ProcessGroup | None = None,
        retention: Retention | None = None,
        *,
        rules: SaveRules | None = None,
        fence: Fence = no_fence,
        say: Say = say_aloud,
    ) -> None:
        """All ranks of `group` (any backend; None for one process) create the store at the same point. Without
        `retention` nothing is deleted. `fence` is checked before anything is written, moved or deleted."""
        self.run = run
        self._retention = retention
        self._rules = rules or SaveRules()
        self.fence = fence
        self.peers = open_peers(group, self._rules.peer_timeout_seconds)  # for the caller's thread
        self._writing_peers = open_peers(group, self._rules.peer_timeout_seconds)  # for the writing thread
        self._say: Say = say if self.peers.is_first else lambda _text: None
        self._writer = Writer()
        self._layout: SaveLayout | None = None
        self._buffers: HostBuffers | None = None
        self._block: PinnedBlock | None = None
        self._verified = VerifiedSteps()
        self._is_good: dict[int, bool] = {}
        self._attempts = 0
        self.unchecked_since: int | None = None
        """The newest checkpoint up to this step is not deleted, while shards that were read since are unchecked."""
        self.memory: MemoryStore | None = None
        """Checkpoints in memory, where the run has them."""

    def prepare(self, parts: Mapping[str, TensorPart]) -> int:
        """Plan the saves of these parts and allocate host memory; returns the bytes of one checkpoint. Called by all
        ranks; all raise when their parts leave a hole or overlap. Without it, or when the parts are cut otherwise, the
        next save does it and takes longer."""
        self._writer.wait()
        self._release()
        layout = plan_save(parts, self.peers, self._rules.largest_file_bytes)
        self._buffers = HostBuffers(layout, self._block_for(parts))
        self._layout = layout
        return bytes_needed(layout)

    def sweep(self) -> list[str]:
        """Remove what killed saves have left; for the holder of the run's lock, on rank 0, before the first save."""
        self.fence()
        return sweep(self.run)

    def newest(self, set_aside: bool = False) -> Checkpoint | None:
        """The newest intact checkpoint, None when the run never had one; called by all ranks. One in memory is taken
        when it is newer than those on disk, which are not read then. See `find_newest`."""
        on_disk = self.peers.gather([step_of(folder) for folder in list_checkpoints(self.run)[:1]])[0]
        found = self.memory.newest(max(on_disk, default=-1)) if self.memory is not None else None
        if found is not None:
            return found
        try:
            found = find_newest(self.run, self.peers, self.fence if set_aside else None, self._say)
        except OtherVersionError:
            raise
        except BadInputError:  # none on disk is intact
            older = self.memory.newest(-1) if self.memory is not None else None
            if older is None:
                raise
            return older
        later = self.memory.newest(found.step) if self.memory is not None and found is not None else None
        if later is not None:  # than the newest that was not damaged
            return later
        if found is not None:
            self._verified.steps.add(found.step)
        return found

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of one step, verified; called by all ranks."""
        found = open_at(self.run, step, self.peers)
        self._verified.steps.add(step)
        return found

    def good_steps(self) -> list[int]:
        """The steps of good checkpoints, oldest first, without imported weights at step 0: they are not a state of the
        run. Waits for a save that is under way, or the answer would depend on the disk. Bytes are not checked here."""
        self._writer.wait()
        steps = sorted(filter(None, map(step_of, list_checkpoints(self.run))))
        for step in steps:
            if step not in self._is_good:  # a committed checkpoint never changes
                self._is_good[step] = is_good(checkpoint_folder(self.run, step))
        return [step for step in steps if self._is_good[step]]

    def opens(self, step: int) -> bool:
        """Whether the checkpoint of `step` is whole; a damaged one is set aside. Called by all ranks."""
        try:
            self.at(step)
        except OtherVersionError:
            raise
        except BadInputError as error:
            if self.peers.is_first:
                move_damaged(checkpoint_folder(self.run, step), str(error), self.fence, self._say)
            self._is_good.pop(step, None)
            return False
        return True

    def find_damage(self, parts: Mapping[str, TensorPart]) -> str | None:
        """What is wrong with a tensor on some rank, in words; None when nothing is. Called by all ranks."""
        return next((str(problem) for problem in self.peers.gather(first_damaged(parts)) if problem is not None), None)

    def go_back_to(self, step: int, reason: str) -> list[int]:
        """Pin the checkpoint of `step`, then move the newer ones to withdrawn/; called by all ranks. In this order: if
        the run is killed between, only the pin tells which one it rolled back to. Returns the steps that were moved."""
        self._writer.wait()
        self.peers.gather(None)  # no save is under way
        if self.memory is not None:
            self.memory.forget_after(step)
        self._is_good.clear()

        def move() -> list[int]:
            self.fence()
            if step:
                pin(self.run, step, "a rollback went back to it")
            note_proven(self.run, at_most=step)
            return withdraw_after(self.run, step, reason, self.fence)

        return self.peers.run_on_rank0(move)

    def save(self, step: int, snapshot: Snapshot, details: Mapping[str, Any], wait: bool = False) -> SaveTicket:
        """Save a snapshot; returns when its parts may change again, or, with `wait`, when it is committed.

        Called by all ranks with the same step. A failure is in the result and not raised, except ReplicasDifferError. A
        state that is not finite is not saved, a step that is committed already not changed.
        """
        started = time.monotonic()
        ticket = SaveTicket(step)
        try:
            agreed = self._agree(step, snapshot.parts, wait or self._rules.when_busy == "wait")
            if isinstance(agreed, SaveResult):
                self._writer.enter(ticket, agreed)
            else:
                self._stage_and_submit(ticket, snapshot, details, agreed, started)
        except AnomalyError:
            raise
        except Exception as error:
            stall = time.monotonic() - started
            self._writer.enter(ticket, SaveResult(step, None, _in_words(error), stall_seconds=stall))
        if wait:
            ticket.wait()
        return ticket

    def poll(self) -> list[SaveResult]:
        """Saves that ended since the last call, with success or not; never waits."""
        return self._writer.poll()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is being written; False after the timeout."""
        return self._writer.wait(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Finish the save under way and free the memory; False when it did not finish in time."""
        is_idle = self._writer.wait(timeout_seconds)
        if self.memory is not None:
            self.memory.close(max(map(step_of, list_checkpoints(self.run)), default=-1))
        if is_idle:
            self._release()
            if self._block is not None:
                self._block.free()
        return is_idle

    def prepare_memory(self, parts: Mapping[str, TensorPart]) -> str | None:
        """Make room for checkpoints in memory; returns why there is none. Called by all ranks."""
        assert self.memory is not None, "asked for"
        return self.memory.prepare(parts, self._block_for(parts))

    def _block_for(self, parts: Mapping[str, TensorPart]) -> PinnedBlock | None:
        devices = (part.values.device for part in parts.values())
        device = next((device for device in devices if device.type == "cuda"), None)
        if device is not None and self._block is None:
            self._block = PinnedBlock(device, self._say)
        return self._block if device is not None else None

    def save_to_memory(
        self, step: int, snapshot: Snapshot, details: Mapping[str, Any]
    ) -> tuple[torch.cuda.Event | bool, str | None]:
        """Save to memory, if the save before is finished; see `MemoryStore.save`. Returns also what is wrong with the
        state; then nothing is saved. Called by all ranks; ReplicasDifferError on all of them."""
        assert self.memory is not None, "prepared"
        self.check_replicas(snapshot.parts)
        bad = self.find_damage(snapshot.parts)
        return (False, bad) if bad is not None else (self.memory.save(step, snapshot, details), None)

    def check_replicas(self, parts: Mapping[str, TensorPart]) -> None:
        """Compare the copies of this state on several ranks; ReplicasDifferError, on all ranks, when they differ."""
        assert self._layout is not None, "prepared"
        compare_replicas(parts, self._layout.copies, self.peers)

    def wrong_replicas(self, parts: Mapping[str, TensorPart], said: Sequence[Mapping[str, int]]) -> list[int]:
        """The ranks that hold other bits now than they `said` when their replicas differed at this step."""
        assert self._layout is not None, "prepared"
        now = box_digests(parts, self._layout.copies)
        differs = any(now.get(key) != value for key, value in said[self.peers.rank].items())
        return [rank for rank, wrong in enumerate(self.peers.gather(differs)) if wrong]

    def value_at(self, parts: Mapping[str, TensorPart], key: str, at: int) -> float:
        """A value that several ranks hold; called by all ranks."""
        assert self._layout is not None, "prepared"
        own = value_at(parts, self._layout.copies, key, at)
        return next(float(each) for each in self.peers.gather(own) if each is not None)

    def _agree(self, step: int, parts: Mapping[str, TensorPart], is_patient: bool) -> SaveResult | str:
        """What all ranks do about a save: the name of the attempt to write, or a result at once."""
        if is_patient:
            self._writer.wait()
        folder = checkpoint_folder(self.run, step)
        self._attempts += 1
        own: dict[str, Any] = {"step": step, "committed": folder.is_dir(), "attempt": f"{os.getpid()}-{self._attempts}"}
        own["is_busy"] = self._writer.is_busy
        own["is_planned"] = self._layout is not None and self._layout.signature == signature_of(parts)
        said = self.peers.gather(own)
        if {each["step"] for each in said} != {step}:
            raise SaveError(f"the ranks do not save the same step: {[each['step'] for each in said]}")
        if said[0]["committed"]:
            return SaveResult(step, folder)
        if any(each["is_busy"] for each in said):
            return SaveResult(step, None, "the save before is still being written", was_skipped=True)
        problem = None
        if not all(each["is_planned"] for each in said):
            problem = self._replan(parts)
        if problem is None and self.peers.is_first:
            problem = lack_of_space(self.run, self._layout)
        for rank, each in enumerate(self.peers.gather(problem)):
            if each is not None:
                return SaveResult(step, None, f"rank {rank}: {each}" if self.peers.size > 1 else str(each))
        assert self._layout is not None, "planned by now"
        compare_replicas(parts, self._layout.copies, self.peers)
        bad = self.find_damage(parts)
        if bad is not None:
            return SaveResult(step, None, bad, is_refused=True)
        return str(said[0]["attempt"])

    def _replan(self, parts: Mapping[str, TensorPart]) -> str | None:
        try:
            self.prepare(parts)
        except Exception as error:
            return _in_words(error)
        return None

    def _stage_and_submit(
        self, ticket: SaveTicket, snapshot: Snapshot, details: Mapping[str, Any], attempt: str, started: float
    ) -> None:
        """Copy, and start the writing job. The other ranks rely on this one now, so problems are passed to the job."""
        assert self._layout is not None, "planned by now"
        assert self._buffers is not None, "planned by now"
        problem, record, kept_details = None, b"", {}
        block = self._block
        if block is not None:
            block.lock.acquire()  # a save to memory that is under way needs seconds at most
        release = block.lock.release if block is not None else lambda: None
        try:
            try:
                record = jsonio.dumps_exact(dict(snapshot.record))
                kept_details = jsonio.loads_exact(jsonio.dumps_exact(dict(details)), "the details")  # a deep copy
                self._buffers.copy(snapshot.parts)
            except Exception as error:
                problem = _in_words(error)
            staged = Staged(ticket.step, self._layout, self._buffers.staged(), record, kept_details, problem)
            stall = time.monotonic() - started
            self._writer.submit(ticket, lambda: self._write(staged, attempt, stall, release))
        except BaseException:
            release()
            raise

    def _write(self, staged: Staged, attempt: str, stall_seconds: float, release: Callable[[], None]) -> SaveResult:
        """The job of the writing thread; `release` is called when it needs the staged data no more."""
        started = time.monotonic()
        notes, deleted, folder, problem = [], [], None, None
        try:
            folder = commit(self.run, staged, attempt, self._writing_peers, self.fence, release)
        except SaveError as error:
            problem = str(error)
        if folder is not None and self._writing_peers.is_first:
            self._verified.steps.add(staged.step)
            try:
                self.fence()
                note_latest(self.run, staged.step)
                if self._retention is not None:
                    in_doubt = NOT_GOOD in staged.details
                    if not in_doubt:
                        self._is_good.clear()
                        note_proven(self.run, at_least=staged.step - self._retention.margin_steps)
                    since = self.unchecked_since
                    deleted = prune(self.run, self._retention, self._verified, self.fence, in_doubt, since)
            except (UserError, OSError) as error:
                notes.append(f"after the commit: {_in_words(error)}")
        return SaveResult(
            staged.step,
            folder,
            problem,
            total_bytes=staged.layout.total_bytes,
            stall_seconds=stall_seconds,
            write_seconds=time.monotonic() - started,
            ended_at=time.time(),
            deleted_steps=deleted,
            notes=notes,
        )

    def _release(self) -> None:
        if self._buffers is not None:
            self._buffers.release()
        self._buffers = self._layout = None


def write_checkpoint(run: Path, step: int, snapshot: Snapshot, details: Mapping[str, Any]) -> Path:
    """Commit one checkpoint from one process, waiting for it (an imported model, a tool); DiskError when it fails,
    BadInputError when a tensor is not finite."""
    store = CheckpointStore(run)
    try:
        ticket = store.save(step, snapshot, details, wait=True)
        if ticket.result is not None and ticket.result.is_refused:
            raise BadInputError(f"{ticket.result.problem}. Such weights cannot be trained or used.")
        return ticket.folder()
    finally:
        store.close()


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError | SaveError) else f"{type(error).__name__}: {error}"
