"""Send a run to other trackers, from a process of its own that only reads the metrics files.

Training never notices it. How far each file was sent is kept beside the target, so an export that is started again goes
on there; rows are sent at least once.

    export(Path("runs/small"), TensorboardSink(Path("tb")), follow=True)
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import write_atomic, write_json
from zero2all.common.progress import say
from zero2all.common.schema import nearest_hint
from zero2all.track.listing import find_runs, media_file, metrics_files
from zero2all.track.reader import RunReader
from zero2all.track.rows import read_number, read_row
from zero2all.track.tensorboard import EventFile, messages
from zero2all.track.writer import END_KIND, METRICS_FOLDER, SEGMENT_KIND

STATE_NAME = "z2a-export.json"
CHUNK_BYTES = 4 << 20
LOOK_SECONDS = 1.0
ENDED = ("finished", "crashed")
RETRY_SECONDS = (1.0, 60.0)

Row = dict[str, Any]


class Sink(Protocol):
    """Where rows go. Any exception it raises means: not taken, try these rows again."""

    state: Path  # a file of the target's own in which the export notes how far it is

    def send(self, rows: list[Row], folder: Path) -> None:
        """Take these rows, metric and event rows mixed, of the run in `folder`; they are safe when this returns."""

    def close(self) -> None:
        """No more rows will come."""


@dataclass
class Sent:
    """What an export did."""

    rows: int = 0
    skipped_lines: int = 0
    failures: list[str] = field(default_factory=list)


def export(folder: Path, sink: Sink, follow: bool = False, wait: Callable[[float], object] = time.sleep) -> Sent:
    """Send all rows of a run; with `follow`, go on until it has ended, and try again when the sink fails."""
    if not (folder / METRICS_FOLDER).is_dir():
        raise BadInputError(f"There are no metrics in {folder}. Give a run's folder, for example work/runs/NAME.")
    tail = RowTail(folder, sink.state)
    sent = Sent()
    pause = RETRY_SECONDS[0]
    try:
        while True:
            # Asked before the last look, so that nothing is missed.
            is_over = not follow or all(run.status.state in ENDED for run in find_runs([folder]))
            try:
                for rows in tail.new_rows():
                    sink.send(rows, folder)
                    tail.commit()
                    sent.rows += len(rows)
                pause = RETRY_SECONDS[0]
            except Exception as error:
                if not follow:
                    raise
                sent.failures.append(f"{type(error).__name__}: {error}"[:300])
                say(f"export: {sent.failures[-1]}; trying again in {pause:.0f} s")
                wait(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
                tail.rewind()
                continue
            sent.skipped_lines = tail.skipped_lines
            if is_over:
                return sent
            wait(LOOK_SECONDS)
    finally:
        sink.close()


class RowTail:
    """The rows of all metrics files of a run, as they come, each once; `commit` notes the last batch as sent."""

    def __init__(self, folder: Path, state: Path) -> None:
        self.skipped_lines = 0
        self._folder = folder / METRICS_FOLDER
        self._state = state
        self._sent: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            kept = jsonio.loads(state.read_bytes())
            if kept.get("run") == str(folder.resolve()):
                self._sent = {str(name): int(offset) for name, offset in kept["sent_bytes"].items()}
        self._read = dict(self._sent)
        self._run = str(folder.resolve())

    def new_rows(self) -> Iterator[list[Row]]:
        """Batches of rows that were not sent yet, file by file, at most a few MB each."""
        for path, _, _ in sorted(metrics_files(self._folder), key=lambda file: (file[2], file[1])):
            while True:
                offset = self._read.get(path.name, 0)
                try:
                    with open(path, "rb") as file:
                        file.seek(offset)
                        chunk = file.read(CHUNK_BYTES)
                except OSError:
                    break
                whole = chunk[: chunk.rfind(b"\n") + 1]
                if not whole and len(chunk) == CHUNK_BYTES:
                    whole = chunk  # longer than any row: leave it out
                if not whole:
                    break
                self._read[path.name] = offset + len(whole)
                lines = [line for line in whole.split(b"\n") if line.strip()]
                rows = [row for line in lines if (row := read_row(line)) is not None]
                self.skipped_lines += len(lines) - len(rows)
                yield rows

    def commit(self) -> None:
        """Remember that everything handed out so far was taken."""
        self._sent = dict(self._read)
        write_json(self._state, {"run": self._run, "sent_bytes": self._sent})

    def rewind(self) -> None:
        """Hand out again what was not committed."""
        self._read = dict(self._sent)


def numbers(row: Row) -> dict[str, float]:
    """The values of a metric row, as floats, without values that are not numbers."""
    return {name: number for name, value in row["values"].items() if (number := read_number(value)) is not None}


class TensorboardSink:
    """TensorBoard event files in a folder: scalars, texts, histograms and images; other events as texts."""

    def __init__(self, folder: Path) -> None:
        messages()  # a missing package is reported now, not retried for ever
        self.state = folder / STATE_NAME
        self._folder = folder
        self._file: EventFile | None = None

    def send(self, rows: list[Row], folder: Path) -> None:
        """Append the rows and flush."""
        if self._file is None:
            self._file = EventFile(self._folder)
        for row in rows:
            if "values" in row:
                self._file.scalars(row["time"], row["step"], numbers(row))
            else:
                self._event(self._file, row, folder)
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()

    def _event(self, file: EventFile, row: Row, folder: Path) -> None:
        when, step, kind, data = row["time"], row["step"], row["kind"], row["data"]
        name = str(data.get("name", kind))
        if kind == SEGMENT_KIND:
            if isinstance(data.get("resumed_from"), int):
                file.restart(when, data["resumed_from"] + 1)
        elif kind == END_KIND:
            return
        elif kind == "text":
            file.text(when, step, name, str(data.get("text", "")))
        elif kind == "histogram" and _is_histogram(data):
            file.histogram(when, step, name, data["edges"], data["counts"])
        elif kind == "image" and (path := media_file(folder, data.get("file"))):
            width, height = (size if isinstance(size := data.get(side), int) else 0 for side in ("width", "height"))
            file.image(when, step, name, path.read_bytes(), width, height)
        else:
            file.text(when, step, f"events/{kind}", f"```\n{jsonio.dumps_pretty(data).decode()}```")


def _is_histogram(data: Row) -> bool:
    edges, counts = data.get("edges"), data.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) + 1 or not counts:
        return False
    return all(isinstance(one, int | float) and math.isfinite(one) for one in edges + counts)


def _wandb_package() -> Any:
    try:
        import wandb
    except ImportError:
        wandb = None
    if not hasattr(wandb, "init"):  # a folder `wandb`, left here by its offline runs, can be imported too
        raise UsageError(
            "Sending to wandb needs the package wandb, which zero2all does not install. Run `pip install wandb`, then "
            "`wandb login` (or set WANDB_MODE=offline)."
        )
    return wandb


class WandbSink:
    """A run on Weights & Biases, through its own package: scalars over `step` in any order, texts and images."""

    def __init__(self, project: str, folder: Path, state: Path, name: str | None = None) -> None:
        """`state` holds how far the export is; the id of the far run is made of it, so it is found again."""
        wandb = _wandb_package()
        self.state = state
        self._wandb = wandb
        identity = hashlib.sha256(f"{project} {folder.resolve()}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=project,
            name=name or folder.resolve().name,
            id=identity,
            resume="allow",
            config=RunReader(folder).config() or {},
            settings=wandb.Settings(console="off"),
        )
        # wandb drops what is logged for an earlier step; with a step of our own, late evaluations keep theirs.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, rows: list[Row], folder: Path) -> None:
        """Hand the rows to wandb's own queue."""
        for row in rows:
            content = self._content(row, folder)
            if content:
                self._run.log({"step": row["step"], **content})

    def close(self) -> None:
        """Wait until wandb has sent what it holds."""
        self._run.finish()

    def _content(self, row: Row, folder: Path) -> dict[str, Any]:
        if "values" in row:
            return {**numbers(row), "tokens": row["tokens"]}
        kind, data = row["kind"], row["data"]
        name = str(data.get("name", kind))
        if kind in (SEGMENT_KIND, END_KIND):
            return {}
        if kind == "image" and (path := media_file(folder, data.get("file"))):
            return {name: self._wandb.Image(str(path))}
        if kind == "text":
            return {name: self._wandb.Html(f"<pre>{html.escape(str(data.get('text', '')))}</pre>")}
        return {f"events/{kind}": self._wandb.Html(f"<pre>{html.escape(jsonio.dumps_pretty(data).decode())}</pre>")}


