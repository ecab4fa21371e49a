"""DiLoCo: a run exchanges weights with the other groups every `diloco.every` steps (`zero2all.diloco`)."""

import json
from dataclasses import asdict, replace

import torch

from zero2all.common.errors import PeerFailureError
from zero2all.common.peers import open_peers
from zero2all.common.secret import run_secret
from zero2all.common.signals import StopRequest
from zero2all.config import RunConfig, config_values, flat_values
from zero2all.diloco.link import GroupLink, Membership, link_facts, own_group
from zero2all.diloco.outer_optimizer import OuterOptimizer, RoundReport, round_values
from zero2all.diloco.ranks import Layout, RankLink, expected_of
from zero2all.resilience.heartbeat import beat
from zero2all.train.context import RunContext
from zero2all.train.hooks import Hook
from zero2all.train.hooks.reports import RunLog
from zero2all.train.state import TrainState
from zero2all.train.step_stats import PendingStep

LEAST_MISSED_ROUNDS = 0.05
"""Less is not worth a line at the end."""


class Diloco(Hook):
    """Exchanges weights with the other groups where that is due, and takes over their state if they went on without
    this one."""

    def __init__(self, context: RunContext, state: TrainState, log: RunLog, outer: OuterOptimizer) -> None:
        self._context, self._state, self._log, self._outer = context, state, log, outer
        self._last_groups = tuple(range(context.config.diloco.count))
        """Those in the last round."""

    def after_step(self, _pending: PendingStep) -> None:
        """Begin a round, or take the results of one."""
        self.after_skip()

    def after_skip(self) -> None:
        """After a step that was skipped, which the other groups count too."""
        outer, world = self._outer, self._context.world
        outer.start(self._state.step, self._state.tokens)
        reports = outer.finish(self._state.step)
        if reports:
            square = torch.tensor(sum(report.squared_norm for report in reports), dtype=torch.float64)
            square = world.mesh.world.sum(square.to(world.device))
            self._log.values(round_values(reports, square, outer))
            for report in (each for each in reports if each.steps):
                self._say_who_came(report)

    def _say_who_came(self, report: RoundReport) -> None:
        before, now, own = set(self._last_groups), set(report.groups), self._context.config.diloco.group
        if self._last_groups != report.groups:
            facts = {"round": report.round, "groups": report.groups, "before": self._last_groups}
            self._log.event("diloco", facts)
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
        step, tokens = self._outer.adopt()
        if not left_at <= step <= state.last_step:
            raise PeerFailureError(
                f"Another group gave weights of step {step}; this group is at step {left_at} of {state.last_step}. "
                f"Nothing was saved. Look for the cause there, and start this group again."
            )
        state.step, state.tokens = step, tokens
        self._log.steps.end_pause()
        self._log.event("diloco", {"adopted": True, "from_step": left_at, "to_step": state.step})
        self._log.say(
            f"the other groups went on without this one: it takes over their weights and continues at step {state.step}"
        )
        return True

    def at_end(self) -> None:
        """Say how many of the run's tokens are not in the weights, because a group was lost or late; then stay until
        the others need nothing more."""
        config, state = self._context.config, self._state
        every, groups = config.diloco.every, config.diloco.count
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
    if not config.diloco.groups:
        return config
    return replace(config, diloco=replace(config.diloco, group=own_group(config.diloco)))


def open_ranks(context: RunContext, state: TrainState, outer: OuterOptimizer, stop: StopRequest) -> RankLink:
    """Meet the other groups; UsageError where one does not come, or has another config or other data."""
    config, world, checkpoint = context.config, context.world, context.checkpoint
    peers = open_peers(world.control, config.parallel.timeout_seconds)
    layouts = [Layout(**values) for values in peers.gather(asdict(outer.layout))]
    facts = {**link_facts(flat_values(config_values(config))), "data": state.data.fingerprint, "processes": world.size}
    record = {} if checkpoint is None else checkpoint.record.get("outer") or {}
    links: list[GroupLink] = []

    def join() -> None:
        membership = Membership(
            config=config.diloco,
            run=config.train.name,
            facts=json.loads(json.dumps(facts, default=str)),
            secret=run_secret(context.run),
            expected=expected_of(layouts),
            join_seconds=config.parallel.join_seconds,
            history=str(record.get("history", "")),
            is_stopped=lambda: stop.requested,
        )
        links.append(GroupLink(membership))

    peers.run_on_rank0(join)
    return RankLink(peers, layouts, links[0] if links else None)
