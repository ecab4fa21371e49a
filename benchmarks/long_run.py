"""A long run with failures, simulated event by event: how many days it takes, what it costs, where the time goes.

Work is counted in seconds of training at full speed. Between two events everything is known in closed form, so one
event costs the same however long the run trained undisturbed. All repetitions are simulated side by side (numpy).

- Failures, and nodes that turn slow, come at random with constant rates: waiting times are exponential. A failure may
  also hit a restart. A hang is a failure that is noticed only after the time-out.
- `process` and `network` failures need a restart on the same nodes. A `node` failure takes the node away until it is
  repaired; a spare takes its place, else the run waits, or goes on with fewer nodes if it is elastic.
- Checkpoints lie at multiples of the interval in work, as `every n steps` puts them. A checkpoint on disk can be used
  once it is written; a copy in memory at once, after a process or network failure (1 copy) or any (2, the second on
  another node). Restarts that are planned (a slow node is replaced, a node comes back) lose no work.
- Slow nodes and slow links slow the whole run, because all ranks wait for the slowest, until they are found.

Goodput is the time the work would take without any disturbance, divided by the time it took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError
from zero2all.estimate.run_calculators import LLAMA3_FAILURES_PER_GPU_HOUR, daly_interval, goodput

Floats = NDArray[np.float64]

HOUR, DAY = 3600.0, 86_400.0
KINDS = ("process", "node", "network")
PARTS = (
    *("useful", "lost work", "saving", "copies in memory", "hang", "restart", "waiting for nodes"),
    *("fewer nodes", "slow nodes", "slow links"),
)
"""Where wall time goes; the parts sum to the whole."""
MAX_EVENTS = 100_000
"""Events of one repetition, after which the run counts as one that does not progress."""
LEAST_GOODPUT = 0.02
RUNNING, RESTARTING, WAITING = 0, 1, 2


@dataclass(frozen=True)
class Slowness:
    """Something that slows the whole run from time to time."""

    per_node_day: float = 0.0
    slowdown: float = 1.0  # a step takes this many times as long
    hours_until_found: float = 24.0


@dataclass(frozen=True)
class Plan:
    """A run and the machines it runs on. Rates are per GPU-hour or node-day, times in the unit of their name."""

    work_seconds: float  # of training at full speed, with nothing that disturbs it
    nodes: int
    gpus_per_node: int = 8
    failures_per_gpu_hour: float = LLAMA3_FAILURES_PER_GPU_HOUR
    shares: Mapping[str, float] = field(default_factory=lambda: {"process": 0.75, "node": 0.2, "network": 0.05})
    hang_share: float = 0.1  # of failures; they are noticed after hang_seconds
    hang_seconds: float = 600.0
    restart_seconds: float = 300.0  # from the failure to the first new step, on the same nodes
    replace_seconds: float = 180.0  # more when a node is replaced
    repair_seconds: float = 24 * HOUR  # of a node, on average
    spare_nodes: int = 0
    least_nodes: int | None = None  # elastic: goes on with as few nodes as this; None: waits for all
    interval_seconds: float | None = None  # of work between two checkpoints; None: Daly's
    save_seconds: float = 60.0  # until a checkpoint is on disk
    stall_seconds: float | None = None  # of training per save; None: blocking, the whole of save_seconds
    memory_interval_seconds: float | None = None  # of work between two copies in memory; None: no copies
    memory_stall_seconds: float = 0.5
    memory_copies: int = 1  # 2: another node has one too
    slow_nodes: Slowness = Slowness()
    slow_links: Slowness = Slowness()
    price_per_gpu_hour: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs that train."""
        return self.nodes * self.gpus_per_node

    @property
    def mean_seconds_between_failures(self) -> float:
        """Of the whole run; infinite without failures."""
        rate = self.failures_per_gpu_hour * self.gpus / HOUR
        return 1.0 / rate if rate else math.inf

    @property
    def stall(self) -> float:
        """Seconds that training stands still for a save."""
        return self.save_seconds if self.stall_seconds is None else self.stall_seconds

    @property
    def interval(self) -> float:
        """Seconds of work between two checkpoints. Daly's for the stall; when it is 0, a save follows the other."""
        if self.interval_seconds is not None:
            return self.interval_seconds
        if not self.failures_per_gpu_hour:
            return self.work_seconds
        best = daly_interval(self.stall, self.mean_seconds_between_failures)
        return min(self.work_seconds, max(best, self.save_seconds, 1.0))


