"""Which charts the board draws of a run: metric names in, groups of charts out.

Names are paths (`loss/zh`, `time/forward`). The metrics below one first word share a chart; scores share one when they
are of the same quantity. Unknown families, and those of mixed units (gpu/, host/), have a chart for each metric. The
loss on held-out text stands beside that of training, in the first chart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GROUPS: tuple[tuple[str, str], ...] = (
    ("loss", r"(loss|perplexity|bpb)$|eval/valid/loss(/|$)"),
    ("channels", r"(loss|bpb)/"),
    ("eval", r"(eval|valid|probe)(/|$)"),
    ("optim", r"(lr|grad_norm|param_norm|update_norm|update_ratio|loss_scale)(/|$)"),
    ("speed", r"(tokens_per_second|mfu|hfu|time|step_seconds|flops)(/|$|_)"),
    ("memory", r"memory(/|$|_)"),
    ("mixture", r"(mixture|tokens)/"),
    ("gpu", r"gpu(/|$)"),
    ("host", r"(host|cpu|disk|network)(/|$)"),
)
"""In the order of the page, each with what the names of its metrics begin with."""
OTHER = "other"
APART = frozenset({"gpu", "host"})
STACKED = frozenset({"time", "mixture"})
TOTALS = frozenset({"time/step"})  # the sum of the family it belongs to: a line above the stack, and no part of it
NEVER_SMOOTHED = frozenset({"eval", "memory", "mixture"})
"""Scores, sums and plans are drawn as they are: smoothing would only bend them."""
LINES_PER_CHART = 24
FIRST = ("loss", "bpb", "lr", "grad_norm", "tokens_per_second", "mfu", "time", "eval/valid/bpb", "eval/documents/bpb")
HELD_OUT_LOSS = "eval/valid/loss"
"""Of all held-out text; with a channel behind it, of that channel."""
MEASURED_BY = {"eval/valid/bpb": "z2a train", "eval/documents/bpb": "z2a eval"}
"""Training scores rows of held-out text, the evaluation whole documents: two numbers, told apart by their titles."""
QUANTITY = re.compile(
    r"(loss|bpb|perplexity|ppl|acc|accuracy|probability|share_among_foils|logprob|nats|f1|exact_match)(_|$)"
)
UNITS: tuple[tuple[str, str], ...] = (
    ("nats", r"(^|/)loss(/|$)"),
    ("bits", r"(^|/)bpb(/|$)"),
    ("tokensPerSecond", r"^tokens_per_second$"),
    ("seconds", r"^time(/|$)|_seconds$|^memory/checkpoint_"),
    ("GiB", r"gib$"),
    ("share", r"^(mfu|hfu|mixture)(/|$)|(^|/)(acc\w*|probability|share\w*|fraction)(/|$)"),
    ("bytes", r"^memory/"),
    ("flops", r"^flops$"),
    ("W", r"power"),
    ("°C", r"temperature"),
    ("%", r"utili[sz]ation|percent"),
)
"""What a metric is counted in, in the words of the page; a metric of none of these is a plain number."""


@dataclass(frozen=True)
class ChartLine:
    """One metric in a chart."""

    name: str
    label: str
    total: bool = False  # the sum of the others
    held_out: bool = False  # few points, each worth seeing, and never smoothed


@dataclass(frozen=True)
class Chart:
    """What the page needs to draw one."""

    key: str
    title: str
    unit: str
    metrics: list[ChartLine] = field(default_factory=list)
    stacked: bool = False
    dots: bool = False  # few points, each worth seeing
    raw: bool = False  # never smoothed


def arrange(names: Sequence[str]) -> list[dict[str, Any]]:
    """The groups of a run with their charts, in order; `rank` orders the groups of several runs."""
    members: dict[str, list[str]] = {}
    for name in sorted(names):
        members.setdefault(_group_of(name), []).append(name)
    groups = [
        {
            "key": key,
            "rank": _rank(key),
            "known": _rank(key) < len(GROUPS) or key == OTHER,
            "charts": [asdict(chart) for chart in _charts(key, found)],
        }
        for key, found in members.items()
    ]
    return sorted(groups, key=lambda group: (group["rank"], group["key"]))


def unit_of(name: str) -> str:
    """What a metric is counted in; nothing for plain numbers."""
    return next((unit for unit, pattern in UNITS if re.search(pattern, name)), "")


def _group_of(name: str) -> str:
    known = next((key for key, pattern in GROUPS if re.match(pattern, name)), None)
    return known or (name.split("/")[0] if "/" in name else OTHER)


def _rank(group: str) -> int:
    known = [key for key, _ in GROUPS]
    return known.index(group) if group in known else len(known) + (group == OTHER)


def _charts(group: str, names: list[str]) -> list[Chart]:
    together: dict[str, list[ChartLine]] = {}
    for name in sorted(names, key=lambda name: (name in TOTALS, name.startswith(HELD_OUT_LOSS))):
        chart, label = _place(group, name)
        is_total = name in TOTALS
        is_held_out = name.startswith(HELD_OUT_LOSS)
        together.setdefault(chart, []).append(
            ChartLine(name, f"Σ {label}" if is_total else label, is_total, is_held_out)
        )
    charts = []
    for key, lines in together.items():
        if len(lines) == 1:
            name = lines[0].name
            charts.append(_chart(group, name, [ChartLine(name, name, held_out=lines[0].held_out)]))
            continue
        starts = range(0, len(lines), LINES_PER_CHART)
        charts += [_chart(group, key, lines[start : start + LINES_PER_CHART], start) for start in starts]
    return sorted(charts, key=lambda chart: (_place_in_group(chart.key), chart.key))


def _place(group: str, name: str) -> tuple[str, str]:
    """The chart a metric belongs to, and the label of its line there."""
    parts = name.split("/")
    if name in MEASURED_BY:
        return name, "all"
    if group == "eval":
        at = max((place for place, part in enumerate(parts) if QUANTITY.match(part)), default=None)
        if at is None:
            return name, name
        if at + 1 < len(parts):  # eval/valid/bpb/en is the line `en` of eval/valid/bpb
            return "/".join(parts[: at + 1]), "/".join(parts[at + 1 :])
        return parts[at], "/".join(parts[1:at]) or name  # eval/wiki/bpb is the line `wiki` of bpb
    if name.startswith(HELD_OUT_LOSS):
        return "loss", parts[-1]
    if len(parts) == 1 or group in APART or _rank(group) >= len(GROUPS):
        return name, name
    return f"{parts[0]}/*", "/".join(parts[1:])


def _chart(group: str, key: str, lines: list[ChartLine], start: int = 0) -> Chart:
    title = key.removesuffix("/*")
    more = f" ({start + 1}–{start + len(lines)})" if start else ""
    by = next((f" ({verb})" for name, verb in MEASURED_BY.items() if key.startswith(name)), "")
    return Chart(
        key=f"{key}+{start}" if start else key,
        title=title + more + by,
        unit=unit_of(lines[0].name),
        metrics=lines,
        stacked=len(lines) > 1 and title in STACKED,
        dots=group == "eval",
        raw=group in NEVER_SMOOTHED or bool(re.match(r"(lr|flops)(/|$)", key)),
    )


def _place_in_group(key: str) -> int:
    return next((place for place, name in enumerate(FIRST) if f"{key}/".startswith(f"{name}/")), len(FIRST))
