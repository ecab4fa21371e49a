"""Finds steps whose loss or gradient norm stands out from the last 128 accepted steps (docs/guards.md has the rule).

The gradient norm is judged by its logarithm, because it scatters by factors. A curve that falls or rises steadily
widens its own limits. During the warmup, where most real spikes come but the curve also bends most, limits are
WARMUP_WIDTH times as far from the usual value. No step is judged with too few values in the window.

Clean text has rare domains, and a step that meets one must count. So the loss stands out only where it has risen
without the highest quarter of the rows, too (`core_loss`): what one verse or one table costs says nothing of the model.
The gradient of such a row is long, 5 to 25 times the usual norm was measured, until the domain is learned; refused each
time, it never is. Clipping bounds what it does, so with optim.clip_grad_norm a norm is a spike only above that length,
and only where the rows do not explain it: their highest quarter must cost about as much as usual.

The limits of step s come from the steps up to s - LAG_STEPS, even if later ones have been read. A loop that never
waits for the GPU can therefore pass them to the device, which refuses the update itself, and `observe`, called later,
decides the same. A flagged step does not enter the window, so a resumed run that skips the steps it refused before (see
`ledger`) judges the others as before. A level that stays flagged for SETTLE_STEPS steps is not a spike but the new
level: the window restarts with it.

Limits are recomputed after every fourth accepted step, depend on the window alone and are saved in the state, so a
restored detector gives the same bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import mul
from typing import Any, Literal, NamedTuple

from zero2all.config.training import GuardsConfig

Kind = Literal["loss_spike", "grad_spike", "loss_drop", "nonfinite", "level_shift"]

STEP_KINDS: frozenset[str] = frozenset({"loss_spike", "grad_spike", "loss_drop", "nonfinite"})
"""Findings about one step; the others are about the run or about data scattered over it."""


@dataclass(frozen=True)
class GuardFinding:
    """Something about a step that stands out: a spike, a drop, a level shift, or a value that is not finite."""

    kind: Kind
    step: int  # the step as the metrics count it: the first step of a run is 1
    tokens: tuple[int, int]  # first and end token of that step's global batch in the run's order
    text: str  # A sentence for people
    value: float | None = None  # what was measured; None where it was not finite
    usual: float | None = None  # the expected value
    limit: float | None = None  # the limit it exceeded
    onset_step: int | None = None  # the first step of an unbroken series of findings
    onset_token: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Plain values: the shard, its samples, the losses of the channels."""

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "tokens": list(self.tokens)}


MAD_TO_SIGMA = 1.4826
"""A normal distribution's sigma over its median absolute deviation."""
EXCESS_SIGMAS, LEAST_EXCESS = 3.0, 0.005
"""Robust sigmas above the median at which rows stand out, and what they add to the usual loss at least."""
CORE_RISE = 0.5
"""Of the rise that makes a loss a spike, what the rows without the highest quarter must show, too."""
HISTORY_STEPS = 256
RENEW_STEPS = 4
"""Accepted steps after which limits are recomputed; so few values hardly change a window of 128."""
EPISODE_GAP_STEPS = 8
"""Clean steps after which the next finding begins a new episode."""
LAG_STEPS = 2
"""How many steps before a step its limits end, at least."""
WARMUP_WIDTH = 2.0
"""How much wider limits are during the warmup; of the gradient norm by its logarithm."""
LOADED_FACTOR, LOADED_STEPS = 2.0, 8
"""See `Detector.distrust`."""
SETTLE_STEPS = 32
"""Flagged steps in a row that are a new level."""
STATE_FORMAT = 1


class StepLimits(NamedTuple):
    """The limits of a step's values. Infinite while steps are not judged."""

    loss: float = math.inf
    grad_norm: float = math.inf
    loss_low: float = -math.inf
    usual_loss: float | None = None
    usual_grad_norm: float | None = None
    core_loss: float = -math.inf
    """A loss spike is above `loss`, and above this without its highest rows."""
    excess: float = math.inf
    """Where the loss is further above the core loss than this, some rows stand out and explain a long gradient."""


