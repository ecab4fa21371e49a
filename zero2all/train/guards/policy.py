"""From findings to what the loop does: continue, skip the data of a step, roll back, or stop (docs/guards.md).

Earlier decisions are counted in the ledger, which survives rollbacks and crashes, and not in this object: a resumed run
skips the steps it refused before, and must still decide like a run that was not interrupted. Only steps that were not
finite are remembered here. They are not recorded as bad data, because an overflow says little about the text.

A state that was loaded is unproven until a step after it is accepted. If none of the first ones is, the state itself
may be bad: the run goes back to an older checkpoint, whatever the settings but `stop`, and skips no data. If the data
was bad, the run comes to it again with a proven state, and decides as one that was not interrupted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero2all.common.errors import AnomalyError
from zero2all.common.progress import counted
from zero2all.config.training import GuardsConfig
from zero2all.train.guards.detector import STEP_KINDS, GuardFinding
from zero2all.train.guards.ledger import SkipLedger, Skipped

STATE_FORMAT = 1


@dataclass(frozen=True)
class Continue:
    """Do nothing; the findings are logged."""

    reason: str = ""


@dataclass(frozen=True)
class SkipWindow:
    """Skip this data: the device refused its update, or it is still to come."""

    skip: Skipped
    reason: str


@dataclass(frozen=True)
class Rollback:
    """Load the checkpoint of `to_step` and skip `skip` from then on; None: only the state is bad, not the data, and
    what was decided about the data after the step `bad_since` does not hold."""

    to_step: int
    skip: Skipped | None
    reason: str
    bad_since: int | None = None


@dataclass(frozen=True)
class Stop:
    """End the run."""

    reason: str
    exit_code: int = AnomalyError.exit_code


Action = Continue | SkipWindow | Rollback | Stop

ACTION_NAMES: dict[type, str] = {Continue: "continue", SkipWindow: "skip", Rollback: "rollback", Stop: "stop"}


class Policy:
    """Decides by the settings and by earlier decisions."""

    def __init__(self, config: GuardsConfig) -> None:
        self.config = config
        self._not_finite: list[int] = []  # the last steps that were not finite
        self._loaded: int | None = None  # the step of the checkpoint that was loaded
        self._accepted = 0  # steps since then that stood out in nothing that speaks against the state

    def begin_after(self, step: int) -> None:
        """The run continues from the checkpoint of `step`, which is unproven until steps are accepted."""
        self._loaded, self._accepted = step, 0

    def doubt(self, step: int, ledger: SkipLedger) -> str | None:
        """Why the state after `step` may be bad: steps before it were refused, or it was loaded and too few steps have
        proven it. None: as far as can be told it is good."""
        within, margin = self.config.rollback_within_steps, max(1, self.config.rollback_margin_steps)
        refused = sorted(one for one in self._refused(ledger) if step - within < one <= step)
        if refused:
            steps = ", ".join(map(str, refused[:5])) + (", …" if len(refused) > 5 else "")
            return f"the updates of these steps were refused: {steps}"
        if self._loaded is not None and self._accepted < margin:
            return f"{counted(self._accepted, 'step')} of {margin} have proven the checkpoint of step {self._loaded}"
        return None

    def at_end(self, step: int, ledger: SkipLedger, is_marked: bool, checkpoints: Sequence[int]) -> Action:
        """Whether the run may end with `step`: not with a state that was loaded, and of which no step was accepted
        although there were some to judge it by. `is_marked`: what was loaded was saved in doubt."""
        if self._loaded is None or self._accepted or step == self._loaded:
            return Continue()
        if not is_marked and not any(one > self._loaded for one in self._refused(ledger)):
            return Continue()
        return self._leave_unproven(f"step {step} is the last one", checkpoints) or Stop(
            f"Step {step} is the last one, but no step after the checkpoint of step {self._loaded} was accepted, and "
            f"there is no older good checkpoint. The run was not finished: restore an older checkpoint, or start over "
            f"with --fresh."
        )

    def decide(
        self, step: int, findings: Sequence[GuardFinding], ledger: SkipLedger, checkpoints: Sequence[int]
    ) -> Action:
        """What to do after `step`; `checkpoints` are the steps of good ones. The caller changes the ledger."""
        self._accepted += not any(one.kind in STEP_KINDS and one.kind != "loss_drop" for one in findings)
        harmful = [one for one in findings if one.kind in STEP_KINDS and self._setting(one.kind) != "log"]
        if not harmful:
            return Continue(findings[0].text if findings else "")
        worst = harmful[0]
        if worst.kind == "nonfinite":
            most = max(self.config.max_skips_in_a_row, self.config.rollback_after_spikes)
            self._not_finite = [*(one for one in self._not_finite if one != step), step][-most:]
            if self.config.nonfinite == "stop":
                return Stop(f"{worst.text}. guards.nonfinite is `stop`, so the run ends here. Its state is intact.")
        action = self._leave_bad_start(step, worst, ledger, checkpoints)
        if action is None and worst.kind == "nonfinite":
            action = self._leave_not_finite(step, worst, ledger, checkpoints)
        if action is not None:
            return action
        in_a_row, last_update = self._refused_in_a_row(step, worst.tokens, ledger)
        back = [one for one in harmful if self._setting(one.kind) == "rollback"]
        spikes = [entry for entry in self._open_spikes(step, ledger) if self._setting(entry.kind) == "rollback"]
        if back and len(spikes) + 1 >= self.config.rollback_after_spikes:
            margin = self.config.rollback_margin_steps
            return self._go_back(back[0], spikes, ledger, checkpoints, margin, counted(len(spikes) + 1, "spike"))
        if in_a_row >= self.config.max_skips_in_a_row:
            return Stop(
                f"{worst.text}. Updates skipped in a row: {in_a_row} (guards.max_skips_in_a_row), so the run ends "
                f"here. The weights are those of step {last_update}."
            )
        if worst.kind == "nonfinite":
            return Continue(f"{worst.text}; the update of this step was refused")
        chosen = back[0] if back else worst
        skip = Skipped(*chosen.tokens, step, chosen.kind, "refuse", chosen.text)
        return SkipWindow(skip, f"{chosen.text}; the update of this step was refused")

    def _leave_bad_start(
        self, step: int, finding: GuardFinding, ledger: SkipLedger, checkpoints: Sequence[int]
    ) -> Action | None:
        """Back to an older checkpoint when steps are refused before others have proven the loaded one."""
        refused = {one for one in self._refused(ledger) if self._loaded is not None and one > self._loaded} | {step}
        if len(refused) < min(self.config.rollback_after_spikes, self.config.max_skips_in_a_row):
            return None
        return self._leave_unproven(finding.text, checkpoints)

    def _leave_unproven(self, why: str, checkpoints: Sequence[int]) -> Rollback | None:
        """Back to an older checkpoint, if there is one, when too few steps since the loaded one were accepted to prove
        it: a bad moment of the optimizer shows only after its first update."""
        older = [one for one in checkpoints if self._loaded is not None and one < self._loaded]
        if self._accepted >= max(1, self.config.rollback_margin_steps) or not older:
            return None
        back, accepted = max(older), counted(self._accepted, "step")
        if self._accepted:
            reason = (
                f"{why}; only {accepted} after the checkpoint of step {self._loaded} had been accepted: back to the "
                f"checkpoint of step {back}"
            )
        else:
            reason = (
                f"{why}; no step after the checkpoint of step {self._loaded} was accepted: back to the checkpoint of "
                f"step {back}"
            )
        return Rollback(back, None, reason, self._loaded)

    def _leave_not_finite(
        self, step: int, finding: GuardFinding, ledger: SkipLedger, checkpoints: Sequence[int]
    ) -> Action | None:
        """With guards.nonfinite `rollback`: roll back, as after spikes, when such steps keep coming."""
        since = step - self.config.rollback_within_steps
        count = sum(since < one <= step for one in self._not_finite)
        if self.config.nonfinite != "rollback" or count < self.config.rollback_after_spikes:
            return None
        # Weights and moments of a good checkpoint are finite: the newest is enough. Without one, no data is
        # skipped: that would not repair the weights, and max_skips_in_a_row must be able to end the run.
        action = self._go_back(finding, (), ledger, checkpoints, 1, f"{count} steps that were not finite")
        return None if isinstance(action, SkipWindow) else action

    def _setting(self, kind: str) -> str:
        return "skip" if kind == "nonfinite" else str(getattr(self.config, kind, "skip"))

    def _open_spikes(self, step: int, ledger: SkipLedger) -> list[Skipped]:
        """Steps refused recently, since the last rollback."""
        entries = list(ledger.entries)
        windows = [number for number, entry in enumerate(entries) if entry.action != "refuse"]
        since = entries[windows[-1] + 1 :] if windows else entries
        return [one for one in since if step - self.config.rollback_within_steps < one.decided_at_step < step]

    def _refused(self, ledger: SkipLedger) -> set[int]:
        """The steps that were computed and made no update, since the last rollback that skips data."""
        entries = list(ledger.entries)
        since = max((at + 1 for at, entry in enumerate(entries) if entry.action == "rollback"), default=0)
        return {entry.decided_at_step for entry in entries[since:]} | set(self._not_finite)

    def _refused_in_a_row(self, step: int, tokens: tuple[int, int], ledger: SkipLedger) -> tuple[int, int]:
        """How many steps up to `step`, which is one of them and read `tokens`, were computed without an update, and the
        step before them. Steps whose data is skipped are not counted and do not end the row, as nothing changed in
        them."""
        refused, (first, end) = self._refused(ledger), tokens
        count, back = 1, 1
        while step - back in refused or ledger.skips(first - back * (end - first), first - (back - 1) * (end - first)):
            count += step - back in refused
            back += 1
        return count, step - back

    def _go_back(
        self,
        finding: GuardFinding,
        spikes: Sequence[Skipped],
        ledger: SkipLedger,
        checkpoints: Sequence[int],
        margin: int,
        what: str,
    ) -> Action:
        step = finding.step
        onset_step, onset_token = step, finding.tokens[0]
        if spikes:
            onset_step, onset_token = spikes[0].decided_at_step, spikes[0].first
        if finding.onset_step is not None and finding.onset_token is not None:
            onset_step, onset_token = min((onset_step, onset_token), (finding.onset_step, finding.onset_token))
        first, end = finding.tokens
        end += (end - first) * self.config.skip_steps_after
        within = self.config.max_rollbacks_within_steps
        rollbacks = [one for one in ledger.entries if one.action == "rollback"]
        recent = [one for one in rollbacks if abs(step - one.decided_at_step) < within]
        if len(recent) >= self.config.max_rollbacks:
            return Stop(
                f"{finding.text}. The run has gone back {counted(len(recent), 'time')} within {within:,} steps "
                f"(guards.max_rollbacks), and its loss jumps again, so one bad range of data is not the cause."
            )
        to_step = self._last_good(onset_step - margin, checkpoints, rollbacks)
        if to_step is None:
            return SkipWindow(
                Skipped(onset_token, end, step, finding.kind, "window", finding.text),
                f"{finding.text}; no good checkpoint is at least {counted(margin, 'step')} older than step "
                f"{onset_step}, so the run does not go back and only skips the data",
            )
        return Rollback(
            to_step,
            Skipped(onset_token, end, step, finding.kind, "rollback", finding.text, to_step),
            f"{finding.text}; {what} since step {onset_step}: back to the checkpoint of step {to_step}, and tokens "
            f"{onset_token:,} to {end:,} are skipped",
        )

    def _last_good(self, latest: int, checkpoints: Sequence[int], rollbacks: Sequence[Skipped]) -> int | None:
        good = [step for step in sorted(checkpoints) if step <= latest]
        if not good:
            return None
        if len(good) > 1 and rollbacks and rollbacks[-1].to_step == good[-1]:
            return good[-2]
        return good[-1]

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"format": STATE_FORMAT, "not_finite": list(self._not_finite)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `state`."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the policy's state has format {state.get('format')}, expected {STATE_FORMAT}")
        self._not_finite = [int(step) for step in state["not_finite"]]
