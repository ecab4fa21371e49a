"""`runs/<name>/eval/report.html`: all evaluations of a run as one page that needs nothing else (`common/html.py`).

English and Chinese stand in it side by side; two radio buttons and the style sheet show one of them, so that it works
without a script and without a server. Every curve also stands as figures in a table, and every table says how many
items were left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from zero2all.common.files import package_text, write_atomic, write_json
from zero2all.common.html import html_page
from zero2all.common.language import LANGUAGES, in_chinese, language, message
from zero2all.common.progress import human_count
from zero2all.evals.scores import KINDS, SECTIONS, Counts, Curve, Point, counts_of, curves_of, read_reports, skipped_of
from zero2all.evals.signal import CHANCE, NOISE, SIGNAL, TOO_FEW, Signal, judge_curves, signals_json

PAGE_NAME, SIGNAL_NAME = "report.html", "signal.json"
MOST_PANELS = 8
WITH_FAMILIES = ("probes", "pairs")
"""Sections with figures for whole channels, and for dozens of families below them."""
MOST_LINES = 8
"""More lines in a picture cannot be told apart: they go to the next one."""

SECTION_WORDS = {
    "held_out": message("Held-out text"),
    "documents": message("Held-out documents, each scored whole"),
    "texts": message("Text files"),
    "probes": message("Probes"),
    "pairs": message("Contrast pairs"),
    "tasks": message("Benchmarks"),
    "rewrites": message("Rewrites"),
}
FIELD_WORDS = {
    "bits_per_byte": message("bits per byte"),
    "accuracy": message("accuracy"),
    "share_among_foils": message("P(answer) among foils"),
    "logprob": message("log P(answer)"),
    "nats": message("nats apart"),
    "original": message("accuracy, original"),
    "rewritten": message("accuracy, rewritten"),
    "gap": message("memorisation gap"),
    "score": message("mean above chance"),
}
VERDICT_CLASSES = {SIGNAL: "signal", NOISE: "noise", CHANCE: "at-chance", TOO_FEW: "few"}
"""How the page's style shows a verdict; those that carry signal first."""


def write_page(run: Path) -> tuple[Path, list[Signal]]:
    """Write `report.html` and `signal.json` from all reports of a run, which must have one; returns the path of the
    page, and the verdicts where there are several checkpoints."""
    reports = read_reports(run)
    path = run / "eval" / PAGE_NAME
    signals = judge_curves(curves_of(reports)) if len(reports) > 1 else []
    write_json(path.with_name(SIGNAL_NAME), signals_json(signals))
    write_atomic(path, evaluation_page(run.name, reports).encode())
    return path, signals