@dataclass(frozen=True)
class Outcome:
    """What the repetitions gave: arrays with one value each."""

    plan: Plan
    wall_seconds: Floats
    parts: dict[str, Floats]  # name of PARTS -> seconds
    failures: Floats

    @property
    def goodput(self) -> Floats:
        """Undisturbed time / time, of each repetition."""
        return self.plan.work_seconds / self.wall_seconds

    @property
    def cost(self) -> Floats | None:
        """Of all nodes held, spares included."""
        price = self.plan.price_per_gpu_hour
        if price is None:
            return None
        gpus = (self.plan.nodes + self.plan.spare_nodes) * self.plan.gpus_per_node
        return self.wall_seconds / HOUR * gpus * price

    def shares(self) -> dict[str, float]:
        """The mean share of wall time of each part."""
        return {name: float((spent / self.wall_seconds).mean()) for name, spent in self.parts.items()}


def band(values: Floats) -> tuple[float, float, float]:
    """The 10, 50 and 90 % points."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return float(low), float(middle), float(high)


def simulate(plan: Plan, repetitions: int = 200, seed: int = 0) -> Outcome:
    """Run the plan to its end `repetitions` times. The same seed gives the same figures."""
    check_plan(plan)
    lanes = _Lanes(plan, repetitions, np.random.default_rng(seed))
    events = 0
    while lanes.step():
        events += 1
        if events > MAX_EVENTS:
            raise BadInputError(
                f"The run does not end: after {MAX_EVENTS:,} events {lanes.kept_share:.1%} of the work are done. Save "
                f"more often, restart faster, or use fewer GPUs."
            )
    return Outcome(plan, lanes.time, lanes.spent, lanes.failures)


class _Lanes:
    """The repetitions, one per lane of each array, each at a moment of its own."""

    def __init__(self, plan: Plan, count: int, random: np.random.Generator) -> None:
        self.plan, self.random = plan, random
        self.time = np.zeros(count)
        self.done = np.zeros(count)  # work, also what no checkpoint has yet
        self.saving = np.zeros(count)  # seconds left of a save that training waits for
        self.disk = np.zeros(count)  # work in the newest checkpoint that is written
        self.mode = np.full(count, RUNNING)
        self.mode_until = np.full(count, np.inf)  # end of a restart
        self.broken = np.zeros(count)  # nodes in repair
        self.slow_until = {name: np.full(count, -1.0) for name in ("slow nodes", "slow links")}
        self.failures = np.zeros(count)
        self.spent = {name: np.zeros(count) for name in PARTS}
        self.is_open = np.ones(count, dtype=bool)
        every = plan.memory_interval_seconds
        self._memory_drag = 0.0 if every is None else plan.memory_stall_seconds / every
        self._slowness = {"slow nodes": plan.slow_nodes, "slow links": plan.slow_links}

    @property
    def kept_share(self) -> float:
        """Of the work, what is on disk."""
        return float(self.disk.mean() / self.plan.work_seconds)

    def step(self) -> bool:
        """Move every open lane to its next event; False when all are done."""
        if not self.is_open.any():
            return False
        rates, slower = self._rates(), self._slowdowns()
        total = np.maximum(sum(rates.values()), 1e-30)
        wait = self.random.exponential(size=len(self.time)) / total
        choice = self.random.random(len(self.time)) * total
        drag = np.asarray(1.0 + sum(slower.values()))  # wall seconds per second of work, saves aside
        limit = np.where(self.mode == RESTARTING, self.mode_until - self.time, np.inf)
        is_running = (self.mode == RUNNING) & self.is_open
        to_end = self._seconds_to_end(drag)
        limit = np.where(is_running, to_end, limit)
        for until in self.slow_until.values():
            left = until - self.time
            limit = np.where(is_running & (left > 0), np.minimum(limit, left), limit)
        is_random = (wait < limit) & self.is_open
        span = np.where(self.is_open, np.minimum(wait, limit), 0.0)
        ends = is_running & ~is_random & (span >= to_end)
        self._pass(span, is_running, drag, slower)
        self._close(ends)
        self._deadlines(~is_random & self.is_open)
        self._happen(is_random, choice, rates)
        return True

    def _rates(self) -> dict[str, Floats]:
        """Events per second of each kind. Nodes that wait for others do not fail."""
        plan, is_up = self.plan, self.mode != WAITING
        active = np.minimum(plan.nodes, plan.nodes + plan.spare_nodes - self.broken)
        per_second = np.where(is_up, active * plan.gpus_per_node * plan.failures_per_gpu_hour / HOUR, 0.0)
        rates = {kind: per_second * plan.shares.get(kind, 0.0) for kind in KINDS}
        rates["repair"] = self.broken / plan.repair_seconds
        for name, kind in self._slowness.items():
            may = (self.mode == RUNNING) & (self.slow_until[name] <= self.time)
            rates[name] = np.where(may, active * kind.per_node_day / DAY, 0.0)
        return rates

    def _slowdowns(self) -> dict[str, Floats]:
        """By part: wall seconds that a second of work takes more than one."""
        plan = self.plan
        active = np.minimum(plan.nodes, plan.nodes + plan.spare_nodes - self.broken)
        slower = {"fewer nodes": plan.nodes / np.maximum(active, 1.0) - 1.0}
        factor = 1.0 + slower["fewer nodes"]
        for name, kind in self._slowness.items():
            slower[name] = factor * np.where(self.slow_until[name] > self.time, kind.slowdown - 1.0, 0.0)
            factor = factor + slower[name]
        slower["copies in memory"] = np.full(len(self.time), self._memory_drag)
        return slower

    def _next_save(self) -> Floats:
        """The first multiple of the interval above the work done, also after rounding."""
        interval = self.plan.interval
        return (np.floor(self.done / interval + 1e-9) + 1.0) * interval

    def _seconds_to_end(self, drag: Floats) -> Floats:
        """Wall seconds to the end of the work. The last checkpoint, at the end itself, is not counted."""
        work = self.plan.work_seconds
        interval = self.plan.interval
        saves = np.maximum(0.0, np.ceil(work / interval - 1e-9) * interval - self._next_save()) / interval
        return self.saving + (work - self.done) * drag + np.round(saves) * self.plan.stall

    def _pass(self, span: Floats, is_running: NDArray[np.bool_], drag: Floats, slower: dict[str, Floats]) -> None:
        """Let `span` seconds go by: work and saves in running lanes."""
        plan = self.plan
        self.time = self.time + span
        self.spent["restart"] += np.where(self.mode == RESTARTING, span, 0.0)
        self.spent["waiting for nodes"] += np.where(self.mode == WAITING, span, 0.0)
        span = np.where(is_running, span, 0.0)
        paid = np.minimum(span, self.saving)
        self.saving = self.saving - paid
        left = span - paid
        cycle = plan.interval * drag + plan.stall
        first = (self._next_save() - self.done) * drag  # wall seconds until the next save begins
        in_cycles = np.maximum(left - first, 0.0)
        cycles = np.floor(in_cycles / cycle)
        rest = in_cycles - cycles * cycle
        reaches = left >= first
        stalled = np.where(reaches, cycles * plan.stall + np.minimum(rest, plan.stall), 0.0)
        worked = (left - stalled) / drag
        self.saving = np.where(reaches, np.maximum(plan.stall - rest, 0.0), self.saving)
        self.done = np.where(is_running, np.minimum(self.done + worked, plan.work_seconds), self.done)
        self.spent["saving"] += paid + stalled
        for name, more in slower.items():
            self.spent[name] += worked * more
        self.spent["useful"] += worked
        # A save can be used when it is written: behind its stall for an asynchronous one.
        begun = np.floor(self.done / plan.interval + 1e-9)
        since = np.where(self.saving > 0, plan.stall - self.saving, plan.stall)
        since = since + np.maximum(self.done - begun * plan.interval, 0.0) * drag
        behind = np.ceil(np.maximum(plan.save_seconds - since, 0.0) / cycle - 1e-12)
        written = np.maximum(begun - behind, 0.0) * plan.interval
        self.disk = np.where(is_running, np.maximum(self.disk, written), self.disk)

    def _close(self, ends: NDArray[np.bool_]) -> None:
        self.is_open = self.is_open & ~ends

    def _deadlines(self, due: NDArray[np.bool_]) -> None:
        """What ends at a known time: a restart, a slowness that was found (its node is replaced, without loss)."""
        restarted = due & (self.mode == RESTARTING) & (self.mode_until <= self.time + 1e-6)
        self.mode = np.where(restarted, RUNNING, self.mode)
        for name, until in self.slow_until.items():
            found = due & (self.mode == RUNNING) & (until > 0) & (until <= self.time + 1e-6) & ~restarted
            self.slow_until[name] = np.where(found, -1.0, until)
            if name == "slow nodes":
                self._plan_restart(found)

    def _happen(self, is_random: NDArray[np.bool_], choice: Floats, rates: dict[str, Floats]) -> None:
        """The random events: which kind, and what follows."""
        below = np.zeros(len(choice))
        for kind, rate in rates.items():
            here = is_random & (choice >= below) & (choice < below + rate)
            below = below + rate
            if not here.any():
                continue
            if kind in KINDS:
                self._fail(here, kind)
            elif kind == "repair":
                self._repair(here)
            else:
                until = self.time + self._slowness[kind].hours_until_found * HOUR
                self.slow_until[kind] = np.where(here, until, self.slow_until[kind])

    def _fail(self, here: NDArray[np.bool_], kind: str) -> None:
        plan = self.plan
        self.failures += here
        hangs = here & (self.mode == RUNNING) & (self.random.random(len(self.time)) < plan.hang_share)
        self.time = self.time + np.where(hangs, plan.hang_seconds, 0.0)
        self.spent["hang"] += np.where(hangs, plan.hang_seconds, 0.0)
        kept = self.disk
        if plan.memory_interval_seconds is not None and (kind != "node" or plan.memory_copies > 1):
            every = plan.memory_interval_seconds
            kept = np.maximum(kept, np.floor(self.done / every + 1e-9) * every)
        lost = np.where(here, np.maximum(self.done - kept, 0.0), 0.0)
        self.done = self.done - lost
        self.saving = np.where(here, 0.0, self.saving)
        self.spent["useful"] -= lost
        self.spent["lost work"] += lost
        if kind == "node":
            self.broken = self.broken + here
        self._restart(here, replaces=kind == "node")

    def _repair(self, here: NDArray[np.bool_]) -> None:
        plan = self.plan
        was_short = here & (self.broken > plan.spare_nodes)
        self.broken = self.broken - here
        self._restart(was_short & (self.mode == WAITING), replaces=True)
        self._plan_restart(was_short & (self.mode == RUNNING))  # elastic: the node joins

    def _plan_restart(self, here: NDArray[np.bool_]) -> None:
        """A restart that was announced: the run saves first, so nothing is lost."""
        if here.any():
            save = np.where(here, self.plan.save_seconds, 0.0)
            self.time = self.time + save
            self.spent["saving"] += save
            self.saving = np.where(here, 0.0, self.saving)
            self.disk = np.where(here, np.maximum(self.disk, self.done), self.disk)
            self._restart(here, replaces=True)

    def _restart(self, here: NDArray[np.bool_], replaces: bool) -> None:
        """Start again where there are enough nodes; wait where there are not."""
        plan = self.plan
        least = plan.nodes if plan.least_nodes is None else plan.least_nodes
        enough = plan.nodes + plan.spare_nodes - self.broken >= least
        seconds = plan.restart_seconds + (plan.replace_seconds if replaces else 0.0)
        starts = here & enough
        self.mode = np.where(here, np.where(enough, RESTARTING, WAITING), self.mode)
        self.mode_until = np.where(starts, self.time + seconds, self.mode_until)


def check_plan(plan: Plan) -> None:
    """Refuse a plan that cannot be, or cannot end; all problems at once."""
    wrong = []
    whole = sum(plan.shares.values())
    if unknown := sorted(set(plan.shares) - set(KINDS)):
        wrong.append(f"shares of failures: {', '.join(unknown)} is not a kind; the kinds are {', '.join(KINDS)}")
    elif not abs(whole - 1.0) <= 1e-6 or min(plan.shares.values()) < 0:  # NaN is no share either
        wrong.append(f"shares of failures must be at least 0 and sum to 1; they sum to {whole:g}")
    if plan.least_nodes is not None and not 1 <= plan.least_nodes <= plan.nodes:
        wrong.append(f"an elastic run needs at least 1 and at most {plan.nodes} nodes; got {plan.least_nodes}")
    if plan.stall > plan.save_seconds:
        wrong.append(f"a save stalls training for {plan.stall:g} s, longer than its own {plan.save_seconds:g} s")
    for name, kind in (("slow nodes", plan.slow_nodes), ("slow links", plan.slow_links)):
        if kind.slowdown < 1.0:
            wrong.append(f"{name}: a step takes {kind.slowdown:g} times as long, which is faster; give 1 or more")
    if plan.memory_copies not in (1, 2):
        wrong.append(f"there are 1 or 2 copies in memory; got {plan.memory_copies}")
    for name, value in (
        ("work", plan.work_seconds),
        ("nodes", plan.nodes),
        ("interval", plan.interval_seconds),
        ("interval of copies in memory", plan.memory_interval_seconds),
        ("repair time", plan.repair_seconds),
    ):
        if value is not None and value <= 0:
            wrong.append(f"{name} must be above 0; got {value:g}")
    if not wrong and plan.failures_per_gpu_hour:
        mean = plan.mean_seconds_between_failures
        kept = min(plan.interval, plan.memory_interval_seconds or math.inf)
        expected = goodput(kept, plan.stall, plan.restart_seconds, mean)
        if expected < LEAST_GOODPUT:
            wrong.append(
                f"there is a failure every {mean:,.0f} s on average, but a restart takes {plan.restart_seconds:,.0f} s "
                f"and a checkpoint comes every {plan.interval:,.0f} s: the run would hardly progress (goodput "
                f"{expected:.2%}). Save more often, restart faster, or use fewer GPUs"
            )
    if wrong:
        raise BadInputError("This run cannot be simulated: " + "; ".join(wrong) + ".")
