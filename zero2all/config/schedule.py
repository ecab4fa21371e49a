"""The learning rate as a pure function of the step, so that a checkpoint need not store it.

A run has one stretch of steps per schedule: the whole run, or one up to the first stage with a schedule of its own and
one per such stage. A stretch of n steps moves linearly during its warmup from the rate the stretch before ended with (0
at the start of the run) to its top, then follows its kind. With k the step within the stretch, w the warmup,
m = min_lr_ratio x top, and x how much of what follows the warmup is done, 0 at k = w and 1 at the last step:

warmup        reached + (top - reached) (k + 1) / w                      for k < w
cosine        m + (top - m) (1 + cos(pi x)) / 2
linear        m + (top - m) (1 - x)
constant      top
inverse_sqrt  max(m, top sqrt(w / (k + 1)))                              w at least 1
wsd           top, then over the last c steps m + (top - m) fall(y)      y = 1 / c, 2 / c, ..., 1
fall(y)       linear 1 - y;  1-sqrt 1 - sqrt(y);  cosine (1 + cos(pi y)) / 2

An anneal replaces the schedule from its from_step on: the rate falls from that of the step before to its to_share.

Muon's momentum rises linearly to its top over a share of the run, and falls linearly while the rate falls to its end:
during the decay of wsd, after the warmup of cosine and linear, during an anneal. Where both happen at once the lower
one counts. The weight decay is constant, or falls by a half cosine to 0 over the run.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zero2all.common.schema import Problem
from zero2all.config.training import (
    AnnealConfig,
    DecayShape,
    OptimConfig,
    ScheduleConfig,
    StageConfig,
    StageScheduleConfig,
)


def learning_rate(
    step: int,
    steps: int,
    lr_max: float,
    config: ScheduleConfig,
    stages: Sequence[StageConfig] = (),
    anneal: AnnealConfig | None = None,
) -> float:
    """The rate of step `step` (the first is 0) in a run of `steps`; a run that goes on keeps its last rate."""
    if anneal is None:
        return _scheduled(step, steps, lr_max, config, stages)
    if step < anneal.from_step:
        return learning_rate(step, steps, lr_max, config, stages, anneal.before)
    start = learning_rate(max(0, anneal.from_step - 1), steps, lr_max, config, stages, anneal.before)
    low = start * anneal.to_share
    if anneal.before is not None:  # of the rate before the first of them
        low = min(start, anneal.to_share * _rate_before(steps, lr_max, config, stages, anneal.before))
    return low + (start - low) * _fall(anneal.shape, _share_done(step, anneal))


def _rate_before(
    steps: int, lr_max: float, config: ScheduleConfig, stages: Sequence[StageConfig], anneal: AnnealConfig
) -> float:
    """The rate before the first of the falls that `anneal` goes on from."""
    while anneal.before is not None:
        anneal = anneal.before
    return _scheduled(max(0, anneal.from_step - 1), steps, lr_max, config, stages)


def _share_done(step: int, anneal: AnnealConfig) -> float:
    """How much of a fall is done."""
    return min(1.0, (step - anneal.from_step + 1) / anneal.steps)


def muon_momentum(
    step: int,
    steps: int,
    optim: OptimConfig,
    config: ScheduleConfig,
    stages: Sequence[StageConfig] = (),
    anneal: AnnealConfig | None = None,
) -> float:
    """Muon's momentum in step `step`; arguments as of `learning_rate`."""
    top, muon = optim.momentum, optim.muon
    warmup = muon.momentum_warmup_share * steps
    lacking = max(0.0, 1 - (step + 1) / warmup) if warmup else 0.0
    last = _stretches(steps, 0.0, config, stages)[-1]
    done = _done(last, min(step, last.end - 1) - last.first)
    left = 1.0
    while anneal is not None:  # each takes its part of what the one before has left
        if step >= anneal.from_step:
            left *= 1 - _share_done(step, anneal)
            done = 1 - left
            step = anneal.from_step - 1
        anneal = anneal.before
    return top - max(max(0.0, top - muon.momentum_start) * lacking, max(0.0, top - muon.momentum_end) * done)


