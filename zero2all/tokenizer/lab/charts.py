"""The drawings of the page, as SVG that takes its colours from the page's style. No script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

COLOURS = 6
"""Classes c0 to c5 of the page's style; a seventh tokenizer begins again."""


def colour(number: int) -> str:
    """The class of the tokenizer with this number."""
    return f"c{number % COLOURS}"


def legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    items = "".join(f'<span><i class="dot {colour(n)}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="legend">{items}</div>'


def grouped_bars(groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], words: str = "{:.2f}") -> str:
    """Horizontal bars, one group per channel and in it one bar per tokenizer."""
    row, gap, label, width = 20, 16, 74, 520
    top = max((value for _, values in series for value in values), default=1) or 1
    shapes = []
    y = 4
    for place, group in enumerate(groups):
        middle = y + row * len(series) / 2 + 4
        shapes.append(f'<text x="0" y="{middle:.0f}" class="strong">{escape(group)}</text>')
        for number, (name, values) in enumerate(series):
            value = values[place]
            long = max(2.0, (width - label - 62) * value / top)
            shapes.append(
                f'<rect x="{label}" y="{y + 2}" width="{long:.1f}" height="{row - 5}" rx="3" class="{colour(number)}">'
                f"<title>{escape(name)}, {escape(group)}: {words.format(value)}</title></rect>"
                f'<text x="{label + long + 6:.1f}" y="{y + 13}" class="figure">{words.format(value)}</text>'
            )
            y += row
        y += gap
    return f'<svg viewBox="0 0 {width} {y - gap + 4}" role="img" aria-label="bars">{"".join(shapes)}</svg>'


def rank_curves(series: Sequence[tuple[str, Sequence[Sequence[int]], int]]) -> str:
    """How often the piece of each rank was used, both axes logarithmic; the dashed line is the number of pieces."""
    width, height, left, bottom, right, over = 520, 270, 46, 34, 12, 10
    far = max((pieces for _, _, pieces in series), default=10)
    high = max((points[0][1] for _, points, _ in series if points), default=10)
    along = math.log10(max(far, 10))
    up = math.log10(max(high, 10))

    def x(rank: float) -> float:
        return left + (width - left - right) * math.log10(max(rank, 1)) / along

    def y(count: float) -> float:
        return height - bottom - (height - bottom - over) * math.log10(max(count, 1)) / up

    shapes = []
    for power in range(int(along) + 1):
        place = x(10**power)
        shapes.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{over}" y2="{height - bottom}" class="grid"/>')
        shapes.append(f'<text x="{place:.1f}" y="{height - bottom + 15}" class="tick middle">{_power(power)}</text>')
    for power in range(int(up) + 1):
        place = y(10**power)
        shapes.append(f'<line x1="{left}" x2="{width - right}" y1="{place:.1f}" y2="{place:.1f}" class="grid"/>')
        shapes.append(f'<text x="{left - 6}" y="{place + 4:.1f}" class="tick end">{_power(power)}</text>')
    shapes.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 4}" class="tick middle">rank of the piece</text>')
    middle = f"{height / 2:.0f}"
    turned = f'transform="rotate(-90 12 {middle})"'
    shapes.append(f'<text x="12" y="{middle}" class="tick middle" {turned}>times used</text>')
    for number, (name, points, pieces) in enumerate(series):
        if not points:
            continue
        path = " ".join(f"{x(rank):.1f},{y(count):.1f}" for rank, count in points)
        end, count = points[-1]
        shapes.append(
            f'<line x1="{x(pieces):.1f}" x2="{x(pieces):.1f}" y1="{over}" y2="{height - bottom}" '
            f'class="limit s{colour(number)}"/>'
            f'<polyline points="{path}" class="curve s{colour(number)}"><title>{escape(name)}: {end:,} of {pieces:,} '
            f"pieces used</title></polyline>"
            f'<circle cx="{x(end):.1f}" cy="{y(count):.1f}" r="3.5" class="{colour(number)}"/>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="use by rank">{"".join(shapes)}</svg>'


def use_histogram(histogram: Sequence[Mapping[str, Any]], number: int) -> str:
    """One bar over 100 %: which share of the pieces was used how often; never used is hatched grey."""
    total = sum(bucket["pieces"] for bucket in histogram) or 1
    parts = []
    for place, bucket in enumerate(histogram):
        share = bucket["pieces"] / total
        if share == 0:
            continue
        words = f"{bucket_name(bucket)}: {bucket['pieces']:,} pieces ({share:.1%})"
        strength = 25 + 75 * place / (len(histogram) - 1)
        style = "" if place == 0 else f"opacity:{strength / 100:.2f}"
        kind = "never" if place == 0 else colour(number)
        shown = f"{share:.0%}" if share > 0.08 else ""
        parts.append(
            f'<span style="width:{100 * share:.2f}%" title="{escape(words)}"><i class="{kind}" style="{style}"></i>'
            f"<b>{shown}</b></span>"
        )
    return f'<div class="stack">{"".join(parts)}</div>'


def bucket_name(bucket: Mapping[str, Any]) -> str:
    """Such as `4 to 15 times`."""
    low, high = bucket["from"], bucket["to"]
    if low == high:
        return "never" if low == 0 else "once"
    return f"{low} to {high} times" if high is not None else f"{low} times or more"


def _power(power: int) -> str:
    return {0: "1", 1: "10", 2: "100", 3: "1k", 4: "10k", 5: "100k", 6: "1M", 7: "10M"}.get(power, f"1e{power}")
