"""What a sweep found: a table with intervals, sentences, and a page with parallel coordinates (`report.html`).

In the picture every line is a setting: it crosses each axis at its value and ends at its metric. Lines of a colour near
the best one show which values matter: they bundle on axes that matter, and spread on those that do not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from zero2all.common.files import write_atomic
from zero2all.common.html import html_page
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, human_count
from zero2all.experiments.statistics import Comparison, Interval, compare_with_best, mean_interval
from zero2all.experiments.sweep import SIZE, Sweep

REPORT_NAME = "report.html"
WIDTH, HEIGHT, MARGIN = 900, 340, 50
STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1e293b; background: #fff }
main { max-width: 60rem } td, th { padding: .2rem .8rem; text-align: left; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } path { fill: none; stroke-width: 1.5 } path:hover { stroke: #0f172a; stroke-width: 4 }
text { font: 12px system-ui, sans-serif; fill: #475569 }
@media (prefers-color-scheme: dark) { body { background: #0f172a; color: #e2e8f0 } text { fill: #94a3b8 }
path:hover { stroke: #fff } }
"""


@dataclass(frozen=True)
class Row:
    """A setting."""

    settings: tuple[Any, ...]
    values: dict[int, float]
    """The metric by seed, where it was trained to its end."""
    mean: Interval
    against_best: Comparison | None
    """None: it is the best, or has no value."""
    note: str = ""

    @property
    def name(self) -> str:
        """The values of the axes."""
        return ", ".join(map(shown, self.settings)) or "the config"


def shown(value: Any) -> str:
    """A value of an axis."""
    if isinstance(value, float):
        return human_count(value) if value >= 1e5 else f"{value:.4g}"
    return str(value)


def sweep_rows(sweep: Sweep) -> list[Row]:
    """The settings, the best first; those that were not trained to the end last."""
    by_seed: dict[tuple[Any, ...], dict[int, float]] = {}
    failed: dict[tuple[Any, ...], int] = {}
    for trial in sweep.trials:
        value = sweep.value_of(trial)
        seeds = by_seed.setdefault(trial.settings, {})
        if value is not None and math.isfinite(value):
            seeds[trial.seed] = value
        elif value is not None or sweep.failed(trial):
            failed[trial.settings] = failed.get(trial.settings, 0) + 1
    whole = {settings: values for settings, values in by_seed.items() if values and settings not in failed}
    named = {repr(settings): values for settings, values in whole.items()}
    comparisons = compare_with_best(named)[1] if named else {}
    rows = []
    for settings, values in by_seed.items():
        mean = mean_interval(list(values.values())) if settings in whole else Interval(*3 * (math.inf,))
        note = "" if settings in whole else _why_unfinished(sweep, settings, failed.get(settings, 0))
        rows.append(Row(settings, values, mean, comparisons.get(repr(settings)), note))
    return sorted(rows, key=lambda row: row.mean.value)


def _why_unfinished(sweep: Sweep, settings: tuple[Any, ...], failures: int) -> str:
    if failures:
        return t(f"failed: {counted(failures, 'seed')}")
    trial = next(each for each in sweep.trials if each.settings == settings)
    for rung in reversed(range(len(sweep.plan.rungs))):
        value = sweep.rung_value(trial, rung)
        if value is not None:
            return t(f"{value:.4f} at {sweep.plan.rungs[rung]:.0%} of the steps, not trained further")
    return t("not trained yet")


def table(sweep: Sweep, rows: Sequence[Row]) -> list[list[str]]:
    """The table, with its heading."""
    heading = [*(axis.field for axis in sweep.plan.axes), t("runs"), sweep.plan.metric, "± 95 %", t("to the best"), "p"]
    lines = [heading]
    for row in rows:
        cells = [*map(shown, row.settings), str(len(row.values))]
        if math.isinf(row.mean.value):
            lines.append([*cells, row.note, "", "", ""])
            continue
        half = row.mean.high - row.mean.value
        cells += [f"{row.mean.value:.4f}", f"{half:.4f}" if math.isfinite(half) else "?"]
        other = row.against_best
        p = "" if other is None or math.isnan(other.sd) else f"{other.p:.2g}"
        lines.append([*cells, "" if other is None else f"{other.difference.value:+.4f}", p])
    return lines