def weight_decay_share(step: int, steps: int, optim: OptimConfig) -> float:
    """The share of the weight decay in step `step` of a run of `steps`."""
    return 1.0 if optim.decay_schedule == "constant" else _fall("cosine", min(1.0, step / steps))


def steps_with_anneal(steps: int, anneal: AnnealConfig | None) -> int:
    """The number of steps of a run of `steps` with this anneal: it ends where the anneal ends."""
    return steps if anneal is None else anneal.from_step + anneal.steps


def schedule_lines(
    steps: int,
    lr_max: float,
    config: ScheduleConfig,
    stages: Sequence[StageConfig] = (),
    anneal: AnnealConfig | None = None,
) -> list[str]:
    """The schedule for a person: a line for each step at which something begins, with its rate."""
    end = steps_with_anneal(steps, anneal)
    begins = [(step, what) for step, what in _borders(steps, lr_max, config, stages, anneal) if step < end - 1]
    return [
        f"step {step:>9,}  lr {learning_rate(step, steps, lr_max, config, stages, anneal):.3e}  {what}"
        for step, what in [*begins, (end - 1, "last step")]
    ]


def schedule_problems(
    steps: int, lr_max: float, config: ScheduleConfig, stages: Sequence[StageConfig] = ()
) -> list[Problem]:
    """Warmups and decays that are longer than their schedule, and stages that would train at a rate of 0."""
    found = []
    reached = 0.0
    for stretch in _stretches(steps, lr_max, config, stages):
        place, schedule = stretch.place, stretch.schedule
        if schedule.warmup_steps > stretch.length:
            expected = f"at most {stretch.length:,}, the number of steps of this schedule"
            found.append(Problem(f"{place}.warmup_steps", schedule.warmup_steps, expected))
        elif schedule.kind == "wsd" and schedule.warmup_steps + _decay_steps(stretch) > stretch.length:
            room = stretch.length - schedule.warmup_steps
            field = "decay_share" if schedule.decay_steps is None else "decay_steps"
            expected = f"a decay of at most {room:,} steps, because the warmup takes the others of {stretch.length}"
            found.append(Problem(f"{place}.{field}", getattr(schedule, field), expected))
        if stretch.first and stretch.top is None and reached == 0.0:
            expected = "a learning rate, because the previous schedule ends at 0"
            found.append(Problem(f"{place}.lr_max", None, expected))
        reached = _rate(stretch, stretch.length - 1, reached)
    return found


@dataclass(frozen=True)
class _Stretch:
    """The steps `first` up to but not including `end`, under one schedule."""

    place: str
    """Where the config has this schedule."""
    first: int
    end: int
    top: float | None
    """The rate after the warmup; None is the rate the stretch before ended with."""
    schedule: ScheduleConfig

    @property
    def length(self) -> int:
        return self.end - self.first


def _scheduled(step: int, steps: int, lr_max: float, config: ScheduleConfig, stages: Sequence[StageConfig]) -> float:
    reached = 0.0
    *earlier, last = _stretches(steps, lr_max, config, stages)
    for stretch in earlier:
        if step < stretch.end:
            return _rate(stretch, step - stretch.first, reached)
        reached = _rate(stretch, stretch.length - 1, reached)
    return _rate(last, step - last.first, reached)


def _stretches(steps: int, lr_max: float, config: ScheduleConfig, stages: Sequence[StageConfig]) -> list[_Stretch]:
    """At least one, none of them empty; stages that a shortened run never reaches are left out."""
    own: list[tuple[str, int, float | None, ScheduleConfig]] = [("schedule", 0, lr_max, config)]
    for index, stage in enumerate(stages):
        if stage.schedule is None or (stage.from_step >= steps and stage.from_step > 0):
            continue
        top = stage.schedule.lr_max
        if stage.from_step == 0:
            own.clear()
            top = lr_max if top is None else top
        own.append((f"stages[{index}].schedule", stage.from_step, top, _with_override(config, stage.schedule)))
    ends = [first for _, first, _, _ in own[1:]] + [max(steps, own[-1][1] + 1)]
    return [_Stretch(place, first, end, top, here) for (place, first, top, here), end in zip(own, ends, strict=True)]


