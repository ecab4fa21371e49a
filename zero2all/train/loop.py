"""The training run: fetch, step, report, and at named moments validate and save.

One loop for one process and for many. Signals to stop are asked for at the end of a step: the run saves and exits
with code 10, and the same command continues it. Everything that decides a result is in the config, the data, the
checkpoint and the record of what was left out, so a run that was killed at any moment ends with the same bits as one
that was left alone.

On a GPU the host works one step ahead of what it knows: while the device computes a step, the one before is read,
judged and written down. Only a pause (validation, the end) waits for the device.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zero2all.common.errors import AnomalyError, BadInputError, PreemptedError, UsageError
from zero2all.common.progress import Bar, counted, progress, say
from zero2all.common.signals import stop_signals_to
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig
from zero2all.config.schedule import learning_rate
from zero2all.config.training import AnnealConfig, model_at
from zero2all.model.rope import rope_tables
from zero2all.packed.background import ShardCheck, checking_shards
from zero2all.packed.loader import Batch, Loader, LoaderOptions, read_batch
from zero2all.packed.transfer import batches_on
from zero2all.parallel.device import pick_device, set_memory_settings
from zero2all.parallel.world import World, asked_processes, join_world
from zero2all.track.writer import Run, has_finished
from zero2all.train.anneal import anneal_values, read_anneal, withdraw_wish
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.checkpoints.run_lock import LOCK_NAME, Fence, RunLock, behind, hold_run, no_fence
from zero2all.train.checkpoints.set_aside import discard
from zero2all.train.checkpoints.snapshot import Snapshot
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.checkpoints.writer import SaveTicket
from zero2all.train.control import Control
from zero2all.train.garbage import scheduled_garbage_collection
from zero2all.train.guards.documents import Decode
from zero2all.train.guards.policy import Rollback, Stop
from zero2all.train.lost_peer import explain_lost_peer
from zero2all.train.micro_batch import memory_settings
from zero2all.train.ratios import UpdateRatios
from zero2all.train.reports import StepReports
from zero2all.train.sanity import check_batch_ids, check_disk, check_first_loss, memory_notes
from zero2all.train.setup import Prepared, load_checkpoint, prepare, save_run_config
from zero2all.train.step import PendingStep, StepResult, train_step
from zero2all.train.stop import StopRequest, stop_requests
from zero2all.train.validate import held_out_losses


@dataclass
class TrainSummary:
    """How a run ended."""

    run: str
    step: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float | None
    channel_losses: dict[str, float]
    held_out: dict[str, float] = field(default_factory=dict)


def train(
    config: RunConfig,
    workspace: Workspace,
    fresh: bool = False,
    accept_changes: bool = False,
    take_over: bool = False,
    make_decode: Callable[[], Decode] | None = None,
    say: Callable[[str], None] = print,
) -> TrainSummary:
    """Train `config` to its last step, continuing the run where it stands. Called by every process of the run.

    `make_decode` loads what turns ids into text, for the pages that explain incidents.
    """
    run = workspace.run(config.train.name)
    with ExitStack() as stack:
        # From here on: a request that comes while the run is being set up is met at the end of its first step.
        stop = stack.enter_context(stop_requests())
        set_memory_settings(config.parallel.expandable_segments)
        device = pick_device(config.parallel.device)
        # While it waits for the others no Python runs, and one of them may have been stopped before it came here.
        with stop_signals_to(signal.SIG_DFL) if asked_processes() > 1 else nullcontext():
            if stop.requested:
                raise PreemptedError("Stopped before the run had begun; nothing was changed. Run it again to start it.")
            world = stack.enter_context(join_world(device, config.parallel.timeout_seconds))
        speak = say if world.is_first else _say_nothing
        stack.enter_context(explain_lost_peer(config, run, world))
        lock, store = stack.enter_context(_locked_store(config, run, world, take_over, speak))
        prepared = prepare(config, workspace, world, store, accept_changes, fresh)
        if fresh:  # only now, when nothing can be wrong any more
            world.first_does(lambda: _clear_run(run, lock.check))
        for note in prepared.notes:
            speak(note)
        world.first_does(lambda: behind(lock.check, lambda: save_run_config(prepared.config, run)))
        metrics = None
        # A run that is over has nothing to add to its curves: another look at it is no other attempt.
        is_over = prepared.state.step >= prepared.last_step and has_finished(run)
        if world.is_first and not is_over:
            resumed_from = prepared.state.step or None
            metrics = Run(run, queue_rows=config.track.queue_rows, resumed_from=resumed_from, may_write=lock.is_held)
        reason, message = "done", None
        try:
            with explain_lost_peer(config, run, world, prepared.state, lock.check):
                return _Training(prepared, store, lock, metrics, make_decode, speak, stop).run_to_the_end()
        except BaseException as error:
            reason = "preempted" if isinstance(error, PreemptedError) else "failed"
            message = f"{type(error).__name__}: {error}"
            raise
        finally:
            if metrics is not None:
                metrics.close(config.track.close_timeout_seconds, reason, message)
                with suppress(OSError):
                    for problem in _tracking_problems(metrics) if lock.is_held() else ():
                        speak(problem)


@contextmanager
def _locked_store(
    config: RunConfig, run: Path, world: World, take_over: bool, say: Callable[[str], None]
) -> Iterator[tuple[RunLock, CheckpointStore]]:
    """The checkpoints of the run, with the run's lock held by the first process; the others see it, too."""
    with ExitStack() as stack:

        def lock_run() -> tuple[str, list[str]]:
            held.append(stack.enter_context(hold_run(run, take_over)))
            return held[0].token, held[0].notes

        held: list[RunLock] = []
        token, notes = world.first_does(lock_run)
        lock = held[0] if held else RunLock(run / LOCK_NAME, token, notes)
        for note in notes:
            say(note)
        keep = config.checkpoint
        store = CheckpointStore(
            run,
            world.group,
            Retention(keep.keep_last, keep.keep_every_steps),
            when_busy=keep.when_busy,
            peer_timeout_seconds=config.parallel.timeout_seconds,
            # A rank on a disk of its own has no lock to look at.
            fence=lock.check if world.is_first or lock.is_held() else no_fence,
            say=say,
        )
        try:
            for note in world.first_does(store.sweep):
                say(note)
            yield lock, store
        finally:
            store.close(config.resilience.save_timeout_seconds)


