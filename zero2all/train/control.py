"""The guards of a run as the loop sees them: what a step may do, what all processes must do after it.

After the one reduction of a step all ranks have the same figures, so the guards of every rank decide the same (limits
of the next step, weights of its rows, data to skip, rollback, stop) and need not communicate (`guards.watch`). Only
rank 0 reports: events, incident pages, the state in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zero2all.model.config import parameter_counts
from zero2all.packed.loader import rank_rows
from zero2all.packed.mixture import TrainingData
from zero2all.track.writer import MetricsWriter
from zero2all.train.checkpoints.run_lock import Fence
from zero2all.train.guards.advice import Facts
from zero2all.train.guards.documents import Decode
from zero2all.train.guards.findings import Finding
from zero2all.train.guards.incident import IncidentWriter, make_incident, usual_channels
from zero2all.train.guards.policy import Action, Continue, Stop
from zero2all.train.guards.repeats import Repeat, repeated_shards
from zero2all.train.guards.rows import RowFinder
from zero2all.train.guards.watch import Checkpoints, RunGuards
from zero2all.train.setup import Prepared
from zero2all.train.step import StepPlan, StepResult


class Control:
    """The guards of a run, seen from one process."""

    def __init__(
        self,
        prepared: Prepared,
        metrics: MetricsWriter | None,
        make_decode: Callable[[], Decode] | None,
        fence: Fence,
        say: Callable[[str], None],
    ) -> None:
        """Created by all ranks at the same point; only rank 0 has `metrics`. `fence` is checked before every write."""
        self._say = say
        config, world, data = prepared.config, prepared.world, prepared.data
        self._config, self._world, self._metrics, self._run = config, world, metrics, prepared.run
        warmup, clip = config.schedule.warmup_steps, config.optim.clip_grad_norm
        self._guards = RunGuards(prepared.run, config.guards, warmup, data, config.data.quarantine, fence, world, clip)
        self._pages: IncidentWriter | None = None
        self._incidents = 0
        self._overflows = 0
        if metrics is not None:
            self._pages = IncidentWriter(self._guards.folder, data, prepared.workspace.corpus, make_decode, fence)

    def look_for_repeats(self, data: TrainingData, step: int) -> None:
        """Compare the shards with each other before the first step, and report those that repeat another."""
        if self._config.data.quarantine == "off":
            return
        repeats = self._world.run_on_rank0(lambda: [asdict(repeat) for repeat in repeated_shards(data.splits)])
        findings = [Repeat(**repeat).finding(step, (0, 0)) for repeat in repeats]
        self._guards.note_shards(findings, step)
        self._report(findings, Continue("noted before the first step"), None)

    def skips(self, first: int, end: int) -> bool:
        """Whether the data of a global batch of tokens `first` to `end` is skipped."""
        return self._guards.ledger.skips(first, end)

    def plan(
        self, step: int, lr: float, first_token: int, rows: int, stop_requested: bool, folder_news: bool
    ) -> StepPlan:
        """The plan of `step`, which reads `rows` rows from `first_token` of the run on."""
        weights = self._guards.row_weights(step, first_token, rows)
        limits = self._guards.refusal_limits(step)
        return StepPlan(lr, limits, self._own(weights, rows), stop_requested, folder_news)

    def _own(self, weights: np.ndarray | None, rows: int) -> torch.Tensor | None:
        """This process's part of weights for all rows."""
        if weights is None:
            return None
        first, own, per_rank = rank_rows(
            rows, *self._config.parallel.batch_place(self._world.mesh.batch.rank, self._world.mesh.batch.size)
        )
        part = torch.zeros(per_rank)
        part[:own] = torch.from_numpy(weights[first : first + own])
        return part

    def observe(
        self, result: StepResult, channels: Sequence[str], checkpoints: Checkpoints
    ) -> tuple[Action, Path | None]:
        """Let the guards judge a step; returns what all processes must do now, and on rank 0 the page that explains
        it."""
        if self._is_overflow(result):
            return Continue("the loss scale was too large for this step and has been halved"), None
        losses = {name: loss for name, loss in zip(channels, result.channel_losses, strict=True) if loss is not None}
        seen = self._guards.observe(
            result.step,
            result.loss,
            result.grad_norm,
            losses,
            result.tokens,
            checkpoints,
            result.row_nats,
            result.row_counts,
            result.core_loss,
        )
        # Shards are judged together, so several may be named at once; each has a page with its own documents.
        named = [finding for finding in seen.findings if "shard" in finding.details]
        page = self._report([one for one in seen.findings if one not in named], seen.action, result)
        for finding in named:
            self._report([finding], seen.action, result)
        return seen.action, page

    def _is_overflow(self, result: StepResult) -> bool:
        """Whether only float16's backward pass overflowed, which is how the loss scale is found, if not too often."""
        overflowed = math.isfinite(result.loss) and not math.isfinite(result.grad_norm)
        self._overflows = self._overflows + 1 if overflowed else 0
        usual = self._config.train.precision == "float16" and 0 < self._overflows <= USUAL_OVERFLOWS
        if usual and self._metrics is not None:
            self._metrics.event("loss_scale", result.step, {"halved": True, "in_a_row": self._overflows})
        return usual

    def _report(self, findings: Sequence[Finding], action: Action, result: StepResult | None) -> Path | None:
        """Event rows for the board, a page with the documents, and a line on the terminal; on rank 0."""
        if not findings or self._metrics is None or self._pages is None:
            return None
        row_losses = [] if result is None else _row_losses(result)
        incident = make_incident(
            self._run.name,
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
            self._metrics.event(EVENT_KINDS.get(finding.kind, finding.kind), finding.step, data)
        if not isinstance(action, Stop):  # its error says it
            what = findings[0].text if "shard" in findings[0].details else action.reason
            self._say(f"{what}. {page} shows the documents and what to try.")
        return page

    def _facts(self, finding: Finding, result: StepResult | None, row_losses: Sequence[float | None]) -> Facts:
        config, guards = self._config, self._guards
        adam = config.optim.kind.startswith("adamw") or config.optim.kind == "muon"
        limits = guards.limits(finding.step)
        return Facts(
            kind=finding.kind,
            step=finding.step,
            lr=config.optim.lr_max if result is None else result.lr,
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
            shards_named=[f"shard {one.shard} of {one.source}" for one in guards.quarantine.shards],
        )

    def data_changed(self, data: TrainingData) -> None:
        """The order of the data has changed: look up the documents of rows in `data` from here on."""
        if self._guards.finder is not None:
            self._guards.finder = RowFinder(data)
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

    def at_end(self, step: int, is_marked: bool, checkpoints: Checkpoints) -> Action:
        """Whether the run may end with `step`; `is_marked`: what it was resumed from was saved in doubt."""
        return self._guards.at_end(step, is_marked, checkpoints)

    def restore(self, state: Mapping[str, Any] | None, step: int) -> list[str]:
        """Continue at `step`, where `state` was saved; later decisions stay. Returns what could not be restored."""
        return [] if state is None else self._guards.restore(state, step)

    def close(self) -> list[str]:
        """Finish the pages; returns what could not be written."""
        if self._pages is None:
            return []
        finished = self._pages.close()
        return [*self._pages.problems, *([] if finished else ["an incident page was not finished in time"])]


USUAL_OVERFLOWS = 24
"""Halvings in a row from the largest scale to 1."""
EVENT_KINDS = {"loss_spike": "spike", "grad_spike": "spike", "loss_drop": "drop", "nonfinite": "skip"}


def _row_losses(result: StepResult) -> list[float | None]:
    with np.errstate(invalid="ignore", divide="ignore"):
        means = result.row_nats / result.row_counts
    return [float(mean) if np.isfinite(mean) else None for mean in means]