def _with_override(config: ScheduleConfig, override: StageScheduleConfig) -> ScheduleConfig:
    """The run's schedule with what a stage sets in place of it."""
    values = {field.name: getattr(override, field.name) for field in dataclasses.fields(ScheduleConfig)}
    if override.decay_share is not None and override.decay_steps is None:
        config = dataclasses.replace(config, decay_steps=None)
    return dataclasses.replace(config, **{name: value for name, value in values.items() if value is not None})


def _rate(stretch: _Stretch, k: int, reached: float) -> float:
    """The rate of step k of the stretch; after its end, that of its last step."""
    schedule, n = stretch.schedule, stretch.length
    top = reached if stretch.top is None else stretch.top
    k, warmup = min(k, n - 1), schedule.warmup_steps
    if k < warmup:
        return reached + (top - reached) * (k + 1) / warmup
    lowest = top * schedule.min_lr_ratio
    if schedule.kind == "inverse_sqrt":
        return max(lowest, top * math.sqrt(max(1, warmup) / (k + 1)))
    if schedule.kind == "constant":
        return top
    done = _done(stretch, k)
    if schedule.kind == "wsd":
        return lowest + (top - lowest) * _fall(schedule.decay_shape, done) if done else top
    return lowest + (top - lowest) * _fall(schedule.kind, done)


def _done(stretch: _Stretch, k: int) -> float:
    """How much of its fall the rate has behind it at step k of the stretch: from 0 to 1."""
    schedule, n = stretch.schedule, stretch.length
    if schedule.kind == "wsd":
        decay = _decay_steps(stretch)
        return (k - (n - decay) + 1) / decay if k >= n - decay else 0.0
    if schedule.kind in ("constant", "inverse_sqrt"):
        return 0.0
    return max(0, k - schedule.warmup_steps) / max(1, n - 1 - schedule.warmup_steps)


def _decay_steps(stretch: _Stretch) -> int:
    """Steps of a wsd decay."""
    schedule = stretch.schedule
    return round(stretch.length * schedule.decay_share) if schedule.decay_steps is None else schedule.decay_steps


def _fall(shape: DecayShape, done: float) -> float:
    """Falls from 1 at 0 to 0 at 1."""
    if shape == "linear":
        return 1 - done
    if shape == "1-sqrt":
        return 1 - math.sqrt(done)
    return 0.5 * (1 + math.cos(math.pi * done))


def _borders(
    steps: int, lr_max: float, config: ScheduleConfig, stages: Sequence[StageConfig], anneal: AnnealConfig | None
) -> list[tuple[int, str]]:
    """The steps at which a piece of the schedule or a stage begins, in order, and what begins there."""
    found: list[tuple[int, str]] = []
    names = {stage.from_step: stage.name for stage in stages if stage.from_step < steps}
    for stretch in _stretches(steps, lr_max, config, stages):
        schedule, after = stretch.schedule, stretch.first + stretch.schedule.warmup_steps
        if schedule.warmup_steps:
            found.append((stretch.first, "warmup"))
        if schedule.kind == "wsd":
            decay = _decay_steps(stretch)
            found += [(after, "stable")] if after < stretch.end - decay else []
            found += [(stretch.end - decay, f"decay ({schedule.decay_shape})")] if decay else []
        else:
            found.append((after, schedule.kind))
    found += [(step, "") for step in names if step not in dict(found)]
    if anneal is not None:
        found = [(step, what) for step, what in found if step < anneal.from_step]
        found.append((anneal.from_step, f"anneal ({anneal.shape})"))
    return [
        (step, f"stage {names[step]}: {what}".removesuffix(": ") if step in names else what)
        for step, what in sorted(found)
    ]
