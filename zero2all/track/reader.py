"""Read a run: all files of all attempts as one, live, at full resolution.

`RunReader` follows a run that is being written: `refresh` reads what was appended and is one stat per file when
nothing was. `read_run` reads a run once, whole. How attempts become one curve is in `series.py`; lines that cannot
be read (torn by a kill, damaged) are skipped and counted in `problems`, and never stop a reader.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError
from zero2all.common.yamlio import read_yaml
from zero2all.track.bins import Bins, bins_of, smooth, width_for
from zero2all.track.columns import MAX_METRICS, MetricNames, user_cache
from zero2all.track.listing import CONFIG_FILE, TRAIN_WRITER, RunListing, find_runs, metrics_files, read_status
from zero2all.track.metrics_file import Event, MetricsFile
from zero2all.track.series import NO_POINTS, Series, SeriesPart, by_step, concatenate, join_attempts, join_writers
from zero2all.track.status import RunStatus
from zero2all.track.writer import END_KIND, METRICS_FOLDER, SEGMENT_KIND

__all__ = [
    "Axis", "Bins", "Event", "RunData", "RunListing", "RunReader", "RunStatus", "Series", "find_runs",
    "read_run",
]  # fmt: skip

Axis = Literal["step", "tokens", "time", "flops"]
ROWS_OF_PACE = 20
FLOPS_METRIC = "flops"  # cumulative model FLOPs: what the `flops` axis is made of
MAX_SMOOTH_CURVES = 16
ROLLBACK_KIND = "rollback"  # the process itself went back to a checkpoint: data {to_step, …}
VANISHED = "the metrics folder disappeared"


class RunReader:
    """One run as it grows, 8 bytes of memory per value and 24 per row. Methods may be called from several threads."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        """Open the run in `folder` and read it. `cache` is where binary copies live; None: the user's cache folder."""
        self.folder = Path(folder)
        self.version = 0  # rises whenever `refresh` saw something new
        self._cache = user_cache("track") if cache is None else Path(cache)
        self._lock = threading.RLock()
        self._names = MetricNames()
        self._files: dict[str, MetricsFile] = {}
        self._events: list[Event] = []
        self._event_keys: set[tuple[str, int, str, int, float]] = set()
        self._taken_events: dict[str, int] = {}
        self._joined: dict[str, tuple[int, Series, Series]] = {}
        self._smooth_curves: dict[tuple[str, float], tuple[Series, NDArray[np.float64]]] = {}
        self._problems: dict[str, int] = {}
        self._status = RunStatus()
        self.refresh()

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.folder.resolve().name

    def refresh(self) -> bool:
        """Read what was appended since; whether there was anything new. Survives a folder that vanished."""
        with self._lock:
            changed = self._refresh()
            self.version += changed
            return changed

    def metrics(self) -> list[str]:
        """The names of all metrics, sorted. At most 5,000 are kept; the rest is counted in `problems`."""
        with self._lock:
            return sorted({name for file in self._files.values() for name in file.columns.metrics})

    def series(self, metric: str) -> Series:
        """One metric over the run, every point of it; empty when there is no such metric."""
        return self._join(metric)[0]

    def ghosts(self, metric: str) -> Series:
        """What later attempts took back, in order of steps; a step may be there more than once."""
        return self._join(metric)[1]

    def written(self, metric: str, writer: str) -> Series:
        """Every point of a metric that one writer wrote, also those taken back, file by file."""
        with self._lock:
            own = [file for file in self._in_order() if file.writer == writer]
            return concatenate([file.columns.points(metric) or NO_POINTS for file in own])

    def bins(
        self,
        metric: str,
        axis: Axis = "step",
        low: float | None = None,
        high: float | None = None,
        count: int = 2000,
        smoothing: float | None = None,
    ) -> Bins:
        """The curve from `low` to `high` of `axis` in at most `count` bins; `smoothing` is the width of
        the exponential mean in points, applied before the cut."""
        points = self.series(metric)
        x = self.along(points, axis)
        smoothing = width_for(points.value, smoothing)
        smoothed = None if smoothing is None else self._smoothed(metric, points, smoothing)
        return bins_of(x, points.value, smoothed, low, high, count)

    def events(self, after: int = 0) -> list[Event]:
        """Events in the order they were found, without the first `after` of them."""
        with self._lock:
            return self._events[after:]

    def config(self) -> dict[str, Any] | None:
        """The resolved config of the run, or None when there is none that can be read."""
        try:
            loaded = read_yaml(self.folder / CONFIG_FILE)
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None

    @property
    def status(self) -> RunStatus:
        """The status of the run, from its files and its process; if its files are gone, the last known one."""
        if (self.folder / METRICS_FOLDER).is_dir() or self._status.last_step is None:
            self._status = read_status(self.folder)[0]
        if self.folder.is_dir():
            return self._status
        return replace(self._status, state="unknown", message="The folder was deleted or moved.")

    @property
    def resumed_at_steps(self) -> list[int]:
        """The first step of each training attempt after the first."""
        with self._lock:
            wrote = [each for each in self._in_order() if each.writer == TRAIN_WRITER and len(each.columns)]
            return [int(each.columns.step.view[0]) for each in wrote[1:]]

    @property
    def tokens_per_second(self) -> float | None:
        """Over the last rows of a run that runs, else over all of it; the time between two attempts does not count."""
        points = self.series("tokens_per_second")
        if self.status.state == "running":
            points = points.take(slice(-ROWS_OF_PACE, None))
        counts = ~np.isin(points.step[1:], self.resumed_at_steps)
        tokens, seconds = (np.diff(column)[counts].sum() for column in (points.tokens, points.time))
        if tokens > 0 and seconds > 0:
            return float(tokens / seconds)
        values = points.value[np.isfinite(points.value)]  # one row, or rows of a program that counts no tokens
        return float(values.mean()) if len(values) else None

    @property
    def skipped_lines(self) -> int:
        """Lines that are not rows of ours: half-written, damaged, foreign."""
        with self._lock:
            return sum(each.skipped_lines + each.has_torn_line for each in self._files.values())

    @property
    def problems(self) -> dict[str, int]:
        """What was left out, and how often. Empty for a healthy run."""
        with self._lock:
            counts = dict(self._problems)
            for file in self._in_order():
                name = file.path.name
                counts[f"{name}: unreadable lines"] = file.skipped_lines
                counts[f"{name}: incomplete last line"] = int(file.has_torn_line)
                counts[f"{name}: values that are not numbers"] = file.skipped_values
                counts[f"{name}: events beyond the limit"] = file.left_out_events
                counts[f"{name}: replaced by another file"] = file.replaced
            counts[f"values of metrics beyond the first {MAX_METRICS:,} names"] = self._names.left_out_values
            return {problem: count for problem, count in counts.items() if count}

    def _refresh(self) -> bool:
        folder = self.folder / METRICS_FOLDER
        if not folder.is_dir():
            vanished = bool(self._files) and VANISHED not in self._problems
            if vanished:
                self._problems[VANISHED] = 1
            return vanished
        came_back = self._problems.pop(VANISHED, None) is not None
        files = metrics_files(folder)
        names = {path.name for path, _, _ in files}
        lost = [name for name in self._files if name not in names]
        for name in lost:
            del self._files[name]
            self._taken_events.pop(name, None)
        changed = bool(lost) or came_back
        for path, writer, attempt in files:
            file = self._files.get(path.name)
            if file is None:
                file = self._files[path.name] = MetricsFile(path, writer, attempt, self._names, self._cache)
                changed = True
            try:
                changed |= file.refresh()
            except OSError as error:
                key = f"{path.name}: cannot be read ({error.strerror})"
                self._problems[key] = self._problems.get(key, 0) + 1
        self._take_events()
        return changed

    def _take_events(self) -> None:
        new: list[Event] = []
        for name, file in self._files.items():
            taken = self._taken_events.get(name, 0)
            if taken > len(file.events):  # the file was replaced
                taken = 0
            new += file.events[taken:]
            self._taken_events[name] = len(file.events)
        for event in sorted(new, key=lambda event: event.time):
            key = (event.writer, event.attempt, event.kind, event.step, event.time)
            if key in self._event_keys and event in self._events:
                continue
            self._event_keys.add(key)
            self._events.append(event)

    def _in_order(self) -> list[MetricsFile]:
        return sorted(self._files.values(), key=lambda file: (file.writer, file.attempt))

    def _join(self, metric: str) -> tuple[Series, Series]:
        with self._lock:
            known = self._joined.get(metric)
            if known is not None and known[0] == self.version:
                return known[1], known[2]
            by_writer: dict[str, list[MetricsFile]] = {}
            for file in self._in_order():
                by_writer.setdefault(file.writer, []).append(file)
            joined = [join_attempts(list(_parts(files, metric))) for files in by_writer.values()]
            curve = join_writers([curve for curve, _ in joined])
            ghosts = by_step(concatenate([ghost for _, ghost in joined]))
            self._joined[metric] = (self.version, curve, ghosts)
            return curve, ghosts

    def _smoothed(self, metric: str, points: Series, width: float) -> NDArray[np.float64]:
        """The smoothed curve, kept for the next zoom."""
        with self._lock:
            known = self._smooth_curves.pop((metric, width), None)
        if known is None or known[0] is not points:
            known = (points, smooth(points.value, width))
        with self._lock:
            self._smooth_curves[metric, width] = known
            while len(self._smooth_curves) > MAX_SMOOTH_CURVES:
                del self._smooth_curves[next(iter(self._smooth_curves))]
        return known[1]

    def along(self, points: Series, axis: Axis) -> NDArray[np.float64]:
        """The x of some points on an axis; NaN where the run did not log the axis."""
        if axis == "step":
            return points.step.astype(np.float64)
        if axis == "tokens":
            return points.tokens.astype(np.float64)
        if axis == "time":
            return points.time
        if axis != "flops":
            raise ValueError(f"axis={axis!r}: use step, tokens, time or flops.")
        flops = self.series(FLOPS_METRIC)
        if not len(flops):
            return np.full(len(points), np.nan)
        return np.interp(points.step, flops.step, flops.value, left=np.nan, right=np.nan)


