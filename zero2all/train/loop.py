"""The training loop: fetch, step, report, and at named moments validate, save, roll back, change stage, anneal.

One loop for one process and for many. A signal to stop is read at the end of a step: the run saves and exits with
code 10, and the same command continues it. Everything that decides a result is in the config, the data, the checkpoint
and the record of skipped data, so a run that was killed at any moment ends with the same bits as one that was not.

On a GPU the host is one step ahead of what it knows: while the device computes a step, the step before is read, judged
and logged. Only a pause (validation, a save, the end) waits for the device.

Between two steps processes exchange something only where it is due: update ratios, a comparison of replicas, a
validation, a save, a round of a slow link. All of them judge the same figures; what only one knows (a signal, a damaged
shard, a request in the run's folder) is a flag in the figures of the next step, and only then do they talk about it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero2all.common.errors import (
    AnomalyError,
    BadInputError,
    PreemptedError,
    UsageError,
)
from zero2all.common.fault import fault_point
from zero2all.common.progress import counted
from zero2all.common.signals import StopRequest
from zero2all.config.schedule import decay_share, learning_rate, muon_momentum
from zero2all.config.training import AnnealConfig, model_at
from zero2all.model.rope import rope_tables
from zero2all.packed.loader import Batch, Loader, LoaderOptions, read_batch
from zero2all.packed.transfer import batches_on
from zero2all.resilience.heartbeat import beat, warm_up, watch_device
from zero2all.track.writer import MetricsWriter
from zero2all.train.anneal import ANNEAL_STAGE, anneal_in_words, read_anneal, withdraw_request
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.checkpoints.run_lock import RunLock
from zero2all.train.checkpoints.store import CheckpointStore
from zero2all.train.control import Control
from zero2all.train.guards.documents import Decode
from zero2all.train.guards.policy import Action, Rollback, Stop
from zero2all.train.micro_batch import memory_settings
from zero2all.train.outer.optimizer import round_values
from zero2all.train.periodic import (
    CheckpointSaver,
    FolderWatch,
    ReplicaDoubt,
    UpdateRatios,
    Validation,
    check_rerun,
    is_due,
    is_rerun,
    scheduled_garbage_collection,
)
from zero2all.train.reports import RunLog, StepReports
from zero2all.train.sanity import (
    check_batch_ids,
    check_disk,
    check_first_loss,
    check_last_loss,
    communication_notes,
    memory_notes,
    risen_loss,
)
from zero2all.train.setup import Prepared, load_checkpoint
from zero2all.train.shard_damage import ShardDamage
from zero2all.train.step import PendingStep, StepPlan, StepResult, train_step, unfinished_part
from zero2all.train.stragglers import Stragglers
from zero2all.train.validate import Scores

LEAST_MISSED_ROUNDS = 0.05
"""Less is not worth a line at the end."""


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
    """The held-out loss by the names of its metrics."""
    held_out_scores: Scores = field(default_factory=dict)
    """The same by channel, with the tokens that were scored."""
    first_loss_seconds: float | None = None
    """From the start of the command to the first loss of this attempt; None without a step."""


class TrainingLoop:
    """A run while it trains. Its moments are methods: begin, stage, step, validate, save, rollback, anneal, end."""

    collect_garbage: Callable[[int], None]

    def __init__(
        self,
        prepared: Prepared,
        store: CheckpointStore,
        lock: RunLock,
        metrics: MetricsWriter | None,
        make_decode: Callable[[], Decode] | None,
        say: Callable[[str], None],
        stop: StopRequest,
        started: float,
        brief: bool = False,
    ) -> None:
        self.started, self.brief = started, brief
        self.prepared, self.store, self.lock, self.stop = prepared, store, lock, stop
        self.config, self.state, self.world = prepared.config, prepared.state, prepared.world
        self.log = RunLog(prepared.state, prepared.world, metrics, say)
        self.reports = StepReports(prepared, metrics)
        self.control = Control(prepared, metrics, make_decode, lock.check, self.log.say)
        self.validation = Validation(prepared, self.log)
        self.saver = CheckpointSaver(prepared, store, self.control, self.validation, lock, self.log)
        self.replica_doubt = ReplicaDoubt(prepared, store, self.log)
        every_steps = self.config.track.update_ratios_every_steps
        self.update_ratios = UpdateRatios(self.state, self.world, self.log, every_steps)
        self.shard_damage = ShardDamage(prepared, store, lock, self.log)
        self.folder_watch = FolderWatch(prepared, lock)
        self.stragglers = Stragglers(self.world, self.log)
        self.stage_name = ""
        self.is_marked = False
        """Whether the checkpoint that was loaded was saved in doubt."""
        self.pending: tuple[PendingStep, float] | None = None
        """The step that has not been read yet, and the seconds the host waited for its data."""
        self.stop_requested = self.folder_news = False
        """Requests found in the figures of the steps read so far; the same in every process."""
        self.last_groups = tuple(range(self.config.parallel.groups))
        """Those in the last round over a slow link."""
        self.first_loss_seconds: float | None = None
        self.trained_tokens = 0
        """In steps of this attempt: without those that were skipped, or that other groups trained without this one."""

    def run(self) -> TrainSummary:
        """Train until the last step."""
        started = time.perf_counter()
        try:
            self.begin()
            with scheduled_garbage_collection() as self.collect_garbage, self.log.progress_bar(self._last_token()):
                self._leave_damaged_checkpoints()
                first_step = self.state.step
                self.adopt()
                with self.shard_damage.checking(), self.folder_watch.watching(), self.replica_doubt.kept():
                    while self._train_on():
                        pass
            self.end(first_step)
        finally:
            for problem in self.control.close():
                self.log.event("warning", {"problem": problem})
        seconds = time.perf_counter() - started
        facts = {"tokens": self.state.tokens, "seconds": seconds, "first_loss_seconds": self.first_loss_seconds}
        self.log.event("finish", facts)
        last = self.reports.last
        return TrainSummary(
            run=self.config.train.name,
            step=self.state.step,
            tokens=self.state.tokens,
            seconds=seconds,
            tokens_per_second=self.trained_tokens / seconds if seconds else 0.0,
            loss=last.loss if last else None,
            channel_losses=self.reports.by_channel(last) if last else {},
            held_out=self.validation.losses,
            held_out_scores=self.validation.scores,
            first_loss_seconds=self.first_loss_seconds,
        )

    def _train_on(self) -> bool:
        """Train until the end, or until the data must be opened again (rollback, anneal); then returns True."""
        data, state, config = self.prepared.data, self.state, self.config
        options = LoaderOptions(
            *config.parallel.batch_place(self.world.mesh.batch.rank, self.world.mesh.batch.size),
            documents=config.data.document_mask,
            prefetch_steps=config.data.prefetch_steps,
            readers=config.data.readers,
            reader_kind=config.data.reader_kind,
        )
        steps_left = max(0, self.prepared.last_step - state.step)
        # The position in the data is the number of tokens seen, so a changed train.tokens_per_step repeats and skips
        # nothing.
        per_step, warn = config.train.tokens_per_step, self.log.warn_from_any_rank
        loader = batches_on(self.world.device, data, per_step, state.tokens, steps_left, options, warn)
        try:
            beat("data", state.step)
            for batch in loader:
                beat("step", state.step)
                fault_point("step", state.step + 1, batch=batch, state=state)
                self.stage()
                tokens = batch.global_rows * (batch.tokens.shape[1] - 1)
                if self.control.skips(state.tokens, state.tokens + tokens):
                    self.skip(tokens)
                else:
                    self.trained_tokens += tokens
                    self.step(batch, loader)
                if self.adopt() or (self._has_folder_news() and self.anneal()):
                    return True
                beat("data", state.step)
            self.read_results()
            self._carry_out(self.control.at_end(state.step, self.is_marked, self.store))
        except _RollbackError as needed:
            self.rollback(needed.decision)
            return True
        finally:
            loader.close()
        return False

    # ---- the moments ----

    def begin(self) -> None:
        """Restore the guards, and check what can be checked without training."""
        beat("start", self.state.step)
        fault_point("start", self.state.step)
        watch_device(unfinished_part)
        prepared = self.prepared
        facts: dict[str, Any] = {"notes": prepared.notes, "environment": prepared.environment}
        if self.world.device.type == "cuda":
            facts["memory_bytes"] = torch.cuda.get_device_properties(self.world.device).total_memory
        self.log.event("start", facts)
        if prepared.checkpoint is not None:
            self._restore(prepared.checkpoint)
        else:
            self.control.look_for_repeats(prepared.data, self.state.step)
        with self.state.tensors() as tensors:
            checkpoint_bytes = self.store.prepare(tensors)
        self.saver.prepare_memory(self.stage_name)
        if self.state.step < prepared.last_step:
            notes = self._check_before_first_step(checkpoint_bytes)
            self.log.event("sanity", {"notes": notes})
            self.log.say(*(() if self.brief else notes))

    def stage(self) -> None:
        """Enter the stage of the next step, if it is a new one: set its positions, restart the guards."""
        step, stages = self.state.step, self.config.stages
        name = next((stage.name for stage in reversed(stages) if stage.from_step <= step), "main")
        anneal = self.prepared.anneal
        anneals = anneal is not None and anneal.mixture is not None and anneal.from_step <= step
        name = ANNEAL_STAGE if anneals else name
        if name == self.stage_name:
            return
        self.read_results()  # the last step of a stage is judged by the stage's own statistics
        warm_up()
        self._set_positions()
        if self.stage_name:
            self.control.stage_begins()
        self.stage_name = name
        if stages or anneals:
            seq_len = self.prepared.data.segment_at(self.state.tokens).seq_len
            self.log.event("stage", {"name": name, "seq_len": seq_len})

    def step(self, batch: Batch, loader: Loader) -> None:
        """Plan a step and queue it on the device, read the step before it, then do what is due."""
        state = self.state
        plan = self._plan(batch)
        rehearsed = self._rehearsed(batch, plan)
        self.update_ratios.before_step()
        pending = train_step(state, batch, len(self.prepared.data.channels), self.config, self.world, plan)
        self.update_ratios.after_step()
        self.synchronise()
        if rehearsed is not None:
            check_rerun(rehearsed, pending.result(), self.world.mesh.batch.size)
        self._leave_failed_cuda_graph()
        self.collect_garbage(state.step)

        is_last = state.step == self.prepared.last_step  # end() validates and saves
        validates = not is_last and self.validation.is_due(state.step)
        saves = not is_last and self.saver.is_due(state.step)
        remembers = not is_last and not saves and self.saver.is_due_in_memory(state.step)
        compares = not is_last and is_due(state.step, self.config.resilience.replica_check_every_steps)
        self.read_results()  # of the step before, while the device computes this one
        self.pending = (pending, loader.wait_seconds)
        if self.prepared.on_cpu or validates or saves or remembers or compares or is_last or self.stop_requested:
            self.read_results()  # of this step

        self.replica_doubt.look(state.step)
        if validates:
            self.validate()
        if self.stop_requested and not is_last:
            self.preempt()
        if compares and not (saves or remembers):  # else before the save
            self.saver.compare_replicas()
        if saves:
            self.save()
        if remembers:
            self.saver.remember(self.stage_name)
        self.saver.report_finished()
        if validates or saves:
            self.reports.pause_ended()

    def skip(self, tokens: int) -> None:
        """Skip a batch: only the step and the position advance."""
        self.read_results()
        self.state.step += 1
        self.state.tokens += tokens
        self.synchronise()
        self.log.show_progress(self.state.tokens, f"step {self.state.step} skipped")

    def synchronise(self) -> None:
        """Exchange weights with the other groups of a slow link, where that is due."""
        outer, state = self.state.outer, self.state
        if outer is None:
            return
        outer.start(state.step, state.tokens)
        reports = outer.finish(state.step)
        if reports and outer.link is not None:
            square = torch.tensor(sum(report.squared_norm for report in reports), dtype=torch.float64)
            square = self.world.mesh.world.sum(square.to(self.world.device))
            self.log.values(round_values(reports, square, outer, outer.link))
            for report in (each for each in reports if each.steps):
                if self.last_groups != report.groups:
                    facts = {"round": report.round, "groups": report.groups, "before": self.last_groups}
                    self.log.event("slow_link", facts)
                own = self.config.parallel.slow_link.group
                for group in set(self.last_groups) - set(report.groups) - {own}:
                    self.log.say(f"group {group} did not come to round {report.round}: training goes on without it")
                for group in set(report.groups) - set(self.last_groups) - {own}:
                    self.log.say(f"group {group} is back in round {report.round}")
                if own in self.last_groups and own not in report.groups:
                    self.log.say(f"this group came too late to round {report.round}: the others went on without it")
                elif own in report.groups and own not in self.last_groups:
                    self.log.say(f"this group takes part again, in round {report.round}")
                self.last_groups = report.groups

    def adopt(self) -> bool:
        """Take over the state of the other groups, if they went on without this one; then returns True."""
        outer, state = self.state.outer, self.state
        if outer is None or not outer.is_behind:
            return False
        self.read_results()
        left_at = state.step
        state.step, state.tokens = outer.adopt()
        self._set_positions()
        self.reports.pause_ended()
        self.log.event("slow_link", {"adopted": True, "from_step": left_at, "to_step": state.step})
        self.log.say(
            f"the other groups went on without this one: it takes over their weights and continues at step {state.step}"
        )
        return True

    def read_results(self) -> None:
        """Read the pending step, if there is one: log it and let the guards judge it."""
        if self.pending is None:
            return
        (pending, wait_seconds), self.pending = self.pending, None
        result = pending.result()
        if self.first_loss_seconds is None:
            self.first_loss_seconds = time.time() - self.started
        self.stop_requested |= result.stop_requested
        self.folder_news |= result.folder_news
        self.stragglers.read(result, self.reports.report(result, wait_seconds))
        if result.step == 1 and self.prepared.checkpoint is None:  # imported weights are no new model
            self.log.say(*check_first_loss(result.loss, self.config.model))
        self.log.show_progress(result.tokens[1], f"step {result.step} loss {result.loss:.3f}")
        action, page = self.control.observe(result, self.prepared.data.channels, self.store)
        self._carry_out(action, page)

    def _carry_out(self, action: Action, page: Path | None = None) -> None:
        """End the run, or go back, where the guards say so."""
        if isinstance(action, Stop):
            if page is None:
                raise AnomalyError(action.reason)
            raise AnomalyError(f"{action.reason} {page} shows the step, its documents and what to try.")
        if isinstance(action, Rollback):
            raise _RollbackError(action)

    def validate(self) -> None:
        """Measure the held-out loss."""
        beat("validate", self.state.step)
        fault_point("validate", self.state.step)
        self.validation.run()

    def save(self) -> None:
        """Begin to save a checkpoint; it is written in the background."""
        self.shard_damage.stop_if_found()
        beat("save", self.state.step)
        self.saver.save(self.stage_name)

    def rollback(self, decision: Rollback) -> None:
        """Go back to an earlier checkpoint, and skip the data that caused it. Only once it is read are newer ones
        moved."""
        left_at = self.state.step
        beat("start", left_at)
        self.pending = None
        checkpoint = self.store.at(decision.to_step)
        withdrawn = self.store.go_back_to(decision.to_step, decision.reason)
        load_checkpoint(self.state, checkpoint)
        self._restore(checkpoint)
        self._set_positions()
        self.prepared.reopen_data(checkpoint)
        self.reports.pause_ended()
        self.log.show_progress(self.state.tokens, f"back at step {self.state.step}")
        facts = {"from_step": left_at, "to_step": decision.to_step, "withdrawn": withdrawn, "reason": decision.reason}
        self.log.event("rollback", facts)

    def anneal(self) -> bool:
        """What rank 0 found in the run's folder. A request of `z2a anneal` gives the run a new end; then returns True.
        A lost lock is LostRunError, on every rank."""
        self.folder_news = self.folder_watch.found = False
        values, problem = self.world.run_on_rank0(self._read_anneal)
        if problem is not None:
            self.log.warn(problem, "\nTraining continues with its schedule.")
        if values is None:
            return False
        anneal = AnnealConfig(**values)
        self.prepared.data = self.prepared.data_with(anneal)
        self.prepared.anneal = anneal
        self.control.data_changed(self.prepared.data)
        if self.state.outer is not None:
            self.state.outer.end_at(self.prepared.last_step)
        self.log.set_total(self._last_token())
        self.log.event("anneal", values)
        self.log.say(anneal_in_words(anneal))
        return True

    def preempt(self) -> None:
        """End the run because a signal asked for it, after saving where the config says so."""
        self.shard_damage.stop_if_found()
        saves = self.config.resilience.save_on_signal
        if saves:
            beat("save", self.state.step)
            self.saver.save_now(self.stage_name)
        self.log.event("preempted", {"saved": saves})
        step, name = self.state.step, self.config.train.name
        if not saves:
            raise PreemptedError(
                f"Training of `{name}` was stopped without a save (resilience.save_on_signal is false). Run the same "
                f"command again to continue from the last checkpoint."
            )
        raise PreemptedError(
            f"Training of `{name}` was stopped and saved at step {step}. Run the same command again to continue."
        )

    def end(self, first_step: int) -> None:
        """Validate, and save if there was a step since `first_step`. A run whose last state cannot be saved fails."""
        self.shard_damage.stop_if_found()
        self.validate()
        if self.state.step >= self.config.train.steps:
            self._note_last_loss()
        if self.state.step > first_step:
            beat("save", self.state.step)
            self.saver.save_now(self.stage_name)
        self._say_missed_rounds()
        beat("end", self.state.step)
        while self.state.outer is not None and self.state.outer.serve_last(self.state.step, self.state.tokens):
            beat("end", self.state.step)

    # ---- parts of the moments ----

    def _note_last_loss(self) -> None:
        """What the held-out loss at the planned end says; a rise is also shown on the board."""
        losses, lowest = self.validation.losses, self.validation.lowest
        risen = risen_loss(lowest, losses.get("eval/valid/loss", math.nan))
        for note in risen:
            self.log.warn(note)
        self.log.say(*check_last_loss(losses, self.config, can_train_longer=not risen))

    def _say_missed_rounds(self) -> None:
        """How many of the run's tokens are not in the weights, because a group was lost or late."""
        parallel = self.config.parallel
        for group, steps in sorted(self.state.outer.missed.items() if self.state.outer else ()):
            if steps / parallel.slow_link.every < LEAST_MISSED_ROUNDS:
                continue
            tokens = steps * self.config.train.tokens_per_step / parallel.groups
            self.log.say(
                f"{steps / parallel.slow_link.every:.1f} rounds were made without group {group}: about {tokens:,.0f} "
                f"of the {self.state.tokens:,} tokens are not in the weights"
            )

    def _check_before_first_step(self, checkpoint_bytes: int) -> list[str]:
        """Disk space for checkpoints, memory, token ids that the model lacks."""
        prepared, config, state = self.prepared, self.config, self.state
        keep, last_step = config.checkpoint, prepared.last_step
        existing = [step_of(folder) for folder in list_checkpoints(prepared.run)]
        margin, kept_steps = config.guards.rollback_margin_steps, keep.every_steps * (keep.keep_last - 1)
        retention = Retention(keep.keep_last, keep.keep_every_steps, keep_best=keep.keep_best)
        disk = partial(check_disk, prepared.run, retention, keep.every_steps)
        notes = [self.world.run_on_rank0(lambda: disk(state.step, last_step, checkpoint_bytes, existing))]
        if keep.every_steps and kept_steps < margin and config.guards.loss_spike == "rollback":
            notes.append(
                f"warning: after spikes no checkpoint may be old enough to go back to: {keep.keep_last} are kept, one "
                f"every {counted(keep.every_steps, 'step')}, and guards.rollback_margin_steps is {margin}. Save more "
                f"rarely, or raise checkpoint.keep_last"
            )
        if self.world.device.type == "cuda":
            settings = memory_settings(config, state.model.ops, self.world.mesh, state.micro_batch_samples)
            notes += memory_notes(config.model, settings, torch.cuda.mem_get_info(self.world.device)[1])
            notes += communication_notes(config.model, settings)
        rows = config.train.tokens_per_step // prepared.data.segment_at(state.tokens).seq_len
        check_batch_ids([read_batch(prepared.data, state.tokens, rows)], config.model.vocab_ids)
        return notes

    def _plan(self, batch: Batch) -> StepPlan:
        """What is decided about a step before it begins."""
        state, config = self.state, self.config
        course = config.schedule, config.stages, self.prepared.anneal
        lr = learning_rate(state.step, config.train.steps, config.optim.lr_max, *course)
        momentum = muon_momentum(state.step, config.train.steps, config.optim, *course)
        stops = self.stop.requested or self.shard_damage.is_found
        news = self.folder_watch.found
        plan = self.control.plan(state.step + 1, lr, state.tokens, batch.global_rows, stops, news)
        share = decay_share(state.step, config.train.steps, config.optim)
        return replace(plan, pace=self.stragglers.own, decay_share=share, momentum=momentum)

    def _rehearsed(self, batch: Batch, plan: StepPlan) -> StepResult | None:
        """The results of the next step without its update, where it is one that is computed twice."""
        if not is_rerun(self.state.step + 1, self.config.resilience.rerun_every_steps, self.config.train.seed):
            return None
        channels, plan = len(self.prepared.data.channels), dataclasses.replace(plan, is_rehearsal=True)
        return train_step(self.state, batch, channels, self.config, self.world, plan).result()

    def _has_folder_news(self) -> bool:
        """Whether to see what is in the run's folder: the same in every process. One that is alone looks by itself;
        several are told by the figures, except after the last step, which no figures follow."""
        if self.world.size == 1:
            return self.folder_watch.look()
        return self.folder_news or self.state.step == self.prepared.last_step

    def _leave_failed_cuda_graph(self) -> None:
        """Continue without a CUDA graph when a pass could not be captured."""
        graph = self.state.cuda_graph
        if graph is not None and graph.problem:
            self.state.cuda_graph = None
            self.log.warn(
                f"passes can no longer be captured as a CUDA graph: {graph.problem}. They run without one from here on."
            )

    def _leave_damaged_checkpoints(self) -> None:
        """Roll back while the checkpoint that was loaded holds values that no training writes."""
        while self.prepared.checkpoint is not None:
            with self.state.tensors() as tensors:
                bad = self.store.damaged(tensors)
            if bad is None:
                return
            step = self.state.step
            older = [one for one in self.world.run_on_rank0(self.store.good_steps) if one < step]
            target = next((one for one in reversed(older) if self.store.opens(one)), None)
            if target is None:
                raise BadInputError(
                    f"The checkpoint of step {step} of {self.config.train.name} cannot be used: {bad}. There is no "
                    f"older good checkpoint. Nothing was changed. Start over with --fresh, or restore an earlier "
                    f"checkpoint."
                )
            reason = f"the checkpoint of step {step} cannot be used ({bad}): back to the checkpoint of step {target}"
            self.log.say(reason)
            self.rollback(Rollback(target, None, reason))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Restore guards and stage. A stage that begins right after the checkpoint has not begun in it."""
        with reading_record(checkpoint):
            notes = self.control.restore(checkpoint.record.get("guards"), checkpoint.step)
        for note in notes:
            self.log.warn(note)
        self.stage_name = str(checkpoint.record.get("stage") or "")
        with reading_record(checkpoint):
            lowest = checkpoint.record.get("lowest_held_out")  # older checkpoints have none
            self.validation.lowest = None if lowest is None else (int(lowest[0]), float(lowest[1]))
        self.is_marked = NOT_GOOD in checkpoint.manifest

    def _set_positions(self) -> None:
        """Rotary positions for the stage of the next step."""
        state, model = self.state, model_at(self.state.step, self.config.model, self.config.stages)
        if (model.rope_theta, model.rope_scaling) != (state.model.config.rope_theta, state.model.config.rope_scaling):
            state.model.config = model
            cos, sin = rope_tables(model, model.max_seq_len, self.world.device)
            state.model.cos, state.model.sin = cos.to(state.model.cos.dtype), sin.to(state.model.sin.dtype)

    def _read_anneal(self) -> tuple[dict[str, Any] | None, str | None]:
        """The anneal that was requested, or why it cannot be done."""
        self.lock.check()
        if self.prepared.anneal is not None:  # a run anneals once
            return None, None
        try:
            found = read_anneal(self.prepared.run, self.state.step, self.prepared.data_with)
            return None if found is None else dataclasses.asdict(found), None
        except UsageError as error:
            withdraw_request(self.prepared.run)
            return None, str(error)

    def _last_token(self) -> int:
        """Counted from here, because an earlier attempt may have had another train.tokens_per_step."""
        return self.state.tokens + (self.prepared.last_step - self.state.step) * self.config.train.tokens_per_step


class _RollbackError(Exception):
    """The guards decided to go back; caught where the data is read."""

    def __init__(self, decision: Rollback) -> None:
        self.decision = decision
