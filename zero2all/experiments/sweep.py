"""`z2a sweep`: the same run with other settings and seeds, and which of them is better than noise.

A plan has axes (a field and its values), seeds, and how trials are run:

grid        every combination, each to its end
rungs       a trial is judged at several budgets: at each it branches, and the branch decays over the same share of its
            steps as the whole run does (a rate on its plateau cannot be judged, because a high one looks bad there and
            wins after the decay); the trial itself goes on at its constant rate
halving     rungs at 1/9 and 1/4 of the run, after each of which a third of the trials goes on, but at least two: a
            short run may prefer a neighbour of the best value, and two that end can be compared; 9 trials train 34 to
            38 % of the steps of a full grid (decay_share 0.2 to 0.65)
search      trials one after the other where a library suggests values (`suggest`)

All arms of a seed see the same text in the same order, from the same initial weights where shapes allow: differences
are compared seed by seed (`statistics`).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from zero2all.common.cores import usable_cores
from zero2all.common.errors import UsageError
from zero2all.common.progress import scaled
from zero2all.common.workspace import Workspace
from zero2all.config import RunConfig, load_config
from zero2all.config.rules import with_value
from zero2all.estimate.flops import peak_flops
from zero2all.experiments.shapes import FIELDS, shape_of
from zero2all.experiments.study import Branch, Result, Study, Task, open_study, plan_values, run_tasks, task_of
from zero2all.model.config import parameter_counts
from zero2all.packed.shard_format import PackedSplit
from zero2all.parallel.device import pick_device

SIZE = "size"
HALVING, LEAST_KEPT = 3, 2
HALVING_RUNGS: tuple[float, ...] = (1 / 9, 1 / 4)
USUAL_SPEED, HOST_SECONDS = 0.7, 0.03
"""Of a step on a GPU: the speed of its products as a share of the peak, and what the host takes to queue it."""
LEAST_DECAY = 2
QUIET = {"resilience.memory_every_steps": "0", "checkpoint.every_steps": "0", "validation.every_steps": "0"}
"""Of trials, unless they are given: a trial is short, and is judged at its end."""
METRICS = ("loss", "bpb")


@dataclass(frozen=True)
class Axis:
    """A field and its values; `low` and `high` where a search chooses between them."""

    field: str
    values: tuple[Any, ...] = ()
    """As they are written, for a field; numbers, for sizes and factors."""
    low: float = 0.0
    high: float = 0.0
    is_factor: bool = False
    """Whether values multiply what the config, or a rule, gives."""

    @property
    def is_range(self) -> bool:
        """Whether a search chooses the value."""
        return not self.values


@dataclass(frozen=True)
class SweepPlan:
    """What is asked; kept in plan.json."""

    config: str
    overrides: tuple[str, ...]
    axes: tuple[Axis, ...]
    seeds: int = 1
    metric: str = "bpb"
    rungs: tuple[float, ...] = ()
    """Shares of the run at which trials are judged, without the whole."""
    halving: bool = False
    search: str | None = None
    trials: int = 0
    """Of a search."""
    at_once: int = 1
    """Trials that are trained at the same time; on a CPU they share the cores."""


@dataclass(frozen=True)
class Trial:
    """One combination with one seed."""

    number: int
    settings: tuple[Any, ...]
    """A value for each axis."""
    seed: int
    config: RunConfig

    @property
    def run(self) -> str:
        """The name of its run."""
        return self.config.train.name


def parse_axis(text: str) -> Axis:
    """`optim.lr_max=1e-3,2e-3`, `optim.lr_max=x0.5,x1,x2` (factors), `size=3M,6M`, `optim.lr_max=1e-4..1e-2`."""
    name, equals, said = text.partition("=")
    if not equals or not said.strip() or not (name == SIZE or "." in name):
        raise UsageError(
            f"--over {text[:100]!r} is not understood. Expected FIELD=VALUE,VALUE such as optim.lr_max=1e-3,2e-3, "
            f"factors such as optim.lr_max=x0.5,x1,x2, a range for --search such as optim.lr_max=1e-4..1e-2, or "
            f"size=3M,6M for sizes of the model."
        )
    if name == "train.name":
        raise UsageError("--over train.name: runs are named after the study. Use --name.")
    low, dots, high = said.partition("..")
    try:
        if dots:
            axis = Axis(name, (), scaled(low), scaled(high))
            if not 0 < axis.low < axis.high:
                raise ValueError
            return axis
        parts = _split(said)
        is_factor = all(part[:1] == "x" for part in parts)
        if name != SIZE and not is_factor:
            return Axis(name, tuple(parts))
        axis = Axis(name, tuple(scaled(part.removeprefix("x")) for part in parts), is_factor=is_factor)
        if 0 in axis.values or (name == SIZE and is_factor):
            raise ValueError
        return axis
    except ValueError:
        raise UsageError(
            f"--over {name}: got {said[:100]!r}, expected values separated by commas, numbers above 0 "
            "after x and for size, or LOW..HIGH with LOW below HIGH."
        ) from None


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if any(not part.strip() for part in parts):
        raise ValueError
    return [part.strip() for part in parts]


class Sweep:
    """A plan, its trials, and what is known of them."""

    def __init__(self, plan: SweepPlan, name: str, workspace: Workspace, splits: Sequence[PackedSplit]) -> None:
        """`splits`: the packed sources."""
        vocabulary = int(splits[0].manifest["vocab_size"])
        self.plan, self.name, self.workspace = plan, name, workspace
        self.vocabulary, self.at_once = vocabulary, plan.at_once
        self.study: Study | None = None
        self.trials: list[Trial] = []
        if plan.search is None:
            combinations = itertools.product(*(axis.values for axis in plan.axes))
            for settings in combinations:
                self.add(settings)

    def add(self, settings: tuple[Any, ...]) -> list[Trial]:
        """A trial for each seed."""
        new = []
        for seed in range(self.plan.seeds):
            number = len(self.trials)
            new.append(Trial(number, settings, seed, self._config(settings, seed, f"{self.name}-{number:03d}")))
            self.trials += new[-1:]
        return new

    def _config(self, settings: tuple[Any, ...], seed: int, run: str) -> RunConfig:
        """The config of a trial; UsageError where it is none."""
        plan, given = self.plan, given_fields(self.plan.overrides)
        words = [f"--{name}={value}" for name, value in QUIET.items() if name not in given]
        if "parallel.cpu_threads" not in given and not torch.cuda.is_available():
            words.append(f"--parallel.cpu_threads={max(1, usable_cores() // plan.at_once)}")
        config = self.config_of(settings, run, words)
        seeded = with_value(config, "train.seed", config.train.seed + seed)
        if plan.rungs and (seeded.schedule.kind != "wsd" or seeded.stages):
            raise UsageError(
                "Trials that are judged on the way (--halving, --budgets) need a constant rate up to there: set "
                "--schedule.kind wsd, and no stages."
            )
        return seeded

    def config_of(self, settings: tuple[Any, ...], run: str, more: Sequence[str] = ()) -> RunConfig:
        """The config with these settings."""
        plan, given = self.plan, given_fields(self.plan.overrides)
        words = [*plan.overrides, f"--train.name={run}", f"--model.vocab_size={self.vocabulary}", *more]
        if plan.rungs and "stages" not in given:
            words.append("--stages=[]")  # a branch that ends early must not have read short rows only
        if plan.rungs and "optim.decay_schedule" not in given:
            words.append("--optim.decay_schedule=constant")  # or the decay of a branch would depend on its trunk's end
        factors = {}
        for axis, value in zip(plan.axes, settings, strict=True):
            if axis.field == SIZE:
                base = load_config(plan.config, words).model
                shape = shape_of(base, value)
                words += [f"--model.{name}={getattr(shape, name)}" for name in FIELDS] + ["--model.head_dim=null"]
            elif axis.is_factor:
                factors[axis.field] = value
            else:
                words.append(f"--{axis.field}={value}")
        config = load_config(plan.config, words)
        for name, factor in factors.items():
            section, _, leaf = name.partition(".")
            value = getattr(getattr(config, section, None), leaf, None)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"--over {name}: factors need a field with a number; it is {value!r}.")
            words.append(f"--{name}={type(value)(value * factor)!r}")
        return load_config(plan.config, words)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def judged_at(self, trial: Trial) -> list[tuple[int, int]]:
        """For each rung: the step at which the trial branches, not within its warmup, and the steps of the decay."""
        steps, decay = trial.config.train.steps, _decay_steps(trial.config)
        warmup, found = trial.config.schedule.warmup_steps, [(0, 0)]
        for rung in self.plan.rungs:
            whole = round(rung * steps)
            usual = max(LEAST_DECAY, round(whole * decay / steps))
            falls = min(usual, whole - warmup)
            if whole - falls <= found[-1][0] or 2 * falls < usual:
                raise UsageError(
                    f"A branch at {rung:.3g} of {steps} steps leaves too few for a warmup of {warmup} and its decay. "
                    f"Train more steps, set a shorter --schedule.warmup_steps, or leave out --halving and --budgets."
                )
            found.append((whole - falls, falls))
        return found[1:]

    def planned_steps(self) -> int:
        """Steps that will be trained, of all trials together; of halving, as if trials of equal length were kept."""
        stops = [[(0, 0), *self.judged_at(trial), (trial.config.train.steps, 0)] for trial in self.trials]
        alive, total = len(stops), 0.0
        for rung in range(1, len(self.plan.rungs) + 2):
            total += alive * fmean(own[rung][0] - own[rung - 1][0] + own[rung][1] for own in stops) if stops else 0
            alive = self.kept_of(alive) if self.plan.halving else alive
        return round(total)

    def kept_of(self, count: int) -> int:
        """How many of so many trials go on after a rung: whole settings, with all their seeds."""
        settings = count // self.plan.seeds
        return min(settings, max(LEAST_KEPT, math.ceil(settings / HALVING))) * self.plan.seeds

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, on_result: Callable[[Task, Result], None]) -> None:
        """Train all trials, or those that are left."""
        base = plan_values(load_config(self.plan.config, [*self.plan.overrides]))  # of the file now
        with open_study(self.workspace, self.name, {**plan_values(self.plan), "values": base}) as study:
            self.study = study
            first = self.trials if self.plan.search is None else self._suggested()
            run_tasks(study, [self._next(trial, 0) for trial in first], self._then(on_result), self.at_once)

    def _suggested(self) -> list[Trial]:
        """The next batch of a search, from the batches before, once all of them are known: the same after a restart."""
        if self.plan.search is None or any(self.value_of(trial) is None for trial in self.trials):
            return []
        known, first = self.means(), len(self.trials) // self.plan.seeds
        batch = range(first, min(first + self.at_once, self.plan.trials))
        return [trial for number in batch for trial in self.add(suggest(self.plan, number, known))]

    def _next(self, trial: Trial, rung: int) -> Task:
        """Train a trial to the rung, or to its end."""
        stops = self.judged_at(trial)
        until = stops[rung][0] if rung < len(stops) else None
        steps = (until or trial.config.train.steps) - (stops[rung - 1][0] if rung else 0)
        return task_of(trial.config, steps, share_of_device(trial.config, self.at_once), until)

    def _branch(self, trial: Trial, rung: int) -> Task:
        step, falls = self.judged_at(trial)[rung]
        schedule = trial.config.schedule
        branch = Branch(trial.run, step, falls, schedule.decay_shape, schedule.min_lr_ratio)
        config = with_value(trial.config, "train.name", f"{trial.run}-at{step + falls}")
        return task_of(config, falls, share_of_device(config, self.at_once), branch=branch)

    def _then(self, on_result: Callable[[Task, Result], None]) -> Callable[[Task, Result], list[Task]]:
        """What follows from each result: a branch, the next part of the trial, or the choice of those that go on."""
        by_run, begun = {trial.run: trial for trial in self.trials}, set[str]()

        def then(task: Task, result: Result) -> list[Task]:
            assert self.study is not None
            on_result(task, result)
            if task.branch is not None:
                trial = by_run[task.branch.of]
                rung = [step for step, _ in self.judged_at(trial)].index(task.branch.step)
                self.study.drop_checkpoints(task.run)
                return self._go_on(rung, begun)
            if task.until is None or "failed" in result:
                self.study.drop_checkpoints(task.run)
                return [*self._go_on(0, begun), *(self._next(trial, 0) for trial in self._suggested())]
            trial = by_run[task.run]
            rung = [step for step, _ in self.judged_at(trial)].index(task.until)
            branch = [self._branch(trial, rung)]
            return branch if self.plan.halving else [*branch, self._next(trial, rung + 1)]

        return then

    def _go_on(self, first: int, begun: set[str]) -> list[Task]:
        """Of halving: the next part of the trials that are kept, once all of a rung are judged."""
        assert self.study is not None
        if not self.plan.halving:
            return []
        for rung in range(first, len(self.plan.rungs)):
            alive = self.alive(rung)
            judged = [self.rung_value(trial, rung) for trial in alive]
            if any(value is None for value in judged):
                return []
            kept = self.alive(rung + 1)
            for trial in alive:
                if trial not in kept:
                    self.study.drop_checkpoints(trial.run)
            tasks = [task for trial in kept if (task := self._next(trial, rung + 1)).key not in begun]
            begun.update(task.key for task in tasks)
            if tasks:
                return tasks
        return []

    # ---- results ---------------------------------------------------------------------------------------------------

    def alive(self, rung: int) -> list[Trial]:
        """The trials that are trained up to a rung: all, or those that halving kept after the rung before."""
        if rung == 0 or not self.plan.halving:
            return self.trials
        before = self.alive(rung - 1)
        groups: dict[tuple[Any, ...], list[Trial]] = {}
        for trial in before:
            groups.setdefault(trial.settings, []).append(trial)
        means = {
            settings: sum(self.rung_value(trial, rung - 1) or math.inf for trial in trials) / len(trials)
            for settings, trials in groups.items()
        }
        kept = sorted(means, key=lambda each: means[each])[: self.kept_of(len(before)) // self.plan.seeds]
        return [trial for trial in before if trial.settings in kept and math.isfinite(means[trial.settings])]

    def rung_value(self, trial: Trial, rung: int) -> float | None:
        """The metric of a trial's branch at a rung; infinity where it failed, None where it is not known yet."""
        assert self.study is not None
        step, falls = self.judged_at(trial)[rung]
        trunk = [self.study.results.get(f"{trial.run}@{step}") for step, _ in self.judged_at(trial)[: rung + 1]]
        if any(result and "failed" in result for result in trunk):
            return math.inf
        result = self.study.results.get(f"{trial.run}-at{step + falls}")
        return None if result is None else self.metric(result)

    def means(self) -> dict[tuple[Any, ...], float]:
        """The mean over seeds of settings whose seeds are all known."""
        values: dict[tuple[Any, ...], list[float | None]] = {}
        for trial in self.trials:
            values.setdefault(trial.settings, []).append(self.value_of(trial))
        return {
            settings: sum(each for each in found if each is not None) / len(found)
            for settings, found in values.items()
            if None not in found
        }

    def failed(self, trial: Trial) -> bool:
        """Whether a trial failed on the way."""
        assert self.study is not None
        results = self.study.results
        stops = [f"{trial.run}@{step}" for step, _ in self.judged_at(trial)]
        return any("failed" in results.get(key, {}) for key in (*stops, trial.run))

    def value_of(self, trial: Trial) -> float | None:
        """The metric of a finished trial; infinity where it failed, None where it was not trained to its end."""
        assert self.study is not None
        result = self.study.results.get(trial.run)
        return None if result is None else self.metric(result)

    def metric(self, result: Result) -> float:
        """What is minimised."""
        name, _, channel = self.plan.metric.partition("/")
        scores = result["channels"].get(channel, {}) if channel and "failed" not in result else result
        value = scores.get("loss" if name == "loss" else "bits_per_byte")
        return math.inf if value is None or not math.isfinite(value) else float(value)


