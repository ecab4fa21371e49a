"""Lines of a metrics file -> columns.

Every line goes through the JSON parser alone, so that a damaged one costs only itself. A long run is parsed once: its
columns are kept in a sidecar (`columns.py`), and the next opening maps them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zero2all.common import jsonio
from zero2all.track.columns import MetricNames, ParsedRows

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def parse(chunk: bytes, names: MetricNames) -> ParsedRows:
    """Parse whole lines, each with its newline. Never raises over what they hold: what cannot be used is counted."""
    rows: list[tuple[int, float, int]] = []
    metrics: dict[str, tuple[list[int], list[float]]] = {}
    events: list[dict[str, Any]] = []
    place = skipped_lines = skipped_values = 0
    for line in chunk.split(b"\n"):
        if not line.strip():
            continue
        row = read_row(line)
        if row is None:
            skipped_lines += 1
        elif "kind" in row:
            events.append(row)
        else:
            for name, value in row["values"].items():
                number = value if type(value) is float else read_number(value)
                column = metrics.get(name)
                if number is None:
                    skipped_values += 1
                elif column is not None or names.admit(name):
                    places, numbers = column or metrics.setdefault(name, ([], []))
                    places.append(place)
                    numbers.append(number)
            rows.append((row["step"], row["time"], row["tokens"]))
            place += 1
    step, time, tokens = zip(*rows, strict=True) if rows else ((), (), ())
    return ParsedRows(
        np.array(step, np.int64),
        np.array(time, np.float64),
        np.array(tokens, np.int64),
        {name: (np.array(places, np.int64), np.array(numbers)) for name, (places, numbers) in metrics.items()},
        events,
        skipped_lines,
        skipped_values,
    )


def read_row(line: bytes) -> dict[str, Any] | None:
    """One line as a metric or event row (an event has a `kind`); None for anything else."""
    try:
        row = jsonio.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not _is_int64(row.get("step")) or not _is_number(row.get("time")):
        return None
    if row["step"] < 0:  # no step of a run: it must not be taken for its newest
        return None
    if "kind" in row:
        is_event = isinstance(row["kind"], str) and isinstance(row.get("data"), dict)
        return row if is_event else None
    return row if isinstance(row.get("values"), dict) and _is_int64(row.get("tokens")) else None


def read_number(value: Any) -> float | None:
    """A value of a metric row as a float; None if it is not a number."""
    if _is_number(value):
        return float(value)
    return NOT_FINITE.get(value) if isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**64)


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63
