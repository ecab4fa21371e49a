"""Groups over a slow link (DiLoCo): a run exchanges weights with the other groups every `parallel.slow_link.every`
steps. What is exchanged: `zero2all.train.outer`; the link: `zero2all.parallel.group_link`."""

from __future__ import annotations

from dataclasses import replace

import torch

from zero2all.common.secret import run_secret
from zero2all.common.signals import StopRequest
from zero2all.config import RunConfig, config_values, flat_values
from zero2all.parallel.group_link import GroupLink, link_facts, own_group
from zero2all.resilience.heartbeat import beat
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook
from zero2all.train.hooks.reports import RunLog
from zero2all.train.outer.optimizer import OuterOptimizer, RoundReport, round_values
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep

LEAST_MISSED_ROUNDS = 0.05
"""Less is not worth a line at the end."""


class Diloco(Hook):
    """Exchanges weights with the other groups where that is due, and takes over their state if they went on without
    this one."""

    def __init__(self, context: RunContext, state: TrainState, log: RunLog, outer: OuterOptimizer) -> None:
        self._context, self._state, self._log, self._outer = context, state, log, outer
        self._last_groups = tuple(range(context.config.parallel.groups))
        """Those in the last round."""

    def after_step(self, _pending: PendingStep) -> None:
        """Begin a round, or take the results of one."""
        self.after_skip()

    def after_skip(self) -> None:
        """The same: the other groups count skipped steps too."""
        outer, world = self._outer, self._context.world
        outer.start(self._state.step, self._state.tokens)
        reports = outer.finish(self._state.step)
        if reports and outer.link is not None:
            square = torch.tensor(sum(report.squared_norm for report in reports), dtype=torch.float64)
            square = world.mesh.world.sum(square.to(world.device))
            self._log.values(round_values(reports, square, outer, outer.link))
            for report in (each for each in reports if each.steps):
                self._say_who_came(report)

    def _say_who_came(self, report: RoundReport) -> None:
        before, now, own = set(self._last_groups), set(report.groups), self._context.config.parallel.slow_link.group
        if self._last_groups != report.groups:
            facts = {"round": report.round, "groups": report.groups, "before": self._last_groups}
            self._log.event("slow_link", facts)
        for group in before - now - {own}:
            self._log.say(f"group {group} did not come to round {report.round}: training goes on without it")
        for group in now - before - {own}:
            self._log.say(f"group {group} is back in round {report.round}")
        if own in before - now:
            self._log.say(f"this group came too late to round {report.round}: the others went on without it")
        elif own in now - before:
            self._log.say(f"this group takes part again, in round {report.round}")
        self._last_groups = report.groups

    def is_due(self, _step: int) -> bool:
        """Whether the other groups went on without this one; its last step is read before it takes over theirs."""
        return self._outer.is_behind

    def apply_changes(self) -> bool:
        """Take over the state of the other groups, if they went on without this one."""
        state = self._state
        if not self._outer.is_behind:
            return False
        left_at = state.step
        state.step, state.tokens = self._outer.adopt()
        self._log.steps.end_pause()
        self._log.event("slow_link", {"adopted": True, "from_step": left_at, "to_step": state.step})
        self._log.say(
            f"the other groups went on without this one: it takes over their weights and continues at step {state.step}"
        )
        return True

    def at_end(self) -> None:
        """Say how many of the run's tokens are not in the weights, because a group was lost or late; then stay until
        the others need nothing more."""
        config, state = self._context.config, self._state
        every, groups = config.parallel.slow_link.every, config.parallel.groups
        for group, steps in sorted(self._outer.missed.items()):
            if steps / every >= LEAST_MISSED_ROUNDS:
                tokens = steps * config.train.tokens_per_step / groups
                self._log.say(
                    f"{steps / every:.1f} rounds were made without group {group}: about {tokens:,.0f} "
                    f"of the {state.tokens:,} tokens are not in the weights"
                )
        beat("end", state.step)
        while self._outer.serve_last(state.step, state.tokens):
            beat("end", state.step)


def with_group(config: RunConfig) -> RunConfig:
    """The config with the number of this group, where there are several."""
    slow_link = config.parallel.slow_link
    if not slow_link.groups:
        return config
    slow_link = replace(slow_link, group=own_group(slow_link))
    return replace(config, parallel=replace(config.parallel, slow_link=slow_link))


def open_link(context: RunContext, state: TrainState, outer: OuterOptimizer, stop: StopRequest) -> GroupLink:
    """Meet the other groups; UsageError where one does not come, or has another config or other data."""
    config, world, checkpoint = context.config, context.world, context.checkpoint
    facts = {**link_facts(flat_values(config_values(config))), "data": state.data.fingerprint}
    record = {} if checkpoint is None else checkpoint.record.get("outer") or {}
    return GroupLink(
        config.parallel.slow_link,
        config.train.name,
        world.rank,
        world.size,
        facts,
        config.parallel.join_seconds,
        run_secret(context.run),
        outer.expected(),
        history=str(record.get("history", "")),
        is_stopped=lambda: stop.requested,
    )
