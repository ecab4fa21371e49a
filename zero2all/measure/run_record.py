"""What the record of a run says about its time, speed and memory: `z2a perf explain` stands on it.

Everything comes from the run's folder (metrics, events, config). What is not there is named in `missing`, and the rest
is used. Where the time went is the account of `track.goodput`. The first rows of every attempt, in which caches fill
and kernels compile, count for the time but not for the speed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError, UserError
from zero2all.config import RunConfig, config_from_values, with_new_names
from zero2all.estimate.flops import flops_per_token, peak_flops
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
        return sorted(
            (e for e in self.reader.events() if e.kind in kinds and e.writer == "train"), key=lambda e: e.time
        )

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

    def memory(self, name: str, largest: bool = True) -> float | None:
        """The largest, or the median, of `memory/<name>` in bytes."""
        values = self.reader.series(f"memory/{name}").value
        values = values[np.isfinite(values)]
        return None if not len(values) else float(values.max() if largest else np.median(values))

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
    record = RunRecord(
        reader, config, values, environment if isinstance(environment, dict) else {}, notes, card or None, missing
    )
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
