"""All guards of a run as one object with one state.

The loop asks for limits before a step, calls `observe` when the values of a step have arrived, and carries out the
action it returns. A rollback restores the statistics (the detector's window) but not the decisions (skipped data),
which are also written to the run's folder before they are carried out.

Every process of a run has guards of its own, which come to the same verdicts, because they see the same values in the
same order. They communicate only at the start and where there is something to decide: rank 0 reads the list of good
checkpoints and writes the records, and an error there is raised on all ranks. So nothing that differs between ranks
(time, files, the rank itself) may enter a verdict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from zero2all.config.training import GuardsConfig
from zero2all.parallel.world import World
from zero2all.train.checkpoints.run_lock import Fence, behind, no_fence
from zero2all.train.guards.detector import Detector, GuardFinding, StepLimits
from zero2all.train.guards.ledger import SkipLedger
from zero2all.train.guards.policy import Action, Continue, Policy, Rollback, SkipWindow
from zero2all.train.step_stats import StepResult

INCIDENTS_FOLDER = "incidents"
STATE_FORMAT = 1
ALONE = World()


class Checkpoints(Protocol):
    """What the guards need from the checkpoints of the run when they must decide."""

    def good_steps(self) -> list[int]:
        """The steps of good ones; called on rank 0."""

    def opens(self, step: int) -> bool:
        """Whether that of `step` is whole; called on all ranks."""


class Observation(NamedTuple):
    """What the guards found in a step, and what to do."""

    findings: list[GuardFinding]
    action: Action


class RunGuards:
    """Detector, policy and ledger of one run."""

    def __init__(
        self,
        run: Path,
        config: GuardsConfig,
        warmup_steps: int,
        fence: Fence = no_fence,
        world: World = ALONE,
        clip_grad_norm: float = 0.0,
    ) -> None:
        """Created by all ranks at the same point. `fence` is checked before every write."""
        self.folder, self._fence, self._world = run / INCIDENTS_FOLDER, fence, world
        self.detector = Detector(config, warmup_steps, clip_grad_norm)
        self.policy = Policy(config)
        self.ledger = SkipLedger.from_state(world.run_on_rank0(lambda: SkipLedger.load(self.folder).state()))

    def limits(self, step: int) -> StepLimits:
        """The limits of `step`; see `Detector.limits`."""
        return self.detector.limits(step)

    def refusal_limits(self, step: int) -> StepLimits:
        """The limits by which the device refuses the update of `step`: infinite for kinds that are only logged."""
        limits, config = self.limits(step), self.policy.config
        return limits._replace(
            loss=math.inf if config.loss_spike == "log" else limits.loss,
            grad_norm=math.inf if config.grad_spike == "log" else limits.grad_norm,
            loss_low=-math.inf if config.loss_drop == "log" else limits.loss_low,
        )

    def observe(self, result: StepResult, channel_losses: Mapping[str, float], checkpoints: Checkpoints) -> Observation:
        """Judge a step, in order, and record the decision before returning it."""
        step, tokens = result.step, result.tokens
        findings = self.detector.observe(step, result.loss, result.grad_norm, channel_losses, tokens, result.core_loss)
        good = self._world.run_on_rank0(checkpoints.good_steps) if findings else []
        decide = partial(self.policy.decide, step, findings, self.ledger)
        return Observation(findings, self._record(decide(good), decide, good, checkpoints))

    def at_end(self, step: int, is_marked: bool, checkpoints: Checkpoints) -> Action:
        """What to do at the last step; see `Policy.at_end`."""

        def decide(good: Sequence[int]) -> Action:
            return self.policy.at_end(step, self.ledger, is_marked, good)

        action = decide(())
        if isinstance(action, Continue):
            return action
        good = self._world.run_on_rank0(checkpoints.good_steps)
        return self._record(decide(good), decide, good, checkpoints)

    def _record(
        self, action: Action, decide: Callable[[Sequence[int]], Action], good: Sequence[int], checkpoints: Checkpoints
    ) -> Action:
        """An action whose checkpoint is whole, after it was recorded: one that is damaged is none of the `good`."""
        while isinstance(action, Rollback) and not checkpoints.opens(action.to_step):
            good = [step for step in good if step != action.to_step]
            action = decide(good)
        skip = action.skip if isinstance(action, SkipWindow | Rollback) else None
        bad_since = action.bad_since if isinstance(action, Rollback) else None
        if skip is not None:
            self.ledger.add(skip)
        if skip is not None or (bad_since is not None and self.ledger.forget_after(bad_since)):
            self._world.run_on_rank0(lambda: behind(self._fence, lambda: self.ledger.save(self.folder)))
        return action

    def doubt(self, step: int) -> str | None:
        """Why the state after `step` may be bad; see `Policy.doubt`."""
        return self.policy.doubt(step, self.ledger)

    def restart(self) -> None:
        """A stage with other data begins: clear the statistics of the loss."""
        self.detector.restart()

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "format": STATE_FORMAT,
            "detector": self.detector.state(),
            "policy": self.policy.state(),
            "ledger": self.ledger.state(),
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue at `step` from `state`; later decisions stay."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the guards' state has format {state.get('format')}, expected {STATE_FORMAT}")
        self.detector.restore(state["detector"])
        self.detector.distrust()
        self.policy.restore(state["policy"])
        self.policy.begin_after(step)
        then = SkipLedger.from_state(state["ledger"])
        then.merge(self.ledger)
        self.ledger = then
