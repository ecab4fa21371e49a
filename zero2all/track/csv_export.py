"""A run as one CSV table: a row per step, a column per metric, steps that were taken back left out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import write_atomic
from zero2all.common.schema import nearest_hint
from zero2all.track.reader import RunReader

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