# A run as one CSV table: a row per step, a column per metric, steps that were taken back left out.


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def export_csv(folder: Path, target: Path, metrics: Sequence[str] | None = None) -> int:
    """Write a CSV of step, tokens, time (seconds since 1970) and the metrics (None: all); returns its rows."""
    reader = RunReader(folder)
    known = reader.metrics()
    if not known:
        raise BadInputError(f"There are no metrics in {folder}. Give a run's folder, for example work/runs/NAME.")
    for metric in metrics or ():
        if metric not in known:
            raise UsageError(f"The run {reader.name} has no metric `{metric}`. {nearest_hint(metric, known)}")
    names = list(metrics) if metrics else known
    lines = list(csv_lines(reader, names))
    write_atomic(target, "".join(lines).encode())
    return len(lines) - 1


def csv_lines(reader: RunReader, metrics: Sequence[str]) -> Iterator[str]:
    """Every point of some metrics, line by line: the head, then a line per step."""
    series = [reader.series(name) for name in metrics]
    steps = np.unique(np.concatenate([one.step for one in series])) if series else np.empty(0, np.int64)
    tokens, times = np.zeros(len(steps), np.int64), np.zeros(len(steps))
    columns: list[list[float | str]] = []
    for one in series:
        places = np.searchsorted(steps, one.step)
        tokens[places], times[places] = one.tokens, one.time
        column: list[float | str] = [""] * len(steps)
        for place, value in zip(places.tolist(), one.value.tolist(), strict=True):
            column[place] = value
        columns.append(column)
    yield _line(["step", "tokens", "time", *map(_harmless, metrics)])
    for cells in zip(steps.tolist(), tokens.tolist(), times.tolist(), *columns, strict=True):
        yield _line(cells)


def _line(cells: Sequence[Any]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _harmless(name: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    return f"'{name}" if name.startswith(FORMULA_STARTS) else name