def _parts(files: list[MetricsFile], metric: str) -> Iterable[SeriesPart]:
    """What each attempt of one writer wrote of a metric, and from where on it takes the earlier ones back."""
    earlier_rows = False
    for file in files:
        cut = None
        if file.writer == TRAIN_WRITER and earlier_rows and len(file.columns):
            # At the first step itself a metric gives way only to its own new value: an evaluation repeated right
            # after the resume must not erase the training loss of that step.
            cut = int(file.columns.step.view[0])
            resumed_from = file.header.get("resumed_from")
            if type(resumed_from) is int:
                cut = min(cut, resumed_from)
        earlier_rows = earlier_rows or len(file.columns) > 0
        points = file.columns.points(metric) or NO_POINTS
        if file.writer == TRAIN_WRITER:
            for event in file.events:
                to_step = event.data.get("to_step")
                if event.kind == ROLLBACK_KIND and type(to_step) is int:
                    is_before = points.time < event.time
                    yield SeriesPart(points.take(is_before), cut)
                    points, cut = points.take(~is_before), to_step
        yield SeriesPart(points, cut)


@dataclass
class RunData:
    """Everything a run wrote, and what of it could not be used."""

    folder: Path
    series: dict[str, Series] = field(default_factory=dict)  # one entry per metric key
    events: list[Event] = field(default_factory=list)  # in order of time, without `segment` and `end`
    resumed_at_steps: list[int] = field(default_factory=list)  # the first step of each training attempt after the first
    rows: int = 0  # metric rows read, also those taken back later
    skipped_lines: int = 0  # lines that are not rows of ours: half-written, damaged, foreign
    skipped_values: int = 0  # values inside good rows that are not numbers
    problems: list[str] = field(default_factory=list)  # one sentence for everything that was left out

    @property
    def name(self) -> str:
        """The name of the run: that of its folder."""
        return self.folder.resolve().name


def read_run(folder: Path, cache: Path | None = None) -> RunData:
    """Read all metrics files of the run in `folder`. A run that wrote none yet gives empty data."""
    if not folder.is_dir():
        raise BadInputError(f"There is no run in {folder}. Give a run's folder, for example work/runs/NAME.")
    reader = RunReader(folder, cache)
    metrics = reader.metrics()
    files = list(reader._files.values())
    events = [event for event in reader.events() if event.kind not in (SEGMENT_KIND, END_KIND)]
    return RunData(
        folder,
        series={metric: reader.series(metric) for metric in metrics if len(reader.series(metric))},
        events=sorted(events, key=lambda event: event.time),
        resumed_at_steps=reader.resumed_at_steps,
        rows=sum(len(file.columns) for file in files),
        skipped_lines=reader.skipped_lines,
        skipped_values=sum(file.skipped_values for file in files),
        problems=[f"{problem}: {count}" for problem, count in reader.problems.items()],
    )
