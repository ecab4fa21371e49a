"""All guards of a run as one object with one state.

The loop asks for limits and row weights before a step, calls `observe` when the values of a step have arrived, and
carries out the action it returns. A rollback restores the statistics (the detector's window, those of the shards) but
not the decisions (skipped data, quarantined shards), which are also written to the run's folder before they are carried
out.

Every process of a run has guards of its own, which come to the same verdicts, because they see the same values in the
same order. They communicate only at the start and where there is something to decide: rank 0 reads the list of good
checkpoints and writes the records, and an error there is raised on all ranks. So nothing that differs between ranks
(time, files, the rank itself) may enter a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from zero2all.common import jsonio
from zero2all.common.files import LARGEST_JSON_BYTES, read_regular, write_json
from zero2all.common.progress import counted
from zero2all.config.training import GuardsConfig
from zero2all.packed.mixture import TrainingData
from zero2all.parallel.world import World
from zero2all.train.checkpoints.run_lock import Fence, behind, no_fence
from zero2all.train.guards.detector import LAG_STEPS, Detector, Finding, Limits
from zero2all.train.guards.ledger import Quarantine, SkipLedger, keep_damaged
from zero2all.train.guards.policy import Action, Continue, Policy, Rollback, SkipWindow
from zero2all.train.guards.rows import RowFinder
from zero2all.train.guards.shards import STATE_FORMAT as SHARDS_FORMAT
from zero2all.train.guards.shards import ShardWatch

INCIDENTS_FOLDER = "incidents"
QUARANTINE_FILE = "quarantine.json"
STATE_FORMAT = 1
ALONE = World()
JUDGED_ROWS = 64
"""Rows that shards are judged by at a time: for few rows it takes almost as long as for many."""


class Checkpoints(Protocol):
    """What the guards ask the checkpoints of the run, where there is something to decide."""

    def good_steps(self) -> list[int]:
        """The steps of good ones; called on rank 0."""

    def opens(self, step: int) -> bool:
        """Whether that of `step` is whole; called on all ranks."""


class Observation(NamedTuple):
    """What the guards found in a step, and what to do."""

    findings: list[Finding]
    action: Action


NO_ROWS = np.zeros(0)


class WaitingRows:
    """The rows of consecutive steps that wait until shards are judged."""

    def __init__(self) -> None:
        self.tokens = (0, 0)
        """Their first and end token; equal when there are none."""
        self._nats: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._nats))

    def add(self, tokens: tuple[int, int], nats: np.ndarray, counts: np.ndarray) -> None:
        """The rows of the next step."""
        self.tokens = (self.tokens[0] if self._nats else tokens[0], tokens[1])
        self._nats.append(nats)
        self._counts.append(counts)

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """Sums of nats and of token weights of each row. Rows that are not finite weigh nothing: they are not judged,
        and have no place in JSON."""
        nats, counts = np.concatenate([NO_ROWS, *self._nats]), np.concatenate([NO_ROWS, *self._counts])
        is_finite = np.isfinite(nats)
        return np.where(is_finite, nats, 0.0), np.where(is_finite, counts, 0.0)

    def state(self) -> dict[str, Any]:
        """As plain values."""
        nats, counts = self.values()
        return {"tokens": list(self.tokens), "nats": nats.tolist(), "counts": counts.tolist()}

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> WaitingRows:
        """From the values of `state`; none for None."""
        rows = WaitingRows()
        if state is not None and state["nats"]:
            first, end = state["tokens"]
            rows.add((int(first), int(end)), np.array(state["nats"]), np.array(state["counts"]))
        return rows


class RunGuards:
    """Detector, policy, ledger, shard statistics and quarantine of one run."""

    def __init__(
        self,
        run: Path,
        config: GuardsConfig,
        warmup_steps: int,
        data: TrainingData | None = None,
        quarantine: str = "log",
        fence: Fence = no_fence,
        world: World = ALONE,
        clip_grad_norm: float = 0.0,
    ) -> None:
        """Created by all ranks at the same point. `data` None, or `quarantine: off`: shards are not judged. `fence` is
        checked before every write."""
        self.folder, self._fence, self._world = run / INCIDENTS_FOLDER, fence, world
        self.detector = Detector(config, warmup_steps, clip_grad_norm)
        self.policy = Policy(config)
        self.ledger = SkipLedger.from_state(world.run_on_rank0(lambda: SkipLedger.load(self.folder).state()))
        self.quarantine = Quarantine(quarantine)
        self._is_quarantine_damaged = False
        self.shards: ShardWatch | None = None
        self.finder: RowFinder | None = None
        self._waiting = WaitingRows()
        if data is not None and quarantine != "off":
            counts = {split.name: len(split.shards) for split in data.splits}
            self.shards = ShardWatch(counts, data.channels, config.false_shard_alarms)
            self.finder = RowFinder(data)
            self._load_quarantine()

    def limits(self, step: int) -> Limits:
        """The limits of `step`; see `Detector.limits`."""
        return self.detector.limits(step)

    def refusal_limits(self, step: int) -> Limits:
        """The limits by which the device refuses the update of `step`: infinite for kinds that are only logged."""
        limits, config = self.limits(step), self.policy.config
        return limits._replace(
            loss=math.inf if config.loss_spike == "log" else limits.loss,
            grad_norm=math.inf if config.grad_spike == "log" else limits.grad_norm,
            loss_low=-math.inf if config.loss_drop == "log" else limits.loss_low,
        )

    def row_weights(self, step: int, first_token: int, rows: int) -> np.ndarray | None:
        """The loss weight of each row of `step`, whose global batch begins at `first_token`; None when all are 1."""
        if self.finder is None or self.quarantine.mode != "auto" or not self.quarantine.shards:
            return None
        return self.quarantine.row_weights(self.finder.rows(first_token, rows), step)

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        channel_losses: Mapping[str, float],
        tokens: tuple[int, int],
        checkpoints: Checkpoints,
        row_nats: np.ndarray | None = None,
        row_counts: np.ndarray | None = None,
        core_loss: float | None = None,
    ) -> Observation:
        """Judge a step, in order, and record the decision before returning it; `row_nats` are of the global batch."""
        findings = self.detector.observe(step, loss, grad_norm, channel_losses, tokens, core_loss)
        good = self._world.run_on_rank0(checkpoints.good_steps) if findings else []
        decide = partial(self.policy.decide, step, findings, self.ledger)
        action = self._recorded(decide(good), decide, good, checkpoints)
        if isinstance(action, SkipWindow | Rollback):
            return Observation(findings, action)  # a resumed run skips this step, so its rows must not count
        if self.finder is not None and row_nats is not None and row_counts is not None:
            if not self.finder.is_one_stretch(self._waiting.tokens, tokens):
                findings += self._judge_waiting(step, tokens)
            self._waiting.add(tokens, row_nats, row_counts)
            if len(self._waiting) >= JUDGED_ROWS:
                findings += self._judge_waiting(step, tokens)
        return Observation(findings, action)

    def at_end(self, step: int, is_marked: bool, checkpoints: Checkpoints) -> Action:
        """What to do at the last step; see `Policy.at_end`."""

        def decide(good: Sequence[int]) -> Action:
            return self.policy.at_end(step, self.ledger, is_marked, good)

        action = decide(())
        if isinstance(action, Continue):
            return action
        good = self._world.run_on_rank0(checkpoints.good_steps)
        return self._recorded(decide(good), decide, good, checkpoints)

    def _recorded(
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

    def _judge_waiting(self, step: int, tokens: tuple[int, int]) -> list[Finding]:
        """Judge shards by the rows that wait."""
        assert self.shards is not None, "there is a finder only where shards are judged"
        assert self.finder is not None, "there is a finder only where shards are judged"
        # Found on an abandoned branch; applied from their step on, so that a resumed run finds the same.
        for one in self.quarantine.shards:
            if one.from_step <= step:
                self.shards.set_aside(one.source, one.shard, one.kind)
        rows = self.finder.rows(self._waiting.tokens[0], len(self._waiting))
        named = self.shards.observe(step, rows, *self._waiting.values(), tokens)
        self._waiting = WaitingRows()
        # From the first step on that cannot have begun yet.
        added = [self.quarantine.add(finding, step + LAG_STEPS) for finding in named]
        if any(added):
            self._world.run_on_rank0(self._save_quarantine)
        return named

    def _save_quarantine(self) -> None:
        self._fence()
        write_json(self.folder / QUARANTINE_FILE, {"format": 1, "shards": self.quarantine.state()})

    def restart(self) -> None:
        """A stage with other data begins: clear the statistics of the loss."""
        self.detector.restart()
        self._waiting = WaitingRows()
        if self.shards is not None:
            self.shards.restart()

    def state(self) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        return {
            "format": STATE_FORMAT,
            "detector": self.detector.state(),
            "policy": self.policy.state(),
            "ledger": self.ledger.state(),
            "quarantine": self.quarantine.state(),
            "shards": None if self.shards is None else self.shards.state(),
            "waiting_rows": self._waiting.state(),
        }

    def restore(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Continue at `step` from `state`; later decisions stay. Returns notes about what could not be restored."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the guards' state has format {state.get('format')}, expected {STATE_FORMAT}")
        self.detector.restore(state["detector"])
        self.detector.distrust()
        self.policy.restore(state["policy"])
        self.policy.resumed(step)
        then = SkipLedger.from_state(state["ledger"])
        then.merge(self.ledger)
        self.ledger = then
        self.quarantine.merge(state["quarantine"])
        self._waiting = WaitingRows.from_state(state.get("waiting_rows"))  # None in older checkpoints
        return [*self._rewrite_quarantine(), *self._restore_shards(state["shards"])]

    def _restore_shards(self, state: Mapping[str, Any] | None) -> list[str]:
        if self.shards is None or state is None:
            return []
        if state.get("format") == SHARDS_FORMAT:
            self.shards.restore(state)
            return []
        self.shards.forget()
        return [
            "The shard statistics in the checkpoint come from another version of zero2all. They start again, so a bad "
            "shard is found a little later. Shards found before stay in quarantine."
        ]

    def _load_quarantine(self) -> None:
        recorded = self._world.run_on_rank0(self._read_quarantine)
        self._is_quarantine_damaged = recorded is None
        self.quarantine.merge(recorded or ())

    def _read_quarantine(self) -> list[dict[str, Any]] | None:
        """The recorded shards; None when the record cannot be read."""
        found = Quarantine(self.quarantine.mode)
        try:
            record = jsonio.loads(read_regular(self.folder / QUARANTINE_FILE, LARGEST_JSON_BYTES))
            found.merge(record["shards"])
        except FileNotFoundError:
            return []
        except (OSError, KeyError, TypeError, ValueError):
            return None
        return found.state()

    def _rewrite_quarantine(self) -> list[str]:
        """Replace a list that could not be read by that of the checkpoint, which has all shards up to its step."""
        if not self._is_quarantine_damaged:
            return []
        self._is_quarantine_damaged = False
        path = self.folder / QUARANTINE_FILE

        def write_again() -> None:
            self._fence()
            keep_damaged(path)
            self._save_quarantine()

        self._world.run_on_rank0(write_again)
        return [
            f"{path} could not be read. It was written again with the {counted(len(self.quarantine.shards), 'shard')} "
            f"in the checkpoint. Shards found later will be found again."
        ]
