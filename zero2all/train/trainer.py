"""The training loop: fetch a batch, train on it, read the step before, and let the hooks do what is due.

One loop for one process and for many. A signal to stop is read at the end of a step (`hooks.checkpointing`): the run
saves and exits with code 10, and the same command continues it. Everything that decides a result is in the config, the
data, the checkpoint and the record of skipped data, so a run that was killed at any moment ends with the same bits as
one that was not.

On a GPU the host is one step ahead of what it knows: while the device computes a step, the step before is read, judged
and logged. Only a pause (validation, a save, the end) waits for the device.

Between two steps processes exchange something only where it is due: update ratios, a comparison of replicas, a
validation, a save, a round of DiLoCo. All of them judge the same stats; what only one knows (a signal, a damaged
shard, a request in the run's folder) is a flag in the stats of the next step, and only then do they talk about it.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zero2all.common.errors import BadInputError
from zero2all.common.fault import fault_point
from zero2all.common.progress import counted
from zero2all.common.signals import StopRequest
from zero2all.config.schedule import learning_rate, muon_momentum, weight_decay_share
from zero2all.config.training import model_at
from zero2all.model.rope import rope_tables
from zero2all.packed.loader import Batch, LoaderOptions, batches_on, read_batch
from zero2all.resilience.heartbeat import beat, warm_up, watch_device
from zero2all.train import sanity
from zero2all.train.anneal import ANNEAL_STAGE
from zero2all.train.checkpoints.layout import list_checkpoints, step_of
from zero2all.train.checkpoints.load import Checkpoint
from zero2all.train.checkpoints.retention import Retention
from zero2all.train.context import RunContext
from zero2all.train.guards.documents import Decode
from zero2all.train.guards.policy import Rollback
from zero2all.train.hooks import Hook
from zero2all.train.hooks.anneal import Anneal
from zero2all.train.hooks.checkpointing import Checkpointing
from zero2all.train.hooks.diloco import Diloco
from zero2all.train.hooks.guards import Guards, RollbackNeeded
from zero2all.train.hooks.replica_check import ReplicaCheck, Rerun
from zero2all.train.hooks.reports import RunLog, UpdateRatios
from zero2all.train.hooks.stragglers import Stragglers
from zero2all.train.hooks.validation import Validation
from zero2all.train.micro_batch import memory_settings
from zero2all.train.objective import Batches
from zero2all.train.resume import load_checkpoint
from zero2all.train.run_data import open_data
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep
from zero2all.train.step_timer import scheduled_garbage_collection, unfinished_part
from zero2all.train.train_step import StepPlan, train_step
from zero2all.train.validate import Scores


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


class Trainer:
    """A run while it trains: `fit` is the loop, the hooks are what happens around its steps."""

    collect_garbage: Callable[[int], None]

    def __init__(
        self,
        context: RunContext,
        state: TrainState,
        log: RunLog,
        stop: StopRequest,
        make_decode: Callable[[], Decode] | None = None,
        brief: bool = False,
        watch: Callable[[int], None] = lambda _step: None,
    ) -> None:
        """`make_decode` loads the tokenizer's decoder, for the pages that explain incidents. `brief`: the notes of the
        start go to the metrics only. `watch` is told of each step that was read."""
        self.watch = watch
        self.context, self.state, self.log, self.stop, self.brief = context, state, log, stop, brief
        self.config, self.world, self.store = context.config, context.world, context.store
        self.guards = Guards(context, state, log, make_decode)
        self.validation = Validation(context, state, log)
        self.checkpoints = Checkpointing(context, state, log, self.guards, self.validation)
        self.anneal = Anneal(context, state, log, self.guards)
        self.stragglers = Stragglers(self.world, log)
        self.hooks: list[Hook] = [
            UpdateRatios(state, self.world, log, self.config.track.update_ratios_every_steps),
            *([] if state.outer is None else [Diloco(context, state, log, state.outer)]),
            Rerun(context, state),
            self.stragglers,
            self.anneal,
            ReplicaCheck(context, state, log, self.checkpoints.saves),
            self.validation,
            self.checkpoints,
            self.guards,  # last, because it may go back to a checkpoint
        ]
        self.pending: tuple[PendingStep, float] | None = None
        """The step that has not been read yet, and the seconds the host waited for its data."""
        self.is_over = False
        self.trained_tokens = 0
        """In steps of this attempt: without those that were skipped, or that other groups trained without this one."""

    def fit(self, command_started: float | None = None) -> TrainSummary:
        """Train to the last step."""
        started = time.perf_counter()
        with closing(self.guards):
            self.begin()
            with self.running():
                first_step = self.state.step
                self.apply_changes()
                while not self.is_over:  # again after a rollback, for an anneal, or where other groups went on
                    with closing(self.open_batches()) as loader, self.rolling_back():
                        for batch in loader:
                            beat("step", self.state.step)
                            fault_point("step", self.state.step + 1, batch=batch, state=self.state)
                            self.enter_stage()
                            if self.guards.skips(batch):
                                self.skip(batch)
                            else:
                                self.step(batch, loader.wait_seconds)
                            if self.apply_changes():
                                break
                            beat("data", self.state.step)
                        else:
                            self.read_results()
                            self.guards.judge_end()
                            self.is_over = True
            self.end(first_step)
        return self.summary(time.perf_counter() - started, command_started)

    def step(self, batch: Batch, wait_seconds: float) -> None:
        """Queue a step on the device, read the step before it, then do what is due."""
        state, plan = self.state, self.plan()
        for hook in self.hooks:
            hook.before_step(batch, plan)
        pending = train_step(state, batch, len(state.data.channels), self.config, self.world, plan)
        self.trained_tokens += batch.global_tokens
        for hook in self.hooks:
            hook.after_step(pending)
        self._drop_failed_cuda_graph()
        self.collect_garbage(state.step)
        self.read_results()  # of the step before, while the device computes this one
        self.pending = (pending, wait_seconds)
        is_last = state.step == state.last_step  # end() validates and saves
        if self.context.on_cpu or is_last or any(hook.is_due(state.step) for hook in self.hooks):
            self.read_results()  # of this step
        for hook in self.hooks:
            if not is_last and hook.is_due(state.step):
                hook.at_pause()
        self.checkpoints.report_finished()

    def begin(self) -> None:
        """Restore the guards, and check what can be checked without training."""
        context, state = self.context, self.state
        beat("start", state.step)
        fault_point("start", state.step)
        watch_device(unfinished_part)
        facts: dict[str, Any] = {"notes": context.notes, "environment": context.environment}
        if self.world.device.type == "cuda":
            facts["memory_bytes"] = torch.cuda.get_device_properties(self.world.device).total_memory
        self.log.event("start", facts)
        if context.checkpoint is not None:
            self._restore(context.checkpoint)
        with state.tensors() as tensors:
            checkpoint_bytes = self.store.prepare(tensors)
        self.checkpoints.prepare_memory()
        if context.objective is not None:
            context.objective.begin(state)
        if state.step < state.last_step:
            notes = self._check_before_first_step(checkpoint_bytes)
            self.log.event("sanity", {"notes": notes})
            self.log.say(*(() if self.brief else notes))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps: the progress bar, garbage collection on a schedule, what hooks do in the background. They
        begin only once a checkpoint with values that no training writes has been left for an older one."""
        tokens = self.state.tokens_at_end(self.config.train.tokens_per_step)
        with (
            scheduled_garbage_collection() as self.collect_garbage,
            self.log.progress_bar(tokens),
            ExitStack() as stack,
        ):
            self._roll_back_damaged_checkpoints()
            for hook in self.hooks:
                stack.enter_context(hook.running())
            yield

    def open_batches(self) -> Batches:
        """The batches from here to the last step. The position in the data is the number of tokens seen, so a changed
        train.tokens_per_step repeats and skips nothing."""
        data, state, batch = self.config.data, self.state, self.world.mesh.batch
        self._set_rope_tables()
        own = None if self.context.objective is None else self.context.objective.batches(state)
        if own is not None:
            return own
        options = LoaderOptions(
            *self.config.batch_place(batch.rank, batch.size),
            documents=data.document_mask,
            prefetch_steps=data.prefetch_steps,
            readers=data.readers,
            reader_kind=data.reader_kind,
            on_problem=self.log.warn_from_any_rank,
        )
        steps_left = max(0, state.last_step - state.step)
        per_step = self.config.train.tokens_per_step
        loader = batches_on(self.world.device, state.data, per_step, state.tokens, steps_left, options)
        beat("data", state.step)
        return loader

    def enter_stage(self) -> None:
        """If the next step begins a new stage: set its RoPE tables, restart the guards."""
        state, stages, anneal = self.state, self.config.stages, self.state.anneal
        name = next((stage.name for stage in reversed(stages) if stage.from_step <= state.step), "main")
        anneals = anneal is not None and anneal.mixture is not None and anneal.from_step <= state.step
        name = ANNEAL_STAGE if anneals else name
        if name == state.stage:
            return
        self.read_results()  # the last step of a stage is judged by the stage's own statistics
        warm_up()
        self._set_rope_tables()
        if state.stage:
            self.guards.stage_begins()
        state.stage = name
        if stages or anneals:
            self.log.event("stage", {"name": name, "seq_len": state.data.segment_at(state.tokens).seq_len})

    def plan(self) -> StepPlan:
        """What is decided about a step before it begins."""
        state, config = self.state, self.config
        course = config.schedule, config.stages, state.anneal
        plan = StepPlan(
            lr=learning_rate(state.step, config.train.steps, config.optim.lr_max, *course),
            momentum=muon_momentum(state.step, config.train.steps, config.optim, *course),
            weight_decay_share=weight_decay_share(state.step, config.train.steps, config.optim),
            stop_requested=self.stop.requested or self.checkpoints.shard_check.is_found,
            folder_changed=self.anneal.found,
            pace=self.stragglers.own,
            objective=self.context.objective,
        )
        return self.guards.plan(plan)

    def skip(self, batch: Batch) -> None:
        """Skip a batch: only the step and the position in the data advance."""
        self.read_results()
        self.state.step += 1
        self.state.tokens += batch.global_tokens
        for hook in self.hooks:
            hook.after_skip()
        self.log.show_progress(self.state.tokens, f"step {self.state.step} skipped")

    def apply_changes(self) -> bool:
        """Let every hook take up what has changed from outside (a request to anneal, weights of other groups). True:
        the data must be opened again, at another position, for another end or with another mixture."""
        found = [hook.apply_changes() for hook in self.hooks]  # of all of them, not only up to the first
        return any(found)

    def read_results(self) -> None:
        """Read the pending step, if there is one: log it and let the hooks see it; the guards judge it."""
        if self.pending is None:
            return
        (pending, wait_seconds), self.pending = self.pending, None
        result = pending.result()
        data_seconds = self.log.steps.report(result, wait_seconds)
        if result.step == 1 and self.context.checkpoint is None:  # imported weights are no new model
            self.log.say(*sanity.check_first_loss(result.loss, self.config.model))
        said = f"step {result.step} loss {result.loss:.3f}"
        if (objective := self.context.objective) is not None:
            values = objective.report(dict(zip(objective.metrics, result.numbers, strict=True)))
            said = f"step {result.step} {objective.shown} {values[objective.shown]:.3f}"
            # Drawn answers fill a row only in part: the other steps are taken to be as long as those so far.
            self.log.set_total(result.tokens[1] * self.state.last_step // result.step)
        self.log.show_progress(result.tokens[1], said)
        for hook in self.hooks:
            hook.after_result(result, data_seconds)
        self.watch(result.step)

    @contextmanager
    def rolling_back(self) -> Iterator[None]:
        """Go back to a checkpoint where the guards ask for it in the block."""
        try:
            yield
        except RollbackNeeded as needed:
            self.rollback(needed.decision)

    def rollback(self, decision: Rollback) -> None:
        """Go back to an earlier checkpoint, and skip the data that caused it. Only once it is read are newer ones
        moved."""
        state, left_at = self.state, self.state.step
        beat("start", left_at)
        self.pending = None
        checkpoint = self.store.at(decision.to_step)
        withdrawn = self.store.go_back_to(decision.to_step, decision.reason)
        load_checkpoint(state, checkpoint)
        self._restore(checkpoint)
        state.data, _ = open_data(self.config, self.context.workspace, checkpoint, state.anneal)
        self.log.steps.end_pause()
        self.log.show_progress(state.tokens, f"back at step {state.step}")
        facts = {"from_step": left_at, "to_step": decision.to_step, "withdrawn": withdrawn, "reason": decision.reason}
        self.log.event("rollback", facts)

    def end(self, first_step: int) -> None:
        """Validate, and save if there was a step since `first_step`. A run whose last state cannot be saved fails."""
        self.checkpoints.shard_check.stop_if_found()
        self.validation.at_pause()
        if self.state.step >= self.config.train.steps:
            self.validation.note_last_loss()
        if self.state.step > first_step:
            self.checkpoints.save_now()
        beat("end", self.state.step)
        for hook in self.hooks:
            hook.at_end()

    def summary(self, seconds: float, command_started: float | None) -> TrainSummary:
        """How the run ended, also as an event."""
        state, steps = self.state, self.log.steps
        first_loss = None if steps.first_at is None or command_started is None else steps.first_at - command_started
        self.log.event("finish", {"tokens": state.tokens, "seconds": seconds, "first_loss_seconds": first_loss})
        return TrainSummary(
            run=self.config.train.name,
            step=state.step,
            tokens=state.tokens,
            seconds=seconds,
            tokens_per_second=self.trained_tokens / seconds if seconds else 0.0,
            loss=steps.last.loss if steps.last else None,
            channel_losses=steps.by_channel(steps.last) if steps.last else {},
            held_out=self.validation.losses,
            held_out_scores=self.validation.scores,
            first_loss_seconds=first_loss,
        )

    def _check_before_first_step(self, checkpoint_bytes: int) -> list[str]:
        """Disk space for checkpoints, memory, token ids that the model lacks."""
        context, config, state = self.context, self.config, self.state
        keep = config.checkpoint
        existing = [step_of(folder) for folder in list_checkpoints(context.run)]
        margin, kept_steps = config.guards.rollback_margin_steps, keep.every_steps * (keep.keep_last - 1)
        retention = Retention(keep.keep_last, keep.keep_every_steps, keep_best=keep.keep_best)
        coming = sanity.saved_steps(state.step, state.last_step, keep.every_steps)
        disk = partial(sanity.check_disk, context.run, retention, coming)
        notes = [self.world.run_on_rank0(lambda: disk(checkpoint_bytes, existing))]
        if keep.every_steps and kept_steps < margin and config.guards.loss_spike == "rollback":
            notes.append(
                f"warning: after spikes no checkpoint may be old enough to go back to: {keep.keep_last} are kept, one "
                f"every {counted(keep.every_steps, 'step')}, and guards.rollback_margin_steps is {margin}. "
                f"Raise checkpoint.keep_last, or save less often, so that those that are kept are older"
            )
        if self.world.device.type == "cuda":
            settings = memory_settings(config, state.model.ops, self.world.mesh, state.micro_batch_samples)
            notes += sanity.memory_notes(config.model, settings, torch.cuda.mem_get_info(self.world.device)[1])
            notes += sanity.communication_notes(config.model, settings)
        rows = config.train.tokens_per_step // state.data.segment_at(state.tokens).seq_len
        sanity.check_batch_ids([read_batch(state.data, state.tokens, rows)], config.model.vocab_ids)
        return notes

    def _drop_failed_cuda_graph(self) -> None:
        """Continue without a CUDA graph when a pass could not be captured."""
        graph = self.state.cuda_graph
        if graph is not None and graph.problem:
            self.state.cuda_graph = None
            self.log.warn(
                f"passes can no longer be captured as a CUDA graph: {graph.problem}. They run without one from here on."
            )

    def _roll_back_damaged_checkpoints(self) -> None:
        """Roll back while the checkpoint that was loaded holds values that no training writes."""
        while self.context.checkpoint is not None:
            with self.state.tensors() as tensors:
                bad = self.store.find_damage(tensors)
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
        """Restore guards and stage. The stage is that of the checkpoint's last step: one that begins with the next step
        is yet to be entered."""
        self.guards.restore(checkpoint)
        self.validation.restore(checkpoint)
        self.state.stage = str(checkpoint.record.get("stage") or "")

    def _set_rope_tables(self) -> None:
        """New RoPE tables where the stage of the next step has another theta or scaling."""
        state, model = self.state, model_at(self.state.step, self.config.model, self.config.stages)
        if (model.rope_theta, model.rope_scaling) != (state.model.config.rope_theta, state.model.config.rope_scaling):
            state.model.config = model
            cos, sin = rope_tables(model, model.max_seq_len, self.world.device)
            state.model.cos, state.model.sin = cos.to(state.model.cos.dtype), sin.to(state.model.sin.dtype)