def given_fields(overrides: Sequence[str]) -> set[str]:
    """The fields that overrides set."""
    return {word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")}


def budget_rungs(budgets: Sequence[float], tokens: float) -> tuple[float, ...]:
    """The shares of a run of `tokens` that smaller budgets are."""
    if any(budget <= 0 or budget > tokens for budget in budgets):
        raise UsageError(f"--budgets must lie above 0 and at most at the tokens of the run, {tokens:,.0f}.")
    return tuple(sorted({budget / tokens for budget in budgets if budget < tokens}))


def _decay_steps(config: RunConfig) -> int:
    """Steps of the decay of a whole run."""
    schedule = config.schedule
    return schedule.decay_steps or max(1, round(schedule.decay_share * config.train.steps))


def share_of_device(config: RunConfig, at_once: int) -> float:
    """What a run takes of the device: on a GPU the part of a step in which it computes, else it waits for the host."""
    device = pick_device(config.parallel.device)
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None:
        return 1 / at_once
    computing = 6 * parameter_counts(config.model)["matmul"] * config.train.tokens_per_step / (USUAL_SPEED * peak)
    return max(1 / at_once, computing / (computing + HOST_SECONDS))


WIDE = 8
"""A range whose ends are this many times apart is searched by its logarithm."""


def suggest(plan: Any, number: int, known: Mapping[tuple[Any, ...], float]) -> tuple[Any, ...]:
    """What Optuna suggests for trial `number` of a SweepPlan; `known`: settings -> the metric to be minimised.

    The ledger is the truth: Optuna's study is made anew from it each time, so that a suggestion is a function of the
    plan, its number and the results before its batch, and a sweep that was killed goes on as it would have.
    """
    try:
        import optuna

        if plan.search == "gp":
            import scipy  # noqa: F401  # which it needs
    except ImportError as error:
        raise UsageError(f"--search needs the package {error.name}: pip install 'zero2all[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space: dict[str, Any] = {}
    for axis in plan.axes:
        if axis.is_range:
            is_wide = axis.high / axis.low >= WIDE
            space[axis.field] = optuna.distributions.FloatDistribution(axis.low, axis.high, log=is_wide)
        else:
            space[axis.field] = optuna.distributions.CategoricalDistribution(axis.values)
    samplers = {"tpe": optuna.samplers.TPESampler, "gp": optuna.samplers.GPSampler}
    kind = samplers.get(plan.search or "", optuna.samplers.RandomSampler)
    study = optuna.create_study(sampler=kind(seed=number + 1))
    for settings, value in known.items():
        parameters = dict(zip(space, settings, strict=True))
        finite = value if math.isfinite(value) else 1e9
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=space, value=finite))
    asked = study.ask(space).params
    ends = {axis.field: (axis.low, axis.high) for axis in plan.axes if axis.is_range}
    rounded = {name: min(max(float(f"{asked[name]:.4g}"), low), high) for name, (low, high) in ends.items()}
    return tuple((asked | rounded)[name] for name in space)
