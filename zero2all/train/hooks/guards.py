"""The guards of a run as the trainer sees them: what a step may do, what all processes must do after it.

After the one reduction of a step all ranks have the same stats, so the guards of every rank decide the same (limits
of the next step, weights of its rows, data to skip, rollback, stop) and need not communicate (`guards.watch`). Only
rank 0 reports: events, incident pages, the state in the checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import AnomalyError
from zero2all.model.config import parameter_counts
from zero2all.packed.loader import Batch
from zero2all.packed.mixture import TrainingData
from zero2all.train.checkpoints.load import Checkpoint, reading_record
from zero2all.train.checkpoints.manifest import NOT_GOOD
from zero2all.train.context import RunContext
from zero2all.train.guards.advice import Facts
from zero2all.train.guards.detector import GuardFinding
from zero2all.train.guards.documents import Decode
from zero2all.train.guards.incident import IncidentWriter, make_incident, usual_channels
from zero2all.train.guards.policy import Action, Continue, Rollback, Stop
from zero2all.train.guards.watch import RunGuards
from zero2all.train.hooks import Hook
from zero2all.train.hooks.reports import RunLog
from zero2all.train.state import TrainState
from zero2all.train.step_stats import StepResult
from zero2all.train.train_step import StepPlan


class RollbackNeeded(Exception):  # noqa: N818
    """The guards have decided to go back to a checkpoint."""

    def __init__(self, decision: Rollback) -> None:
        self.decision = decision


class Guards(Hook):
    """The guards of a run, seen from one process."""

    def __init__(
        self, context: RunContext, state: TrainState, log: RunLog, make_decode: Callable[[], Decode] | None
    ) -> None:
        """Created by all ranks at the same point; only rank 0 has metrics."""
        self._context, self._state, self._log = context, state, log
        config, store, data = context.config, context.store, state.data
        self._config, self._world, self._store = config, context.world, store
        warmup, clip = config.schedule.warmup_steps, config.optim.clip_grad_norm
        self._guards = RunGuards(context.run, config.guards, warmup, store.fence, context.world, clip)
        self._pages: IncidentWriter | None = None
        self._incidents = 0
        self._overflows = 0
        self._is_marked = False
        """Whether the checkpoint that was loaded was saved in doubt."""
        if log.has_metrics:
            corpus = context.workspace.corpus
            self._pages = IncidentWriter(self._guards.folder, data, corpus, make_decode, store.fence)

    def skips(self, batch: Batch) -> bool:
        """Whether the data of this batch is skipped."""
        return self._guards.ledger.skips(self._state.tokens, self._state.tokens + batch.global_tokens)

    def plan(self, plan: StepPlan) -> StepPlan:
        """The plan of the next step, with its limits."""
        return replace(plan, limits=self._guards.refusal_limits(self._state.step + 1))

    def after_result(self, result: StepResult, _data_seconds: float) -> None:
        """Judge a step. AnomalyError ends the run, with the page that explains it; RollbackNeeded: it goes back."""
        self._carry_out(*self.observe(result))

    def observe(self, result: StepResult) -> tuple[Action, Path | None]:
        """Let the guards judge a step; returns what all processes must do now, and on rank 0 the page that explains
        it."""
        if self._is_overflow(result):
            return Continue("the loss scale was too large for this step and has been halved"), None
        pairs = zip(self._state.data.channels, result.channel_losses, strict=True)
        losses = {name: loss for name, loss in pairs if loss is not None}
        seen = self._guards.observe(result, losses, self._store)
        return seen.action, self._report(seen.findings, seen.action, result)

    def judge_end(self) -> None:
        """Judge the state after the last step: it may be too bad to end with."""
        self._carry_out(self._guards.at_end(self._state.step, self._is_marked, self._store))

    def _carry_out(self, action: Action, page: Path | None = None) -> None:
        if isinstance(action, Stop):
            if page is None:
                raise AnomalyError(action.reason)
            raise AnomalyError(f"{action.reason} {page} shows the step, its documents and what to try.")
        if isinstance(action, Rollback):
            raise RollbackNeeded(action)

    def _is_overflow(self, result: StepResult) -> bool:
        """Whether only float16's backward pass overflowed, which is how the loss scale is found, if not too often."""
        overflowed = math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
        self._overflows = self._overflows + 1 if overflowed else 0
        usual = self._config.train.precision == "float16" and 0 < self._overflows <= USUAL_OVERFLOWS
        if usual:
            self._log.event("loss_scale", {"halved": True, "in_a_row": self._overflows}, result.step)
        return usual

    def _report(self, findings: Sequence[GuardFinding], action: Action, result: StepResult) -> Path | None:
        """Event rows for the board, a page with the documents, and a line on the terminal; on rank 0."""
        if not findings or self._pages is None:
            return None
        row_losses = _row_losses(result)
        incident = make_incident(
            self._context.run.name,
            findings,
            action,
            self._guards.detector,
            self._facts(findings[0], result, row_losses),
            row_losses,
        )
        page = self._pages.submit(incident)
        self._incidents += 1
        for finding in findings:
            data = {**finding.as_json(), "action": incident.action, "done": incident.done, "page": page.name}
            self._log.event(EVENT_KINDS.get(finding.kind, finding.kind), data, finding.step)
        if not isinstance(action, Stop):  # its error says it
            self._log.say(f"{action.reason}. {page} shows the documents and what to try.")
        return page

    def _facts(self, finding: GuardFinding, result: StepResult, row_losses: Sequence[float | None]) -> Facts:
        config, guards = self._config, self._guards
        adam = config.optim.kind.startswith("adamw") or config.optim.kind == "muon"
        limits = guards.limits(finding.step)
        return Facts(
            kind=finding.kind,
            step=finding.step,
            lr=result.lr,
            lr_max=config.optim.lr_max,
            warmup_steps=config.schedule.warmup_steps,
            beta1=config.optim.beta1 if adam else None,
            beta2=config.optim.beta2 if adam else None,
            eps=config.optim.eps if adam else None,
            clip_grad_norm=config.optim.clip_grad_norm,
            usual_grad_norm=limits.usual_grad_norm,
            parameters=parameter_counts(config.model)["total"],
            earlier_incidents=self._incidents,
            channels_before=usual_channels(guards.detector, finding.step),
            channels_now=finding.details.get("channel_losses"),
            row_losses=[loss for loss in row_losses if loss is not None],
            usual_loss=limits.usual_loss,
        )

    def read_from(self, data: TrainingData) -> None:
        """The order of the data has changed: look up the documents of rows in `data` from here on."""
        if self._pages is not None:
            self._pages.read_from(data)

    def stage_begins(self) -> None:
        """Forget the statistics of the stage before."""
        self._guards.restart()

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint, which keeps that of rank 0; the others have the same and need not collect it."""
        return self._guards.state() if self._world.is_first else None

    def doubt(self, step: int) -> str | None:
        """Why a rollback must not use the state after `step`; None: as far as can be told it is good."""
        return self._guards.doubt(step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; later decisions stay."""
        state = checkpoint.record.get("guards")
        with reading_record(checkpoint):
            if state is not None:
                self._guards.restore(state, checkpoint.step)
        self._is_marked = NOT_GOOD in checkpoint.manifest

    def close(self) -> None:
        """Finish the pages; what could not be written is logged."""
        if self._pages is not None:
            finished = self._pages.close()
            problems = [*self._pages.problems, *([] if finished else ["an incident page was not finished in time"])]
            for problem in problems:
                self._log.event("warning", {"problem": problem})


USUAL_OVERFLOWS = 24
"""Halvings in a row from the largest scale to 1."""
EVENT_KINDS = {"loss_spike": "spike", "grad_spike": "spike", "loss_drop": "drop", "nonfinite": "skip"}


def _row_losses(result: StepResult) -> list[float | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        means = result.row_nats / result.row_counts
    return [float(mean) if np.isfinite(mean) else None for mean in means]