class Level(NamedTuple):
    """Center and spread of values."""

    mean: float
    sigma: float
    median: float
    mad: float


def level_of(values: Sequence[float]) -> Level:
    """Mean and sigma, median and robust sigma of a window."""
    mean = sum(values) / len(values)
    away = [value - mean for value in values]
    sigma = math.sqrt(sum(map(mul, away, away)) / len(values))
    ordered = sorted(values)
    median = _middle(ordered)
    # Distances fall and then rise along the ordered values: a sort of two runs, which Python merges in one pass.
    return Level(mean, sigma, median, _middle(sorted([abs(value - median) for value in ordered])))


def _middle(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class StepValues(NamedTuple):
    """What a step is judged by."""

    step: int
    tokens: tuple[int, int]
    """First and end token of its global batch."""
    loss: float
    grad_norm: float
    channel_losses: Mapping[str, float]


class Seen(NamedTuple):
    """One observed step, for the curve on an incident's page."""

    step: int
    loss: float | None
    grad_norm: float | None
    flagged: bool
    channels: dict[str, float]


class Detector:
    """The window of one run. Call `observe` once for each step, in order."""

    def __init__(self, config: GuardsConfig | None = None, warmup_steps: int = 0, clip_grad_norm: float = 0.0) -> None:
        self._config = config or GuardsConfig()
        self._warmup_steps, self._clip_grad_norm = warmup_steps, clip_grad_norm
        self.history: list[Seen] = []
        """The last steps, flagged ones included."""
        self._losses: list[float] = []
        self._cores: list[float] = []
        self._log_norms: list[float] = []
        self._limits: list[tuple[int, StepLimits]] = []  # (step after which they are valid, limits), newest last
        self._accepted = 0
        self.last_step = -1
        """The step observed last."""
        self._last_flagged_step: int | None = None
        self._onset: tuple[int, int] | None = None  # step and first token of the present episode
        self._flagged_in_a_row: list[tuple[float, float, float]] = []  # loss, logarithm of the norm, core loss
        self._first_limits, self._loaded_until = StepLimits(), -1  # see `distrust`

    def limits(self, step: int) -> StepLimits:
        """The limits of `step`. Every step up to step - LAG_STEPS must have been observed."""
        known = [limits for observed, limits in self._limits if observed <= step - LAG_STEPS]
        found = known[-1] if known else StepLimits()
        if found.usual_loss is None and step <= self._loaded_until:
            return self._first_limits
        if step < (self._config.spike_from_step or 0):
            return StepLimits()
        found = found if step >= self._warmup_steps else _widened(found)
        return found._replace(grad_norm=max(found.grad_norm, self._clip_grad_norm))

    def observe(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        channel_losses: Mapping[str, float],
        tokens: tuple[int, int],
        core_loss: float | None = None,
    ) -> list[GuardFinding]:
        """Judge one step; `tokens` are the first and end token of its global batch, `core_loss` is its loss without
        the highest rows (None: the rows are not known). Returns what stands out."""
        if step <= self.last_step:
            raise ValueError(f"step {step} was observed after step {self.last_step}; steps come in order")
        self.last_step = step
        loss, grad_norm = float(loss), float(grad_norm)  # numpy's floats are not JSON
        core = loss if core_loss is None else float(core_loss)
        limits = self.limits(step)
        verdicts = _verdicts(loss, core, grad_norm, limits)
        if verdicts:
            self._note_episode(step, tokens[0])
        values = StepValues(step, tokens, loss, grad_norm, channel_losses)
        findings = [self._finding(kind, values, limits) for kind in verdicts]
        if not verdicts:
            self._accept(step, loss, core, grad_norm)
            self._flagged_in_a_row.clear()
        elif "nonfinite" not in verdicts:
            self._flagged_in_a_row.append((loss, _log(grad_norm), core))
            if len(self._flagged_in_a_row) >= SETTLE_STEPS:
                findings.append(self._settle(step, tokens, limits))
        channels = {name: float(value) for name, value in channel_losses.items() if math.isfinite(value)}
        self.history.append(Seen(step, _finite(loss), _finite(grad_norm), bool(verdicts), channels))
        del self.history[:-HISTORY_STEPS]
        return findings

    def restart(self) -> None:
        """Clear the window, because the loss is expected to change: another stage, another mixture."""
        for values in (self._losses, self._cores, self._log_norms):
            values.clear()
        self._limits.clear()
        self._flagged_in_a_row.clear()
        self._onset = self._last_flagged_step = None

    def _accept(self, step: int, loss: float, core: float, grad_norm: float) -> None:
        windows = ((self._losses, loss), (self._cores, core), (self._log_norms, _log(grad_norm)))
        for values, value in windows:
            values.append(value)
            del values[: -self._config.spike_window_steps]
        self._accepted += 1
        if self._accepted % RENEW_STEPS == 0:
            self._limits.append((step, self._limits_now()))
            del self._limits[: -(LAG_STEPS + 1)]

    def _note_episode(self, step: int, first_token: int) -> None:
        last = self._last_flagged_step
        if self._onset is None or last is None or step - last > EPISODE_GAP_STEPS:
            self._onset = (step, first_token)
        self._last_flagged_step = step

    def _settle(self, step: int, tokens: tuple[int, int], limits: StepLimits) -> GuardFinding:
        """Accept the flagged steps as the new level."""
        count = len(self._flagged_in_a_row)
        losses, norms, cores = map(list, zip(*self._flagged_in_a_row, strict=True))
        usual, now = limits.usual_loss, _middle(sorted(losses))
        self.restart()
        self._losses, self._log_norms, self._cores = losses, norms, cores
        if usual is None:
            text = f"{count} steps in a row stood out, so this is the new level"
        else:
            text = f"{count} steps in a row stood out, so this is the new level: loss {usual:.4g} before, {now:.4g} now"
        return GuardFinding("level_shift", step, tokens, text, value=now, usual=usual)

    def _limits_now(self) -> StepLimits:
        config = self._config
        if len(self._losses) < min(config.spike_min_steps, config.spike_window_steps):
            return StepLimits()
        loss, norm = level_of(self._losses), level_of(self._log_norms)
        excess = level_of([loss - core for loss, core in zip(self._losses, self._cores, strict=True)])
        rise = max(EXCESS_SIGMAS * MAD_TO_SIGMA * excess.mad, LEAST_EXCESS * abs(loss.median))
        highest = max(_upper(loss, config), loss.median + abs(loss.median) * config.loss_min_rise)
        return StepLimits(
            loss=highest,
            grad_norm=_exp(max(_upper(norm, config), norm.median + math.log1p(config.grad_min_rise))),
            loss_low=min(
                loss.mean - config.spike_sigmas * loss.sigma,
                loss.median - config.spike_mads * MAD_TO_SIGMA * loss.mad,
                loss.median - abs(loss.median) * config.loss_min_drop,
            ),
            usual_loss=loss.median,
            usual_grad_norm=_exp(norm.median),
            core_loss=_middle(sorted(self._cores)) + CORE_RISE * (highest - loss.median),
            excess=excess.median + rise if self._clip_grad_norm else math.inf,
        )

    def _finding(self, kind: Kind, values: StepValues, limits: StepLimits) -> GuardFinding:
        assert self._onset is not None, "an episode is noted before its findings are made"
        onset_step, onset_token = self._onset
        step, tokens, loss, grad_norm, channel_losses = values
        value, usual, limit = {
            "loss_spike": (loss, limits.usual_loss, limits.loss),
            "grad_spike": (grad_norm, limits.usual_grad_norm, limits.grad_norm),
            "loss_drop": (loss, limits.usual_loss, limits.loss_low),
            "nonfinite": (None, None, None),
        }[kind]
        if kind == "nonfinite":
            text = f"step {step} is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}"
        elif kind == "grad_spike":
            text = f"step {step}: gradient norm {value:.4g}, above the limit {limit:.4g} (usual: {usual:.4g})"
        elif kind == "loss_drop":
            text = f"step {step}: loss {value:.4g}, below the limit {limit:.4g} (usual: {usual:.4g})"
        else:
            text = f"step {step}: loss {value:.4g}, above the limit {limit:.4g} (usual: {usual:.4g})"
        details = {
            "loss": _finite(loss),
            "grad_norm": _finite(grad_norm),
            "channel_losses": {name: _finite(value) for name, value in channel_losses.items()},
        }
        return GuardFinding(kind, step, tokens, text, value, usual, limit, onset_step, onset_token, details)

    def state(self) -> dict[str, Any]:
        """Everything `restore` needs, as plain values."""
        return {
            "format": STATE_FORMAT,
            "losses": list(self._losses),
            "cores": list(self._cores),
            "log_norms": list(self._log_norms),
            "limits": [[step, *(_finite(value) for value in limits)] for step, limits in self._limits],
            "accepted": self._accepted,
            "last_step": self.last_step,
            "last_flagged_step": self._last_flagged_step,
            "onset": None if self._onset is None else list(self._onset),
            "flagged_in_a_row": [list(pair) for pair in self._flagged_in_a_row],
            "history": [list(seen) for seen in self.history],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue exactly from `state`."""
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"the detector's state has format {state.get('format')}, expected {STATE_FORMAT}")
        self._losses, self._cores, self._log_norms = (
            [float(value) for value in values][-self._config.spike_window_steps :]
            for values in (state["losses"], state.get("cores", state["losses"]), state["log_norms"])
        )  # an older state has no cores
        self._limits = [(int(step), _limits_from(parts)) for step, *parts in state["limits"]]
        self._accepted = int(state["accepted"])
        self.last_step = int(state["last_step"])
        self._last_flagged_step = state["last_flagged_step"]
        self._onset = None if state["onset"] is None else (int(state["onset"][0]), int(state["onset"][1]))
        rows = [[*map(float, row)] for row in state["flagged_in_a_row"]]
        self._flagged_in_a_row = [(loss, norm, core[0] if core else loss) for loss, norm, *core in rows]
        self.history = [Seen(*seen) for seen in state["history"]]

    def distrust(self) -> None:
        """The weights of the next steps were loaded: judge these steps also where a window is too short for limits, by
        the highest loss known. A young run must not take damaged weights for good."""
        losses = sorted(seen.loss for seen in self.history if seen.loss is not None)
        if losses:
            self._first_limits = StepLimits(loss=LOADED_FACTOR * losses[-1], usual_loss=_middle(losses))
            self._loaded_until = self.last_step + LOADED_STEPS


def _verdicts(loss: float, core: float, grad_norm: float, limits: StepLimits) -> list[Kind]:
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return ["nonfinite"]
    kinds: list[Kind] = []
    if loss > limits.loss and core > limits.core_loss:
        kinds.append("loss_spike")
    if grad_norm > limits.grad_norm and not loss - core > limits.excess:
        kinds.append("grad_spike")
    if loss < limits.loss_low:
        kinds.append("loss_drop")
    return kinds


def _upper(level: Level, config: GuardsConfig) -> float:
    robust = level.median + config.spike_mads * MAD_TO_SIGMA * level.mad
    return min(level.mean + config.spike_sigmas * level.sigma, robust)


def _widened(limits: StepLimits) -> StepLimits:
    """The same limits for a step of the warmup."""
    loss, norm = limits.usual_loss, limits.usual_grad_norm
    if loss is None or norm is None:
        return limits
    return limits._replace(
        loss=loss + WARMUP_WIDTH * (limits.loss - loss),
        core_loss=limits.core_loss + CORE_RISE * (WARMUP_WIDTH - 1) * (limits.loss - loss),
        grad_norm=_exp(_log(norm) + WARMUP_WIDTH * (_log(limits.grad_norm) - _log(norm))),
        loss_low=loss - WARMUP_WIDTH * (loss - limits.loss_low),
    )


def _limits_from(parts: Sequence[float | None]) -> StepLimits:
    """JSON has no infinities: they were written as null. Older states have fewer parts."""
    return StepLimits(**{name: part for name, part in zip(StepLimits._fields, parts, strict=False) if part is not None})


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))  # the gradient is zero when all loss weights are


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
