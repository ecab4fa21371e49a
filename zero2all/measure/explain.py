"""What limits a run, and what to change, from the run's own record.

Every finding has its evidence: figures of the run. What a change is worth is a bound that follows from them (waiting
for data can at most be saved whole), or a formula that is named; where the record does not tell, the finding says so
and names the command that measures it.

The record is the run's folder: metrics, events, config. What is not there is named in `missing`, and the rest is used.
Where the time went is the account of `track.goodput`. The first rows of every attempt, in which caches fill and kernels
compile, count for the time but not for the speed.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError, UserError
from zero2all.config import RunConfig, config_from_values, with_new_names
from zero2all.estimate.flops import flops_per_token, peak_flops
from zero2all.estimate.run_calculators import daly_interval, goodput
from zero2all.track.goodput import Goodput, number_of, run_goodput
from zero2all.track.reader import Event, RunReader, Series

Floats = NDArray[np.float64]

WARM_UP_ROWS = 3
BLOCKS = 10
COMPUTE_PARTS = ("forward", "loss", "backward")


@dataclass(frozen=True)
class ValueWithError:
    """A mean or median, and the standard error of it, from blocks of consecutive rows: neighbours are alike."""

    value: float
    error: float


@dataclass
class RunRecord:
    """One run, as its own files tell it."""

    reader: RunReader
    config: RunConfig | None
    values: dict[str, Any]  # the config as it was written
    environment: dict[str, Any]
    notes: list[str]  # what the run said at its last start
    card_bytes: float | None
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.reader.name

    def events(self, *kinds: str) -> list[Event]:
        """Events of training of these kinds, in order of time."""
        found = (event for event in self.reader.events() if event.kind in kinds and event.writer == "train")
        return sorted(found, key=lambda event: event.time)

    @cached_property
    def step_seconds(self) -> Series:
        """Seconds of the steps that count."""
        return self.reader.series("time/step")

    @cached_property
    def steady(self) -> NDArray[np.bool_]:
        """Which rows of `step_seconds` are not among the first of an attempt."""
        starts = [event.time for event in self.events("segment")] or [-np.inf]
        attempt = np.searchsorted(starts, self.step_seconds.time, side="right")
        place = np.arange(len(attempt)) - np.searchsorted(attempt, attempt)
        warm = place >= WARM_UP_ROWS
        return warm if warm.any() else np.ones(len(attempt), dtype=bool)

    def steady_values(self, metric: str) -> Floats:
        """The values of a metric in the steady rows."""
        points = self.reader.series(metric)
        steps = self.step_seconds.step[self.steady]
        values = points.value[np.isin(points.step, steps)] if len(steps) else points.value
        return values[np.isfinite(values)]

    @cached_property
    def parts(self) -> dict[str, float]:
        """Mean seconds of each part of a step; together the mean step."""
        names = [name for name in self.reader.metrics() if name.startswith("time/") and name != "time/step"]
        found = {name.removeprefix("time/"): self.steady_values(name) for name in names}
        return {name: float(values.mean()) for name, values in found.items() if len(values)}

    @cached_property
    def speed(self) -> ValueWithError | None:
        """Tokens per second of all processes, in steady steps; None when there are none."""
        values = self.steady_values("tokens_per_second")
        return figure_of(values) if len(values) else None

    @property
    def processes(self) -> int:
        """Processes of the last attempt."""
        return int(self.environment.get("processes", 1))

    @cached_property
    def flops(self) -> dict[str, float] | None:
        """Model FLOPs of a token in each convention."""
        config = self.config
        return None if config is None else flops_per_token(config.model, config.data.seq_len)

    @property
    def peak(self) -> float | None:
        """FLOP/s of one device, from its data sheet; None where that is not known."""
        return peak_flops(str(self.environment.get("device", "")))

    def mfu(self, convention: str = "palm") -> float | None:
        """MFU of the steady steps."""
        if self.speed is None or self.flops is None or self.peak is None:
            return None
        return self.speed.value * self.flops[convention] / (self.peak * self.processes)

    def memory(self, name: str) -> float | None:
        """The largest of `memory/<name>` in bytes."""
        values = self.reader.series(f"memory/{name}").value
        values = values[np.isfinite(values)]
        return float(values.max()) if len(values) else None

    @property
    def padding_share(self) -> float | None:
        """The share of padding in the packed rows that the run read; None where the index is not beside the run."""
        config = self.config
        if config is None:
            return None
        if config.data.packing == "concat":
            return 0.0
        slots = padding = 0
        packed = self.reader.folder.resolve().parent.parent / "packed"
        for path in packed.glob(f"*/train/best-fit-{config.data.seq_len}/manifest.json"):
            try:
                facts = json.loads(path.read_bytes())
                slots += int(facts["rows"]) * (int(facts["seq_len"]) + 1)
                padding += int(facts["padding"])
            except (OSError, ValueError, LookupError, TypeError):
                continue
        return padding / slots if slots else None

    @cached_property
    def account(self) -> Goodput:
        """Where the time of the run went."""
        return run_goodput(self.reader)


def read_record(folder: Path, card_gib: float | None = None) -> RunRecord:
    """Read a run; a folder without any metrics is refused, whatever else is missing is named."""
    if not folder.is_dir():
        raise BadInputError(f"There is no run in {folder}. Give a run's folder, for example work/runs/NAME.")
    reader = RunReader(folder)
    if not reader.metrics():
        raise BadInputError(f"The run {folder} has no metrics yet, so there is nothing to explain.")
    start = next((event for event in reversed(reader.events()) if event.kind == "start"), None)
    data = {} if start is None else start.data
    values = reader.config() or {}
    missing = [f"{problem}: {count}" for problem, count in reader.problems.items()]
    config = None
    try:
        config = config_from_values(with_new_names(values), str(folder / "config.yaml")) if values else None
    except UserError as error:
        missing.append(f"config.yaml cannot be used: {str(error).splitlines()[0]}")
    environment = data.get("environment")
    card = number_of(data.get("memory_bytes")) or (card_gib or 0.0) * 2**30
    notes = [str(note) for note in data.get("notes") or ()]
    environment = environment if isinstance(environment, dict) else {}
    record = RunRecord(reader, config, values, environment, notes, card or None, missing)
    record.missing += list(_gaps(record, start is not None))
    return record


def _gaps(record: RunRecord, has_start: bool) -> list[str]:
    """What an explanation needs and this run does not have."""
    metrics = record.reader.metrics()
    on_gpu = str(record.environment.get("device", "cpu")) != "cpu"
    gaps = {
        "no config.yaml: FLOPs, batch and recompute are unknown": record.config is None and not record.values,
        "no start event: device, processes and versions are unknown": not has_start,
        "no time/step: seconds of steps and where the time went are unknown": "time/step" not in metrics,
        "no parts of a step (time/forward, …): an older version wrote this run": not record.parts,
        "the peak of this device is not known: no MFU": has_start and record.peak is None,
        "stages of other lengths: FLOPs are those of data.seq_len": len(record.events("stage")) > 1,
        "no memory metrics: the run logs them on a GPU": "memory/peak" not in metrics,
        "the card's memory was not recorded: give --card-gib": on_gpu and record.card_bytes is None,
        "no checkpoints were written": not record.events("checkpoint"),
        "the run is still going: these are its figures so far": record.reader.status.state == "running",
    }
    return [gap for gap, is_there in gaps.items() if is_there]


def figure_of(values: Floats) -> ValueWithError:
    """The median, and its error: from the medians of consecutive blocks, as ratios, so that a time and a speed have the
    same relative error."""
    middle = float(np.median(values))
    blocks = [float(np.median(block)) for block in np.array_split(values, min(BLOCKS, len(values)))]
    if len(blocks) < 3 or min(blocks) <= 0:
        return ValueWithError(middle, math.nan)
    return ValueWithError(middle, middle * float(np.std(np.log(blocks), ddof=1)) / math.sqrt(len(blocks)))


GIB = 2**30
CONVENTION = "palm"
SIGNIFICANT = 3.0
"""Standard errors."""
LEAST_INTERRUPTIONS = 3
"""From fewer, no mean time between them is taken."""
OUTLIER = 1.5
"""A step that takes this many times the median is slow."""
FULL, ROOMY = 0.95, 0.6
"""Shares of the card that are reserved: above, a run is close to running out; below, much is free."""
HEADROOM = 0.92
"""Share of the card that advice may fill."""


@dataclass(frozen=True)
class RunFinding:
    """Something that costs time or risks the run."""

    what: str
    evidence: str
    change: str
    worth: str  # with its basis
    share: float = 0.0  # of the run's time; 0 where it costs no time
    is_urgent: bool = False


@dataclass(frozen=True)
class Explanation:
    """All about one run."""

    record: RunRecord
    limit: str
    findings: list[RunFinding]


def explain(record: RunRecord) -> Explanation:
    """Judge a run."""
    looks = (_waiting, _pauses, _interruptions, _uneven, _memory, _padding)
    findings = [finding for look in looks for finding in look(record)]
    findings.sort(key=lambda finding: (not finding.is_urgent, -finding.share))
    return Explanation(record, limit_of(record), findings)


def limit_of(record: RunRecord) -> str:
    """The one thing that limits the run most, with its figures."""
    parts, account = record.parts, record.account
    if not parts or not account.total_seconds:
        return "The record does not tell: it has no times of steps."
    step = sum(parts.values())
    inside = account.goodput
    compute = sum(parts.get(name, 0.0) for name in COMPUTE_PARTS) / step
    groups = {
        "what is not steps that count (starts / evaluation / checkpoints / lost steps)": 1.0 - inside,
        "waiting for data": inside * parts.get("data_wait", 0.0) / step,
        "communication (reduce and bubble)": inside * (parts.get("reduce", 0.0) + parts.get("bubble", 0.0)) / step,
        "the optimizer": inside * parts.get("optimizer", 0.0) / step,
        "gaps between the parts of a step": inside * (parts.get("other", 0.0) + parts.get("collate", 0.0)) / step,
        "forward and backward passes": inside * compute,
    }
    name, share = max(groups.items(), key=lambda group: group[1])
    others = sorted(((other, its) for other, its in groups.items() if other != name), key=lambda group: -group[1])
    text = f"The run is limited by {name}: {share:.1%} of its time. Next: {others[0][0]}, {others[0][1]:.1%}."
    if (mfu := record.mfu(CONVENTION)) is not None:
        text += f" Its steady steps reach {mfu:.1%} MFU ({CONVENTION} convention, data-sheet peak)."
    return text


def _waiting(record: RunRecord) -> Iterator[RunFinding]:
    """Parts of a step in which nothing is computed."""
    step = sum(record.parts.values())
    inside = record.account.goodput
    data = record.config.data if record.config is not None else None
    advice = {
        "data_wait": (
            0.02,
            "waiting for data",
            f"more readers or reading further ahead (data.readers is {data.readers}, data.prefetch_steps "
            f"{data.prefetch_steps})"
            if data
            else "more readers (data.readers), or reading further ahead (data.prefetch_steps)",
        ),
        "reduce": (0.1, "exposed communication", "larger steps per reduction (fewer ranks or more tokens per step)"),
        "bubble": (0.05, "pipeline bubble", "twice the micro-batches per step, which halves the bubble"),
        "optimizer": (0.1, "the optimizer's share", "more tokens per step, or the fused optimizer"),
    }
    for part, (least, what, change) in advice.items():
        share = record.parts.get(part, 0.0) / step if step else 0.0
        if share >= least:
            evidence = f"{1e3 * record.parts[part]:.3g} ms of a step of {1e3 * step:.4g} ms (mean of steady steps)"
            most = share / 2 if part == "bubble" else share
            worth = f"at most {most / (1 - most):.1%} more tokens/s (that part of the step gone)"
            yield RunFinding(what, evidence, change, worth, inside * share)


def _pauses(record: RunRecord) -> Iterator[RunFinding]:
    spent, total = record.account.seconds, record.account.total_seconds
    if not total:
        return
    for cause, name, least, change in (
        ("validate", "validation", 0.05, "validate half as often"),
        ("save", "checkpoint stalls", 0.01, "save half as often"),
    ):
        share = spent[cause] / total
        if share >= least:
            evidence = f"{spent[cause]:.3g} s of {total:.4g} s"
            if cause == "save":
                evidence = f"{spent[cause]:.3g} s of {total:.4g} s, {len(record.events('checkpoint'))} saves"
            yield RunFinding(name, evidence, change, f"{share / 2:.1%} of the run's time (half of it)", share)
    starting = spent["start"] + spent["load"]
    share = starting / total
    if share >= 0.05:
        evidence = f"{starting:.3g} s in {record.account.starts} starts, of {total:.4g} s"
        longer = "start less often; in a longer run this share shrinks by itself"
        yield RunFinding("starting", evidence, longer, f"at most {share:.1%} of the run's time", share)
    failed = record.events("checkpoint_failed")
    if failed:
        problem = str(failed[-1].data.get("problem"))
        tried = len(failed) + len(record.events("checkpoint"))
        evidence = f"{len(failed)} of {tried} saves failed, the last: {problem}"
        change = "remove the cause: a crash now loses all since"
        yield RunFinding("saves that failed", evidence, change, "the run itself", is_urgent=True)


def _interruptions(record: RunRecord) -> Iterator[RunFinding]:
    """Restarts and rollbacks: what they cost, and whether the checkpoint interval suits them."""
    account = record.account
    total, restarts, rollbacks = account.total_seconds, account.interruptions, record.events("rollback")
    lost = account.seconds["lost steps"]
    if total and (restarts or rollbacks):
        down = account.seconds["hang wait"] + account.seconds["restart"]
        evidence = (
            f"{restarts} restarts and {len(rollbacks)} rollbacks: {lost:.3g} s of lost steps, {down:.3g} s down "
            f"between attempts, of {total:.4g} s"
        )
        share = (lost + down) / total
        change, worth = "find their causes (events of the run)", f"at most {share:.1%} of the run's time"
        mean = (total - down) / (restarts + len(rollbacks))
        interval, stall = _saves(record)
        if restarts + len(rollbacks) >= LEAST_INTERRUPTIONS and interval and stall:
            best = daly_interval(stall, mean)
            gain = goodput(best, stall, 0.0, mean) - goodput(interval, stall, 0.0, mean)
            if gain > 0.005:
                change = f"save every {best:.3g} s instead of {interval:.3g} s"
                worth = (
                    f"{gain:.1%} of the time (Daly: a save stalls {stall:.3g} s, {mean:.3g} s between interruptions)"
                )
        yield RunFinding("interruptions", evidence, change, worth, share)
    skipped = record.events("skip")
    spikes = record.events("spike")
    if skipped or spikes:
        back = sum(number_of(e.data.get("from_step")) - number_of(e.data.get("to_step")) for e in rollbacks)
        evidence = f"{len(spikes)} spikes of the loss, {len(skipped)} updates skipped, {back:.0f} steps rolled back"
        seconds = float(np.median(record.step_seconds.value)) if len(record.step_seconds) else 0.0
        cost = (len(skipped) + back) * seconds
        words = f"{cost:.3g} s of steps whose updates were dropped (steps x their median time)"
        share = cost / total if total else 0.0
        yield RunFinding("loss spikes", evidence, "look at the documents in the run's incident pages", words, share)


def _saves(record: RunRecord) -> tuple[float, float]:
    """Median seconds of training between two checkpoints, and of the stall of one; 0 where there are too few."""
    saves = record.events("checkpoint")
    apart = np.diff(sorted({event.step for event in saves}))
    if not len(apart) or not len(record.step_seconds):
        return 0.0, 0.0
    stalls = [number_of(event.data.get("stall_seconds")) for event in saves]
    return float(np.median(apart) * np.median(record.step_seconds.value)), float(np.median(stalls))


def _uneven(record: RunRecord) -> Iterator[RunFinding]:
    """Speed that drifts, and single slow steps."""
    speeds = record.steady_values("tokens_per_second")
    quarter = len(speeds) // 4
    if quarter >= 8 and not record.events("stage")[1:]:
        first, last = figure_of(speeds[:quarter]), figure_of(speeds[-quarter:])
        error = math.hypot(first.error, last.error)
        drift = last.value / first.value - 1.0
        if abs(last.value - first.value) > SIGNIFICANT * error and drift < -0.02:
            evidence = f"first quarter {first.value:,.0f} tokens/s, last {last.value:,.0f} (± {error:,.0f})"
            worth = f"{-drift:.1%} of the last quarter's speed"
            change = "look at what else ran on the machine, its clocks and its temperature (`z2a doctor`)"
            usual = len(speeds) / float((1.0 / speeds).sum())  # tokens / seconds of all steps
            yield RunFinding("speed falls over the run", evidence, change, worth, max(0.0, 1.0 - usual / first.value))
    seconds = record.step_seconds.value[record.steady]
    if len(seconds) >= 20:
        median = float(np.median(seconds))
        slow = seconds[seconds > OUTLIER * median]
        share = float((slow - median).sum() / seconds.sum())
        if share >= 0.02:
            evidence = (
                f"{len(slow)} of {len(seconds)} steps took more than {OUTLIER} x the median of {1e3 * median:.4g} ms"
            )
            worth = f"{share:.1%} of the time of steps (what they took beyond the median)"
            change = "find what disturbs: other jobs, disk, stragglers"
            yield RunFinding("single slow steps", evidence, change, worth, share)


def _memory(record: RunRecord) -> Iterator[RunFinding]:
    """A card too full, fragmented, or half empty."""
    peak, reserved, card = record.memory("peak"), record.memory("reserved"), record.card_bytes
    if peak is None or card is None:
        return
    reserved = max(reserved or 0.0, peak)
    figures = f"peak {peak / GIB:.1f} GiB allocated, {reserved / GIB:.1f} GiB reserved, card {card / GIB:.1f} GiB"
    if reserved > FULL * card:
        change = f"free {(reserved - HEADROOM * card) / GIB:.1f} GiB: a smaller micro-batch or recompute"
        yield RunFinding("memory is nearly full", figures, change, "the run does not end out of memory", is_urgent=True)
    if reserved - peak > 0.1 * card:
        is_on = record.config is None or record.config.parallel.expandable_segments
        change = (
            "fewer shapes of passes (lengths, evaluation batches)" if is_on else "parallel.expandable_segments true"
        )
        yield RunFinding("fragmented memory", figures, change, f"{(reserved - peak) / GIB:.1f} GiB")
    if reserved < ROOMY * card:
        change = "larger micro-batches, or less recomputation: `z2a perf plan CONFIG --gpus N` says which is fastest"
        again = _recomputed_share(record)
        worth = "the record does not tell the gain: `z2a perf predict CONFIG --verify` measures it"
        if again > 0:
            worth = f"at most {again / (1 + again):.1%} of the passes, which are computed twice"
        yield RunFinding("memory is free", figures, change, worth)


def _recomputed_share(record: RunRecord) -> float:
    """FLOPs done again / model FLOPs; 0 without recompute, or where the operators are unknown."""
    mfu, hfu = (record.steady_values(f"{kind}/{CONVENTION}") for kind in ("mfu", "hfu"))
    return float(np.median(hfu) / np.median(mfu) - 1.0) if len(mfu) and len(hfu) else 0.0


def _padding(record: RunRecord) -> Iterator[RunFinding]:
    share = record.padding_share
    if share is not None and share >= 0.02:
        evidence = f"{share:.1%} of the token slots of the packed rows are padding"
        worth = f"at most {share:.1%} more tokens that count per second"
        yield RunFinding("padding", evidence, "data.packing concat, or a longer data.seq_len", worth, share)


def as_json(explanation: Explanation) -> dict[str, Any]:
    """Everything of the explanation, for programs."""
    record = explanation.record
    speed = record.speed
    return {
        "run": record.name,
        "limit": explanation.limit,
        **record.account.as_json(),
        "step_seconds": record.parts,
        "tokens_per_second": None if speed is None else {"median": speed.value, "standard_error": speed.error},
        "mfu": {name: record.mfu(name) for name in record.flops or () if record.mfu(name) is not None},
        "flops_per_token": record.flops,
        "memory_bytes": {name: record.memory(name) for name in ("allocated", "peak", "reserved")}
        | {"card": record.card_bytes},
        "findings": [vars(finding) for finding in explanation.findings],
        "missing": record.missing,
    }