class _Training:
    """The run while it trains."""

    def __init__(
        self,
        prepared: Prepared,
        store: CheckpointStore,
        lock: RunLock,
        metrics: Run | None,
        make_decode: Callable[[], Decode] | None,
        say: Callable[[str], None],
        stop: StopRequest,
    ) -> None:
        self.prepared, self.store, self.lock, self.metrics = prepared, store, lock, metrics
        self.say, self.stop = say, stop
        self.config, self.state, self.world = prepared.config, prepared.state, prepared.world
        self.control = Control(
            prepared.config,
            prepared.run,
            prepared.world,
            prepared.data,
            prepared.workspace.corpus,
            metrics,
            make_decode,
            lock.check,
        )
        self.reports = StepReports(prepared, metrics)
        self.pending: tuple[PendingStep, float] | None = None
        self.held_out: dict[str, float] = {}
        self.stage = ""

    # ---- the whole run ----

    def run_to_the_end(self) -> TrainSummary:
        """Train until the last step."""
        prepared, state = self.prepared, self.state
        started, tokens_before = time.perf_counter(), state.tokens
        self._event("start", {"notes": prepared.notes, "environment": prepared.environment})
        if prepared.checkpoint is not None:
            self._restore(prepared.checkpoint)
        else:
            self.control.look_for_repeats(prepared.data, state.step)
        self._check_before_the_first_step()
        total = self._tokens_at_the_end()
        try:
            with (
                scheduled_garbage_collection() as collect_garbage,
                progress("train", total=total, unit="tok", done=state.tokens, quiet=not self.world.is_first) as bar,
                self._checking_shards() as self.shard_check,
            ):
                self.bar, self.collect_garbage = bar, collect_garbage
                self.shown_tokens = state.tokens
                self._leave_not_finite()
                self.first_step = state.step
                while self._stretch():
                    pass
            self._stop_if_damaged()
            self._validate()
            last_save = self._save(wait=True) if state.step > self.first_step else None
            self._note_saves()
        finally:
            for problem in self.control.close():
                self._event("warning", {"problem": problem})
        if last_save is not None:
            self._require(last_save)  # an end that could not be saved is no end
        seconds = time.perf_counter() - started
        self._event("finish", {"tokens": state.tokens, "seconds": seconds})
        last = self.reports.last
        return TrainSummary(
            run=self.config.train.name,
            step=state.step,
            tokens=state.tokens,
            seconds=seconds,
            tokens_per_second=(state.tokens - tokens_before) / seconds if seconds else 0.0,
            loss=last.loss if last else None,
            channel_losses=self.reports.by_channel(last) if last else {},
            held_out=self.held_out,
        )

    def _check_before_the_first_step(self) -> None:
        """What can be found out without training: room for checkpoints, memory, ids that the model lacks."""
        prepared, config, state = self.prepared, self.config, self.state
        with state.tensors() as tensors:
            size = self.store.prepare(tensors)
        if state.step == prepared.last_step:
            return
        run, keep = prepared.run, config.checkpoint
        existing = [step_of(folder) for folder in list_checkpoints(run)]
        retention = Retention(keep.keep_last, keep.keep_every_steps)
        notes = [
            self.world.first_does(
                lambda: check_disk(run, retention, keep.every_steps, state.step, prepared.last_step, size, existing)
            )
        ]
        if self.world.device.type == "cuda":
            settings = memory_settings(config, state.model.ops, self.world.size, state.micro_batch_samples)
            notes += memory_notes(config.model, settings, torch.cuda.mem_get_info(self.world.device)[1])
        rows = prepared.data.segment_at(state.tokens).seq_len
        first = read_batch(prepared.data, state.tokens, config.train.tokens_per_step // rows)
        check_batch_ids([first], config.model.vocab_ids)
        self._event("sanity", {"notes": notes})
        self.say_all(notes)

    def _stretch(self) -> bool:
        """Train until the end, or until the data must be opened anew (gone back, anneal); True to go on then."""
        prepared, state, config = self.prepared, self.state, self.config
        options = LoaderOptions(
            rank=self.world.rank,
            ranks=self.world.size,
            documents=config.data.document_mask,
            prefetch_steps=config.data.prefetch_steps,
            readers=config.data.readers,
            reader_kind=config.data.reader_kind,
        )
        steps_left = max(0, prepared.last_step - state.step)
        # The position in the data is the tokens seen: a changed train.tokens_per_step repeats and skips nothing.
        per_step, warn = config.train.tokens_per_step, self._warn
        loader = batches_on(self.world.device, prepared.data, per_step, state.tokens, steps_left, options, warn)
        try:
            for batch in loader:
                rollback = self._enter_stage() or self._one_batch(batch, loader)
                if rollback is not None:
                    self._go_back(rollback)
                    return True
                if self._anneal_wished():
                    return True
            rollback = self._drain()
            if rollback is not None:
                self._go_back(rollback)
                return True
        finally:
            loader.close()
        return False

    def _one_batch(self, batch: Batch, loader: Loader) -> Rollback | None:
        """Train on a batch, or pass it over; returns the decision to go back, if that was taken."""
        tokens = batch.global_rows * (batch.tokens.shape[1] - 1)
        if not self.control.ledger.skips(self.state.tokens, self.state.tokens + tokens):
            return self._one_step(batch, loader)
        rollback = self._drain()
        if rollback is None:
            self._pass_over(tokens)
        return rollback

    def _one_step(self, batch: Batch, loader: Loader) -> Rollback | None:
        """One step and what is due after it; returns the decision to go back, if that was taken."""
        prepared, state, config = self.prepared, self.state, self.config
        lr = learning_rate(
            state.step, config.train.steps, config.optim.lr_max, config.schedule, config.stages, prepared.anneal
        )
        tokens = (state.tokens, state.tokens + config.train.tokens_per_step)
        stops = self.stop.requested or self.shard_check.damage is not None
        plan = self.control.plan(state.step + 1, lr, tokens, batch.global_rows, stops)
        looks = _due(state.step + 1, config.track.update_ratios_every_steps)
        ratios = UpdateRatios(state) if looks else None
        pending = train_step(state, batch, len(prepared.data.channels), config, self.world, plan)
        self._note_recording()
        if ratios is not None:
            self._log(ratios.after(self.world))
        done = state.step == prepared.last_step  # then validation and the last save follow behind the loop
        validates = not done and _due(state.step, config.eval.every_steps)
        saves = not done and _due(state.step, config.checkpoint.every_steps)
        rollback = self._take(pending, loader.wait_seconds, at_once=prepared.on_cpu or validates or saves or done)
        self.collect_garbage(state.step)
        if rollback is not None:
            return rollback
        stopping = self.reports.stop_requested and not done
        if stopping and self.pending is not None:
            rollback = self._drain()
            if rollback is not None:
                return rollback
        if validates:
            self._validate()
        if stopping:
            self._preempt()
        if saves:
            self._save()
        self._note_saves()
        if validates or saves:
            self.reports.pause_ended()
        return None

    def _note_recording(self) -> None:
        """Passes that turn out not to be recordable are queued as they always were, and someone should know."""
        recorded = self.state.recorded
        if recorded is None or not recorded.problem:
            return
        self.state.recorded = None
        problem = f"a pass cannot be recorded: {recorded.problem}. From here on its kernels are queued one by one."
        self._event("warning", {"problem": problem})
        self.say_all([problem])

    # ---- reading what steps did ----

    def _take(self, pending: PendingStep, wait_seconds: float, at_once: bool) -> Rollback | None:
        """Read the step before this one, and with `at_once` this one too."""
        rollback = self._drain()
        if rollback is not None:
            return rollback  # what is pending belongs to the branch that is left
        self.pending = (pending, wait_seconds)
        return self._drain() if at_once else None

    def _drain(self) -> Rollback | None:
        if self.pending is None:
            return None
        pending, wait_seconds = self.pending
        self.pending = None
        result = pending.result()
        self.reports.report(result, wait_seconds)
        if result.step == 1:
            self.say_all(check_first_loss(result.loss, self.config.model))
        self._show(result.tokens[1], f"step {result.step} loss {result.loss:.3f}")
        return self._judge(result)

    def _show(self, tokens: int, note: str) -> None:
        """Move the bar to `tokens`."""
        with suppress(OSError):  # a terminal that is gone is no reason to stop
            self.bar.advance(tokens - self.shown_tokens, note=note)
        self.shown_tokens = tokens

    def _judge(self, result: StepResult) -> Rollback | None:
        steps = self.store.good_steps() if self.world.is_first else []
        action, page = self.control.observe(result, self.prepared.data.channels, steps)
        if isinstance(action, Stop):
            where = f" {page} shows the step, its documents and what to try." if page else ""
            raise AnomalyError(f"{action.reason}{where}")
        return action if isinstance(action, Rollback) else None

    # ---- what is due at named moments ----

    def _tokens_at_the_end(self) -> int:
        """Counted from where the run stands: steps of an earlier attempt may have had another number of tokens."""
        state = self.state
        return state.tokens + (self.prepared.last_step - state.step) * self.config.train.tokens_per_step

    def _validate(self) -> None:
        prepared, state = self.prepared, self.state
        self.held_out = held_out_losses(state.model, prepared.valid, self.config.data, self.config.eval, self.world)
        self._log(self.held_out)

    def _save(self, wait: bool = False) -> SaveTicket:
        state = self.state
        document = {
            **state.counters(),
            "guards": self.control.state(),
            "anneal": anneal_values(self.prepared.anneal),
            "stage": self.stage,
        }
        details, doubt = self.prepared.details, self.control.doubt()
        if doubt is not None:
            details[NOT_GOOD] = doubt
        with state.tensors() as tensors:
            ticket = self.store.save(state.step, Snapshot(tensors, document), details, wait=wait)
        if ticket.result is None or ticket.result.folder is not None:
            self.control.saved()
        return ticket

    def _require(self, ticket: SaveTicket) -> None:
        """A save that must be. One that failed because the run has another writer is no matter of the disk."""
        self.world.first_does(self.lock.check)
        ticket.folder()

    def _note_saves(self) -> None:
        """Saves that ended since the last look, as events."""
        for result in self.store.poll():
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
            self._event("checkpoint" if result.folder else "checkpoint_failed", facts, result.step)
            if result.problem and not result.was_skipped and self.lock.is_held():
                problem = f"The checkpoint of step {result.step} was not saved: {result.problem}."
                self.say_all([f"{problem} Training goes on."])

    def _preempt(self) -> None:
        """End the run because somebody asked for it, after saving where the config says so."""
        self._stop_if_damaged()
        step, name = self.state.step, self.config.train.name
        saves = self.config.resilience.save_on_signal
        if saves:
            ticket = self._save(wait=True)
            self._note_saves()
            self._require(ticket)
        self._event("preempted", {"saved": saves})
        where = f"saved at step {step}" if saves else "not saved (resilience.save_on_signal is false)"
        raise PreemptedError(f"Training of `{name}` was stopped and {where}. Run the same command again to continue.")

    def _checking_shards(self) -> AbstractContextManager[ShardCheck]:
        """The check of all that this run reads, while it reads it."""
        prepared, world = self.prepared, self.world
        if not self.config.data.verify_shards or self.state.step == prepared.last_step:
            return nullcontext(ShardCheck())
        splits = [*prepared.data.splits, *prepared.valid]
        seq_lens = {segment.seq_len for segment in prepared.data.segments if prepared.data.packing == "best_fit"}
        return checking_shards(splits, sorted(seq_lens), self._warn, world.rank, world.size)

    def _stop_if_damaged(self) -> None:
        """End the run, in all processes, if one of them found a damaged shard; nothing that was read of it is saved."""
        found = [damage for damage in self.world.gather(self.shard_check.damage) if damage is not None]
        if not found:
            return
        self._event("damaged_shard", {"problems": found})
        name, step, first = self.config.train.name, self.state.step, self.first_step
        text = (
            f"{found[0]}. Training of `{name}` was stopped at step {step}, which was not saved. `z2a pack` writes the "
            f"file again; then run the same command to continue. What was trained since step {first}, where this "
            f"start began, may have read the damage: to keep none of it, first delete the checkpoints after that step."
        )
        raise BadInputError(text) if self.world.is_first else PreemptedError(text)  # the first says it for all

    def _go_back(self, decision: Rollback) -> None:
        """Continue from an earlier checkpoint, without the data that led away from it."""
        left = self.state.step
        self.pending = None
        withdrawn = self.store.go_back_to(decision.to_step, decision.reason)
        checkpoint = self.store.at(decision.to_step)
        load_checkpoint(self.state, checkpoint)
        self._restore(checkpoint)
        self._set_positions()
        self.prepared.reopen_data(checkpoint)
        self.reports.pause_ended()
        self._show(self.state.tokens, f"back at step {self.state.step}")
        facts = {"from_step": left, "to_step": decision.to_step, "withdrawn": withdrawn, "reason": decision.reason}
        self._event("rollback", facts)
        self.say_all([decision.reason])

    def _leave_not_finite(self) -> None:
        """Go on from an older checkpoint when the one that was loaded holds values that are not finite."""
        while self.prepared.checkpoint is not None:
            with self.state.tensors() as tensors:
                bad = self.store.not_finite(tensors)
            if bad is None:
                return
            step = self.state.step
            older = [one for one in self.world.first_does(self.store.good_steps) if one < step]
            what = f"the checkpoint of step {step} holds values that are not finite, in {bad}"
            if not older:
                raise BadInputError(
                    f"{self.config.train.name}: {what}, and there is no older one that is good. Start over with "
                    f"--fresh, or bring back a checkpoint from before it went wrong."
                )
            self._go_back(Rollback(older[-1], None, f"{what}: back to the checkpoint of step {older[-1]}"))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Guards and stage as they were. A stage that begins right behind the checkpoint has not begun there yet."""
        with reading_record(checkpoint):
            notes = self.control.restore(checkpoint.document.get("guards"), checkpoint.step)
        for note in notes:
            self._event("warning", {"problem": note})
            self.say_all([note])
        self.stage = str(checkpoint.document.get("stage") or "")

    # ---- stages, skipped data, anneal ----

    def _enter_stage(self) -> Rollback | None:
        """Positions and guards follow the stage that the next step belongs to."""
        config, state = self.config, self.state
        stage = next((each.name for each in reversed(config.stages) if each.from_step <= state.step), "main")
        if stage == self.stage:
            return None
        rollback = self._drain()  # the last step of a stage is judged by what was usual there
        if rollback is not None:
            return rollback
        self._set_positions()
        if self.stage:
            self.control.stage_begins()
        self.stage = stage
        if config.stages:
            self._event("stage", {"name": stage, "seq_len": self.prepared.data.segment_at(state.tokens).seq_len})
        return None

    def _set_positions(self) -> None:
        """Rotary positions as the stage of the next step wants them."""
        state, model = self.state, model_at(self.state.step, self.config.model, self.config.stages)
        if (model.rope_theta, model.rope_scaling) != (state.model.config.rope_theta, state.model.config.rope_scaling):
            state.model.config = model
            cos, sin = rope_tables(model, model.max_seq_len, self.world.device)
            state.model.cos, state.model.sin = cos.to(state.model.cos.dtype), sin.to(state.model.sin.dtype)

    def _pass_over(self, tokens: int) -> None:
        """Leave a batch out: position and step advance, and nothing else."""
        self.state.step += 1
        self.state.tokens += tokens
        self._show(self.state.tokens, f"step {self.state.step} left out")

    def _anneal_wished(self) -> bool:
        """Whether `z2a anneal` was called since the last step; the run then ends elsewhere."""
        if self.prepared.anneal is not None:
            return False
        anneal, problem = self.world.first_does(self._read_wish)
        if problem is not None:
            self._event("warning", {"problem": problem})
            self.say_all([f"{problem}\nTraining goes on as scheduled."])
        if anneal is None:
            return False
        self.prepared.data = self.prepared.data_with(anneal)
        self.prepared.anneal = anneal
        self.control.data_changed(self.prepared.data)
        with suppress(OSError):
            self.bar.set_total(self._tokens_at_the_end())
        self._event("anneal", {"steps": anneal.steps, "shape": anneal.shape, "to_share": anneal.to_share})
        return True

    def _read_wish(self) -> tuple[AnnealConfig | None, str | None]:
        """The anneal that was asked for, or why it cannot be."""
        run = self.prepared.run
        self.lock.check()
        try:
            return read_anneal(run, self.state.step, self.prepared.data_with), None
        except UsageError as error:
            withdraw_wish(run)
            return None, str(error)

    def _log(self, values: Mapping[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.log(values, self.state.step, self.state.tokens)

    def _warn(self, problem: str) -> None:
        """What went wrong in this process and was mended; only the first has metrics, so it is said in any case."""
        self._event("warning", {"problem": problem})
        say(problem if self.world.size == 1 else f"rank {self.world.rank}: {problem}")

    def say_all(self, lines: list[str]) -> None:
        """Lines for the person who watches."""
        for line in lines:
            with suppress(OSError):
                self.say(line)

    def _event(self, kind: str, data: dict[str, Any], step: int | None = None) -> None:
        if self.metrics is not None:
            self.metrics.event(kind, self.state.step if step is None else step, data)

    bar: Bar
    shown_tokens: int
    first_step: int
    shard_check: ShardCheck
    collect_garbage: Callable[[int], None]


def _due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _clear_run(run: Path, fence: Fence) -> None:
    """Forget a run, except for the lock that is being held."""
    for item in list(run.iterdir()):
        fence()
        if item.is_dir():
            discard(item)
        elif item.name != LOCK_NAME:
            item.unlink()


def _tracking_problems(metrics: Run) -> list[str]:
    """What did not reach the metrics files, for the end of the run."""
    problems = [f"metrics: {problem} ({counted(count, 'time')})" for problem, count in metrics.problems.items()]
    if metrics.dropped_rows:
        problems.append(f"metrics: rows were dropped and are missing from {metrics.path}: {metrics.dropped_rows:,}")
    return problems


def _say_nothing(text: str) -> None:
    del text
