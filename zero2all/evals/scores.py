"""The scores in the reports of a run, as curves over its checkpoints.

A report is a tree (`held_out` → channel → figures; `probes` → channel → group → figures; `tasks` → list of results).
Wherever a node holds one of the figures below, that is a score; its name is the path to it. Parts of a report that
later versions add are found the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json_object
from zero2all.train.checkpoints.layout import FOLDER_NAME

SECTIONS = ("held_out", "documents", "texts", "probes", "pairs", "tasks", "suites", "rewrites")
SECTION_CHANCE = {"pairs": 0.5}
"""Accuracy of guessing, where the report itself does not say."""
TRANSPARENT = ("channels", "groups", "kinds", "results", "tasks", "rows")
"""Levels of a report that say nothing in the name of a score."""
OPAQUE = ("skipped", "settings")
NAMED_BY = ("task", "rewrite", "name", "form")
"""Fields that name a result in a list of them."""


@dataclass(frozen=True)
class ScoreKind:
    """What kind of figure a field is."""

    is_better_high: bool
    interval: str = ""
    """The field with its 95 % confidence interval."""
    has_chance: bool = False
    only_in: str = ""
    """The section that has such a score; elsewhere the same word means something else."""


KINDS = {
    "bits_per_byte": ScoreKind(is_better_high=False),
    "accuracy": ScoreKind(is_better_high=True, interval="interval", has_chance=True),
    "share_among_foils": ScoreKind(is_better_high=True, interval="share_interval"),
    "logprob": ScoreKind(is_better_high=True, interval="logprob_interval"),
    "nats": ScoreKind(is_better_high=True, only_in="pairs"),
    "original": ScoreKind(is_better_high=True, only_in="rewrites"),
    "rewritten": ScoreKind(is_better_high=True, only_in="rewrites"),
    "gap": ScoreKind(is_better_high=False, interval="gap_interval", only_in="rewrites"),
    "score": ScoreKind(is_better_high=True, interval="interval"),
}


@dataclass(frozen=True)
class Point:
    """A score of one checkpoint."""

    step: int
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoreCurve:
    """A score over checkpoints, oldest first."""

    name: str
    """Path in the report: `probes/en/capital/accuracy`."""
    points: tuple[Point, ...]
    chance: float | None = None

    @property
    def field(self) -> str:
        """The figure that it is."""
        return self.name.rpartition("/")[2]

    @property
    def kind(self) -> ScoreKind:
        """What kind of figure it is."""
        return KINDS.get(self.field, ScoreKind(is_better_high=True))


def read_reports(run: Path) -> list[dict[str, Any]]:
    """The reports of a run, oldest checkpoint first; files that are none are left out."""
    found = []
    for path in sorted((run / "eval").glob("step-*.json")):
        if FOLDER_NAME.fullmatch(path.stem):
            try:
                report = read_json_object(path)
            except (BadInputError, OSError):
                continue
            if type(report.get("step")) is int:
                found.append(report)
    return sorted(found, key=lambda report: int(report["step"]))


def curves_of(reports: Sequence[Mapping[str, Any]]) -> list[ScoreCurve]:
    """Every score of the reports, in the order in which the newest one has them."""
    points: dict[str, list[Point]] = {}
    chances: dict[str, float | None] = {}
    for report in reversed(reports):
        for name, value, interval, chance in _scores(report):
            points.setdefault(name, []).insert(0, Point(int(report["step"]), value, interval))
            chances.setdefault(name, chance)
    return [ScoreCurve(name, tuple(found), chances[name]) for name, found in points.items()]


def _scores(report: Mapping[str, Any]) -> Iterator[tuple[str, float, tuple[float, float] | None, float | None]]:
    for section in SECTIONS:
        for name, node, chance in _nodes(section, report.get(section), SECTION_CHANCE.get(section)):
            for field, kind in KINDS.items():
                if _is_number(node.get(field)) and kind.only_in in ("", section):
                    interval = _interval(node.get(kind.interval))
                    yield f"{name}/{field}", float(node[field]), interval, chance if kind.has_chance else None


def _nodes(name: str, node: Any, chance: float | None) -> Iterator[tuple[str, Mapping[str, Any], float | None]]:
    """Every object below a node of a report, with its path and the chance that holds for it."""
    if isinstance(node, list):
        for number, each in enumerate(node):
            if isinstance(each, dict):
                yield from _nodes(f"{name}/{_name_of(each, number)}", each, chance)
    if not isinstance(node, dict):
        return
    if _is_number(node.get("chance")):
        chance = float(node["chance"])
    yield name, node, chance
    for key, inner in node.items():
        if key in TRANSPARENT and isinstance(inner, list):
            yield from _nodes(name, inner, chance)
        elif key in TRANSPARENT and isinstance(inner, dict):
            for below, each in inner.items():
                yield from _nodes(f"{name}/{below}", each, chance)
        elif isinstance(inner, dict) and key not in OPAQUE:
            yield from _nodes(f"{name}/{key}", inner, chance)


def _name_of(result: Mapping[str, Any], number: int) -> str:
    words = [str(result[field]) for field in NAMED_BY if result.get(field)]
    if _is_number(result.get("shots")):
        words.append(f"{result['shots']}-shot")
    return "/".join(words) or str(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _interval(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        return None
    low, high = float(value[0]), float(value[1])
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None
