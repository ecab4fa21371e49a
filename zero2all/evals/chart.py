"""A line chart as SVG: one line per score, over the steps of checkpoints. Colours and fonts are those of `page.css`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from zero2all.common.progress import human_count
from zero2all.evals.scores import Curve, Point

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