def evaluation_page(name: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The page of these reports, oldest checkpoint first."""
    curves = curves_of(reports)
    signals = {signal.name: signal for signal in judge_curves(curves)}
    has_curves = len(reports) > 1
    body = [
        *_language_switch(),
        _heading(name, reports),
        _signal_summary(list(signals.values())) if has_curves else _one_checkpoint(),
        *(_section(section, curves, signals, reports) for section in SECTIONS),
        _signal_table(list(signals.values())) if has_curves else "",
    ]
    style = package_text(__package__, "evaluation_page.css") + "".join(
        f".c{n} {{ background: var(--c{n}); fill: var(--c{n}); }} .s{n} {{ stroke: var(--c{n}); }}\n"
        for n in range(COLOURS)
    )
    return html_page(f"{name}: evaluation 评测", style, body)


def _both(text: str) -> str:
    """The text in both languages, escaped; the style shows one of them."""
    chinese = escape(in_chinese(text))
    return f'<span class="en" lang="en">{escape(text)}</span><span class="zh" lang="zh-CN">{chinese}</span>'


def _either(text: str) -> str:
    """The text in both languages where the style cannot choose: in a label."""
    return f"{text} / {in_chinese(text)}"


def _language_switch() -> list[str]:
    return [
        *(
            f'<input type="radio" name="language" id="show-{each}"{" checked" if each == language() else ""}>'
            for each in LANGUAGES
        ),
        '<nav class="languages"><label for="show-en" lang="en">English</label>'
        '<label for="show-zh" lang="zh-CN">中文</label></nav>',
    ]


def _heading(name: str, reports: Sequence[Mapping[str, Any]]) -> str:
    first, last = reports[0]["step"], reports[-1]["step"]
    count = len(reports)
    tokens = reports[-1].get("tokens") or 0
    steps = message(
        f"{count} checkpoints, steps {first:,} to {last:,}" if count > 1 else f"one checkpoint, step {last:,}"
    )
    seen = _both(f", {tokens:,} tokens seen") if tokens else ""
    return f'<header><h1>{escape(name)}: {_both("evaluation")}</h1><p class="faint">{_both(steps)}{seen}</p></header>'


def _one_checkpoint() -> str:
    words = _both("Curves and verdicts need several checkpoints: evaluate them with `z2a eval watch`.")
    return f'<p class="faint">{words}</p>'


# ---- a section of the reports ---------------------------------------------------------------------------------


def _section(
    section: str, curves: Sequence[Curve], signals: Mapping[str, Signal], reports: Sequence[Mapping[str, Any]]
) -> str:
    mine = [curve for curve in curves if curve.section == section]
    newest = next((report for report in reversed(reports) if section in report), None)
    if newest is None or not mine:
        return ""
    wholes = [curve for curve in mine if section not in WITH_FAMILIES or "/" not in curve.subject]
    families = [curve for curve in mine if curve not in wholes]
    shown, hidden = _charts(section, wholes), ""
    if families:
        below = "".join(_charts(section, families))
        hidden = f"{_panels(below)}{_table(section, families, signals, newest)}"
        hidden = f"<details><summary>{_both('By family')}</summary>{hidden}</details>"
    elif len(shown) > MOST_PANELS:
        hidden = _panels("".join(shown[MOST_PANELS:]))
        hidden = f"<details><summary>{_both('More curves')}</summary>{hidden}</details>"
        shown = shown[:MOST_PANELS]
    return (
        f'<section id="{section}"><h2>{_both(SECTION_WORDS[section])}</h2>{_panels("".join(shown))}'
        f"{_table(section, wholes, signals, newest)}{_left_out(newest, section)}{hidden}</section>"
    )


def _panels(panels: str) -> str:
    return f'<div class="panels">{panels}</div>' if panels else ""


def _charts(section: str, curves: Sequence[Curve]) -> list[str]:
    """One picture per kind of score and per group of subjects (all channels; all families of one channel; …)."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        if len(curve.points) > 1:
            first, slash, _ = curve.subject.partition("/")
            groups.setdefault((curve.field, first if slash else ""), []).append(curve)
    panels = []
    for (field, group), found in groups.items():
        parts = (found[start : start + MOST_LINES] for start in range(0, len(found), MOST_LINES))
        panels += [_panel(section, field, group, part) for part in parts]
    return panels


def _panel(section: str, field: str, group: str, curves: Sequence[Curve]) -> str:
    names = [_short(curve, group) for curve in curves]
    title = _both(FIELD_WORDS[field]) + (f" · {escape(group)}" if group else "")
    legend = "".join(
        f'<span><i class="dot c{number}"></i>{escape(name)} '
        f"<b>{figure(curve.points[-1].value, curve.kind.is_share)}</b></span>"
        for number, (curve, name) in enumerate(zip(curves, names, strict=True))
    )
    chance = next((curve.chance for curve in curves if curve.chance is not None), None)
    if chance is not None:
        legend += f'<span><i class="dash"></i>{_both("guessing")} <b>{chance:.1%}</b></span>'
    label = f"{section} {group} {_either(FIELD_WORDS[field])}"
    return (
        f'<figure class="panel"><figcaption>{title}</figcaption>{line_chart(curves, names, label)}'
        f'<div class="legend">{legend}</div></figure>'
    )


def _short(curve: Curve, group: str) -> str:
    if curve.subject == curve.section:
        return "all"
    return curve.subject.removeprefix(f"{group}/") if group else curve.subject


def _table(section: str, curves: Sequence[Curve], signals: Mapping[str, Signal], newest: Mapping[str, Any]) -> str:
    """A row per subject, a column per kind of score: the newest value, its interval, and what it was at first."""
    fields = [field for field in KINDS if any(curve.field == field for curve in curves)]
    by_subject: dict[str, dict[str, Curve]] = {}
    for curve in curves:
        by_subject.setdefault(curve.subject, {})[curve.field] = curve
    counts = counts_of(newest, section)
    head = "".join(f'<th scope="col">{_both(FIELD_WORDS[field])}</th>' for field in fields)
    body = "".join(
        f'<tr><th scope="row">{escape(_row_name(subject, section))}</th>'
        f"{''.join(_cell(found.get(field), signals) for field in fields)}{_count_cells(counts.get(subject))}</tr>"
        for subject, found in by_subject.items()
    )
    label = escape(_either(SECTION_WORDS[section]))
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table>'
        f'<thead><tr><th scope="col"></th>{head}<th scope="col">{_both("items")}</th>'
        f'<th scope="col">{_both("left out")}</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _row_name(subject: str, section: str) -> str:
    return "all" if subject == section else subject.replace("/", " · ")


def _cell(curve: Curve | None, signals: Mapping[str, Signal]) -> str:
    if curve is None:
        return "<td></td>"
    last, is_share = curve.points[-1], curve.kind.is_share
    text = f"<b>{figure(last.value, is_share)}</b>{_mark(signals[curve.name])}"
    if last.interval is not None:
        text += f"<small>{figure(last.interval[0], is_share)} – {figure(last.interval[1], is_share)}</small>"
    if len(curve.points) > 1:
        first = curve.points[0]
        text += f"<small>{figure(first.value, is_share)} @ {first.step:,}</small>"
    return f"<td>{text}</td>"


def _mark(signal: Signal) -> str:
    """A dot in the colour of the verdict; none where there are too few checkpoints for one."""
    if signal.verdict == TOO_FEW:
        return ""
    words = escape(f"{_either(signal.verdict)}: {_either(signal.reason)}")
    return f'<i class="mark {VERDICT_CLASSES[signal.verdict]}" role="img" aria-label="{words}" title="{words}"></i>'


def _count_cells(counts: Counts | None) -> str:
    if counts is None:
        return "<td></td><td></td>"
    items = "" if counts.items is None else f"{counts.items:,}"
    return f"<td>{items}</td><td>{counts.skipped:,}</td>"


def _left_out(report: Mapping[str, Any], section: str) -> str:
    reasons = skipped_of(report, section)
    total = sum(reasons.values())
    if not total:
        return f'<p class="faint">{_both("No item was left out.")}</p>'
    each = ", ".join(f"{times:,} × {_both(why)}" for why, times in reasons.items())
    return f'<p class="left-out">{_both(f"{total:,} left out")}: {each}</p>'


# ---- which curve to believe -----------------------------------------------------------------------------------


def _signal_summary(signals: Sequence[Signal]) -> str:
    counts = Counter(signal.verdict for signal in signals)
    tiles = "".join(
        f'<div class="tile"><dt><i class="mark {kind}"></i>{_both(verdict)}</dt><dd>{counts[verdict]:,}</dd></div>'
        for verdict, kind in VERDICT_CLASSES.items()
    )
    title = _both("Which curves to believe")
    return f'<section id="verdicts"><h2>{title}</h2><dl class="tiles">{tiles}</dl></section>'


def _signal_table(signals: Sequence[Signal]) -> str:
    """Every verdict with its reason, those that carry signal first."""
    order = list(VERDICT_CLASSES)
    rows = "".join(_signal_row(signal) for signal in sorted(signals, key=lambda each: order.index(each.verdict)))
    heads = ["score", "verdict", "Spearman", "signal / noise", "change / interval", "above chance", "checkpoints"]
    heads += ["left out", "why"]
    head = "".join(f'<th scope="col">{_both(words)}</th>' for words in heads)
    summary = _both(f"All {len(signals)} verdicts, with reasons")
    return (
        f'<section><details><summary>{summary}</summary><div class="wide" tabindex="0" role="region" '
        f'aria-label="verdicts / 判断"><table class="verdicts"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details></section>"
    )


def _signal_row(signal: Signal) -> str:
    kind = VERDICT_CLASSES[signal.verdict]
    figures = (
        _figure_or_dash(signal.spearman, "+.2f"),
        _figure_or_dash(signal.signal_to_noise, ".1f"),
        _figure_or_dash(signal.change_over_interval, ".1f"),
        _figure_or_dash(signal.above_chance, "+.1%"),
        f"{signal.checkpoints}",
        f"{signal.left_out}",
    )
    cells = "".join(f"<td>{text}</td>" for text in figures)
    return (
        f'<tr><th scope="row">{escape(signal.name.replace("/", " · "))}</th>'
        f'<td class="verdict"><i class="mark {kind}"></i>{_both(signal.verdict)}</td>{cells}'
        f'<td class="why">{_both(signal.reason)}</td></tr>'
    )


def _figure_or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


# A line chart as SVG: one line per score, over the steps of checkpoints. Colours and fonts are those of
# `evaluation_page.css`.


WIDTH, HEIGHT = 520, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
COLOURS = 8
"""Classes c0 to c7 of the page's style; a ninth line begins again."""


@dataclass(frozen=True)
class _Axes:
    """From steps and values to places in the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / ((self.last - self.first) or 1)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / ((self.high - self.low) or 1)


def line_chart(curves: Sequence[Curve], names: Sequence[str], label: str) -> str:
    """The curves in one picture; intervals as bands where there are few lines, chance as a dashed line."""
    lines = [[point for point in curve.points if math.isfinite(point.value)] for curve in curves]
    shown = [point for line in lines for point in line]
    if not shown:
        return ""
    chances = {curve.chance for curve in curves if curve.chance is not None}
    has_bands = len(curves) <= 3
    ticks = _ticks([*_extent(shown, has_bands), *chances])
    steps = [point.step for point in shown]
    axes = _Axes(min(steps), max(steps), ticks[0], ticks[-1])
    is_share = curves[0].kind.is_share
    shapes = [_horizontal(axes, value, "grid") + _tick_text(axes, value, ticks, is_share) for value in ticks]
    shapes += [_step_text(axes, step) for step in sorted({min(steps), max(steps), _middle(steps)})]
    shapes += [_horizontal(axes, chance, "chance") for chance in chances]
    for number, (line, name) in enumerate(zip(lines, names, strict=True)):
        shapes.append(_band(axes, line, number) if has_bands else "")
        shapes.append(_line(axes, line, number, name, is_share))
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(shapes)}</svg>'


def figure(value: float, is_share: bool) -> str:
    """A score as people read it."""
    if not math.isfinite(value):
        return "NaN"
    if is_share:
        return f"{value:.1%}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _extent(points: Sequence[Point], has_bands: bool) -> list[float]:
    values = [point.value for point in points]
    if has_bands:
        values += [end for point in points if point.interval for end in point.interval]
    return [min(values), max(values)]


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to seven round values around these."""
    low, high = min(values), max(values)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / 4
    size = 10.0 ** math.floor(math.log10(rough))
    size *= next(factor for factor in (1, 2, 5, 10) if factor * size >= rough)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(number * size, 12) for number in range(first, last + 1)]