def findings(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """What may be concluded, and what may not."""
    done = [row for row in rows if math.isfinite(row.mean.value)]
    if not done:
        return ["no trial was trained to its end"]
    best, said = done[0], []
    if len(done) > 1 and done[1].against_best is not None:
        said.append(done[1].against_best.words(done[1].name, best.name))
    if len(done) > 2 and sweep.plan.seeds > 1:
        equal = [row for row in done[1:] if row.against_best and not row.against_best.is_significant]
        said.append(f"not significantly worse than the best: {len(equal)} of {len(done) - 1} (Holm, all pairs)")
    for place, axis in enumerate(sweep.plan.axes):
        numbers = [number for value in {row.settings[place] for row in rows} if (number := _number(value)) is not None]
        numbers = [axis.low, axis.high, *numbers] if axis.is_range else numbers  # a search may try all of a range
        own = _number(best.settings[place])
        if axis.field != SIZE and len(numbers) > 2 and own in (min(numbers), max(numbers)):
            said.append(f"the best {axis.field} is the last value tried: try further in that direction")
    return said


def write_report(sweep: Sweep, rows: Sequence[Row]) -> None:
    """Write the page."""
    assert sweep.study is not None
    lines = table(sweep, rows)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in lines]
    body = [
        f"<h1>{escape(sweep.name)}</h1>",
        _parallel_coordinates(sweep, rows),
        *(f"<p>{escape(t(line))}</p>" for line in findings(sweep, rows)),
        f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>",
    ]
    page = html_page(sweep.name, STYLE, body)
    write_atomic(sweep.study.folder / REPORT_NAME, page.encode())


def _parallel_coordinates(sweep: Sweep, rows: Sequence[Row]) -> str:
    done = [row for row in rows if math.isfinite(row.mean.value)]
    if len(done) < 2:
        return ""
    names = [*(axis.field for axis in sweep.plan.axes), sweep.plan.metric]
    columns = [[row.settings[place] for row in done] for place in range(len(names) - 1)]
    columns.append([row.mean.value for row in done])
    heights = [_heights(column) for column in columns]
    step = (WIDTH - 2 * MARGIN) / max(1, len(names) - 1)
    parts = []
    for row, points in reversed(list(zip(done, zip(*heights, strict=True), strict=True))):
        where = heights[-1][done.index(row)]
        path = " L".join(f"{MARGIN + place * step:.0f} {_y(height):.1f}" for place, height in enumerate(points))
        colour = f"hsl({round(220 * where)} 75% 50%)"
        title = escape(f"{row.name}: {row.mean.value:.4f}")
        parts.append(f'<path d="M{path}" stroke="{colour}"><title>{title}</title></path>')
    for place, (name, column, height) in enumerate(zip(names, columns, heights, strict=True)):
        x = round(MARGIN + place * step)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_y(0)}" y2="{_y(1)}" stroke="#94a3b8"/>')
        parts.append(f'<text x="{x}" y="16" text-anchor="middle">{escape(name)}</text>')
        for value, at in dict(zip(map(_label, column), height, strict=True)).items():
            parts.append(f'<text x="{x + 6}" y="{_y(at) + 4:.0f}">{escape(value)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _label(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) and value < 1e3 else shown(value)


def _y(height: float) -> float:
    return HEIGHT - MARGIN / 2 - height * (HEIGHT - 1.5 * MARGIN)


def _heights(values: Sequence[Any]) -> list[float]:
    """Where values stand on an axis, from 0 to 1: by logarithm where all are positive and far apart, words evenly."""
    numbers = [number for value in values if (number := _number(value)) is not None]
    if len(numbers) < len(values):
        places = list(dict.fromkeys(values))
        return [places.index(value) / max(1, len(places) - 1) for value in values]
    if min(numbers) > 0 and max(numbers) / min(numbers) > 4:
        numbers = [math.log(number) for number in numbers]
    low, high = min(numbers), max(numbers)
    return [(number - low) / (high - low) if high > low else 0.5 for number in numbers]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