def _middle(steps: Sequence[int]) -> int:
    """The step nearest to the middle of the axis."""
    middle = (min(steps) + max(steps)) / 2
    return min(steps, key=lambda step: abs(step - middle))


def _horizontal(axes: _Axes, value: float, kind: str) -> str:
    y = f"{axes.y(value):.1f}"
    return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="{kind}"/>'


def _tick_text(axes: _Axes, value: float, ticks: Sequence[float], is_share: bool) -> str:
    digits = max(0, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9) - (2 if is_share else 0))
    text = f"{value:.{digits}%}" if is_share else f"{value:.{digits}f}"
    return f'<text x="{LEFT - 6}" y="{axes.y(value) + 4:.1f}" class="tick end">{text}</text>'


def _step_text(axes: _Axes, step: int) -> str:
    place = "end" if axes.x(step) > WIDTH - RIGHT - 20 else "middle" if axes.x(step) > LEFT + 20 else "start"
    text = f"{step:,}" if step < 100_000 else human_count(step)
    return f'<text x="{axes.x(step):.1f}" y="{HEIGHT - 6}" class="tick {place}">{text}</text>'


def _band(axes: _Axes, line: Sequence[Point], number: int) -> str:
    ends = [(point.step, *point.interval) for point in line if point.interval]
    if len(ends) < 2:
        return ""
    there = [f"{axes.x(step):.1f},{axes.y(high):.1f}" for step, _, high in ends]
    back = [f"{axes.x(step):.1f},{axes.y(low):.1f}" for step, low, _ in reversed(ends)]
    return f'<polygon points="{" ".join(there + back)}" class="band c{number % COLOURS}"/>'


def _line(axes: _Axes, line: Sequence[Point], number: int, name: str, is_share: bool) -> str:
    places = [(point, f"{axes.x(point.step):.1f}", f"{axes.y(point.value):.1f}") for point in line]
    path = " ".join(f"{x},{y}" for _, x, y in places)
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" class="c{number % COLOURS}">'
        f"<title>{escape(name)} · {point.step:,}: {figure(point.value, is_share)}</title></circle>"
        for point, x, y in places
    )
    return f'<polyline points="{path}" class="curve s{number % COLOURS}"/>{dots}'
