"""What the page shows of a run besides its curves: its status and its events.

Events are sent short; all about one of them is sent when it is opened. Everything is sent ready to be shown.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.track.curves import along, start_time
from zero2all.track.library import OpenRun, live_facts
from zero2all.track.listing import TRAIN_WRITER
from zero2all.track.reader import Axis, Event, RunReader, Series
from zero2all.track.writer import END_KIND, SEGMENT_KIND

MAX_MARKS = 3_000
MAX_AROUND = 40
SPIKE_METRIC = "loss"
MEASURES = ("value", "usual", "limit", "mean", "sigma")
"""What an event says of its spike."""
KINDS: dict[str, tuple[int, str, str]] = {
    "spike": (0, "bad", "▲"),
    "incident": (0, "bad", "✕"),
    "checkpoint_failed": (1, "bad", "!"),
    "rollback": (1, "warn", "↶"),
    "skip": (1, "warn", "!"),
    "quarantine": (2, "warn", "!"),
    "straggler": (2, "warn", "◔"),
    "warning": (2, "warn", "!"),
    "restart": (3, "accent", "↻"),
    "segment": (3, "accent", "↻"),
    "stage": (4, "accent", "◆"),
    "anneal": (4, "accent", "◆"),
    "drop": (5, "warn", "!"),
    "tracking": (6, "warn", "!"),
    "end": (7, "ink-3", "■"),
    "checkpoint": (8, "ink-3", "●"),
}
"""How bad an event is (0 is worst), its tone on the page and its sign."""
OTHER_KIND = (6, "accent", "◦")
HIDDEN_KINDS = ("start", "prepared", "finish")
NOTES = ("text", "reason", "problem", "message", "name", "stage", "folder", "notes")
"""Where the one line about an event comes from: the first of these that it has."""
MAX_FIELDS = 1_000
TURNING = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the order of the text after them; written as `\\u202e`, so that a value looks like itself."""
MAX_INCIDENT_BYTES = 4_000_000


def run_facts(run: OpenRun) -> dict[str, Any]:
    """All about a run that is needed to lay out its page."""
    reader = run.reader
    header = next((event.data for event in reversed(reader.events()) if event.kind == "segment"), {})
    return {
        "id": run.run_id,
        "name": run.run_id.partition("/")[2],
        "version": reader.version,
        **live_facts(run),
        "names": reader.metrics(),
        "groups": arrange(reader.metrics(), _verdicts(run.folder)),
        "channels": channel_names(reader.metrics()),
        "start": start_time(reader),
        "host": header.get("host"),
        "skipped_lines": reader.skipped_lines,
        "problems": reader.problems,
    }


def marks(reader: RunReader, axis: Axis) -> dict[str, Any]:
    """What happened, as marks on the axis: the latest MAX_MARKS, and how many were left out."""
    events = [(number, event) for number, event in enumerate(reader.events()) if not _is_hidden(event)]
    kept = events[-MAX_MARKS:]
    found = [{"i": str(number), **_mark(event)} for number, event in kept]
    for mark, x in zip(found, _places(reader, found, axis), strict=True):
        mark["x"] = x
    found = [mark for mark in found if mark["x"] is not None]
    found.sort(key=lambda mark: mark["x"])
    return {"marks": found, "total": len(reader.events()), "left_out": len(events) - len(kept)}


def event_facts(reader: RunReader, name: str) -> dict[str, Any]:
    """Everything about one event, and the metrics at its step."""
    events = reader.events()
    if not name.isdecimal() or int(name) >= len(events):
        raise BadInputError(f"There is no event {name}.")
    event = events[int(name)]
    data = event.data
    facts = {"i": name, **_mark(event), "data": data, "fields": flatten(data), "around": _around(reader, event.step)}
    if event.kind == "spike":
        numbers = [[word, _finite(data.get(word))] for word in MEASURES]
        facts["measures"] = [row for row in numbers if row[1] is not None]
        facts["documents"] = _documents(reader, data)
        losses = data.get("channel_losses") or (data.get("details") or {}).get("channel_losses")
        own = {key[5:]: value for key, value in facts["around"].items() if key.startswith("loss/")}
        losses = losses if isinstance(losses, dict) and losses else own
        known = [[str(channel), number] for channel, loss in losses.items() if (number := _finite(loss)) is not None]
        facts["losses"] = sorted(known, key=lambda row: -row[1])
    return facts


def flatten(value: Any, path: str = "") -> list[list[str]]:
    """Nested fields as rows of name and text, one for each value: for people, who do not read JSON."""
    rows: list[list[str]] = []
    waiting = [(path, value)] if value != {} else []
    while waiting and len(rows) < MAX_FIELDS:
        name, each = waiting.pop()
        if isinstance(each, dict) and each:
            waiting += [(f"{name}.{key}" if name else str(key), inner) for key, inner in reversed(each.items())]
        elif isinstance(each, list) and any(isinstance(inner, dict | list) for inner in each):
            waiting += [(f"{name} {place}", each[place - 1]) for place in range(len(each), 0, -1)]
        elif isinstance(each, list):
            rows.append([name, "\n".join(map(_shown, each)) if each else "–"])
        else:
            rows.append([name, _shown(each)])
    return rows


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else TURNING.sub(lambda mark: ascii(mark[0])[1:-1], str(value))


def channel_names(metrics: Sequence[str]) -> list[str]:
    """The channels of a run, in the order in which they get their colours, here and in `z2a plot`."""
    prefixes = ("loss/", "eval/valid/bpb/", "bpb/")
    return list(dict.fromkeys(name.removeprefix(p) for p in prefixes for name in metrics if name.startswith(p)))


def _is_hidden(event: Event) -> bool:
    if event.kind in (SEGMENT_KIND, END_KIND) and event.writer != TRAIN_WRITER:
        return True  # an evaluation began and ended; training did not
    return event.kind in HIDDEN_KINDS or (event.kind == SEGMENT_KIND and event.attempt <= 1)


def _mark(event: Event) -> dict[str, Any]:
    mark: dict[str, Any] = {name: getattr(event, name) for name in ("kind", "step", "time", "writer", "attempt")}
    if event.kind == "spike":
        usual = "grad_norm" if event.data.get("kind") == "grad_spike" else SPIKE_METRIC
        mark |= {"metric": str(event.data.get("metric", usual)), "value": _finite(event.data.get("value"))}
    for name in NOTES:
        note = event.data.get(name)
        if isinstance(note, list):
            note = "; ".join(map(_shown, note))
        if isinstance(note, str) and note:
            mark["note"] = note[:200]
            break
    return mark | dict(zip(("rank", "tone", "sign"), KINDS.get(event.kind, OTHER_KIND), strict=True))


def _documents(reader: RunReader, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a step: in the event itself, or in the incident that it names."""
    if isinstance(data.get("documents"), list):
        return [each for each in data["documents"] if isinstance(each, dict)]
    page = data.get("page")
    if not isinstance(page, str) or Path(page).name != page or "\0" in page:
        return []
    path = (reader.folder / "incidents" / page).with_suffix(".json")
    try:
        if not path.is_file() or path.stat().st_size > MAX_INCIDENT_BYTES:
            return []
        samples = json.loads(path.read_bytes())["samples"]
        return [
            {key: sample[key] for key in ("source", "loss") if sample.get(key) is not None}
            | {key: document[key] for key in ("gid", "title", "text") if document.get(key) is not None}
            for sample in samples
            for document in sample["documents"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _places(reader: RunReader, found: Sequence[dict[str, Any]], axis: Axis) -> list[float | None]:
    """Where the steps of some marks are on an axis."""
    if axis == "step":
        return [float(mark["step"]) for mark in found]
    if axis == "time":
        start = start_time(reader)
        return [mark["time"] - start for mark in found]
    points = _longest(reader)
    x = along(reader, points, axis)
    known = np.isfinite(x)
    if not known.any():
        return [None] * len(found)
    steps = np.array([mark["step"] for mark in found], dtype=np.float64)
    return [float(place) for place in np.interp(steps, points.step[known], x[known])]


def _longest(reader: RunReader) -> Series:
    names = reader.metrics()
    return reader.series(SPIKE_METRIC if SPIKE_METRIC in names else names[0] if names else SPIKE_METRIC)


def _around(reader: RunReader, step: int) -> dict[str, float | None]:
    names = [name for name in reader.metrics() if not name.startswith(("gpu/", "host/", "eval/"))]
    names.sort(key=lambda name: (name.count("/"), not name.startswith("loss"), name))
    values: dict[str, float | None] = {}
    for name in names[: 4 * MAX_AROUND]:
        points = reader.series(name)
        place = int(np.searchsorted(points.step, step))
        if place < len(points) and points.step[place] == step:
            values[name] = _finite(float(points.value[place]))
        if len(values) >= MAX_AROUND:
            break
    return values


def _verdicts(folder: Path) -> dict[str, str]:
    """By metric: which curves of benchmarks to believe, as `z2a eval` has written it."""
    path = folder / "eval" / "signal.json"
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_INCIDENT_BYTES else []
        names = [(re.fullmatch(r"tasks/(.+)/([^/]+)(?:/\d+-shot)/accuracy", each["name"]), each) for each in found]
        return {f"eval/tasks/{name[2]}/{name[1]}": str(each["verdict"])[:40] for name, each in names if name}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# Which charts the board draws of a run: metric names in, groups of charts out.
#
# Names are paths (`loss/zh`, `time/forward`). The metrics below one first word share a chart; scores share one when
# they are of the same quantity. Unknown families, and those of mixed units (gpu/, host/), have a chart for each metric.
# The loss on held-out text stands beside that of training, in the first chart.


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


def arrange(names: Sequence[str], verdicts: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The groups of a run with their charts, in order; `rank` orders the groups of several runs. `verdicts`: what can
    be believed of some metrics."""
    members: dict[str, list[str]] = {}
    for name in sorted(names):
        members.setdefault(_group_of(name), []).append(name)
    groups = []
    for key, rank in sorted(((key, _rank(key)) for key in members), key=lambda each: each[::-1]):
        charts = [asdict(chart) for chart in _charts(key, members[key])]
        for line in (line for chart in charts for line in chart["metrics"] if line["name"] in (verdicts or {})):
            line["label"] += f" ({(verdicts or {})[line['name']]})"
        groups.append({"key": key, "rank": rank, "known": rank < len(GROUPS) or key == OTHER, "charts": charts})
    return groups


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
        label = f"Σ {label}" if name in TOTALS else label
        line = ChartLine(name, label, name in TOTALS, name.startswith(HELD_OUT_LOSS))
        together.setdefault(chart, []).append(line)
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
        if task := re.fullmatch(r"eval/tasks/(?!summary/|bits/)([^/]+)/(.+)", name):
            return f"eval/tasks/{task[2]}", task[1]  # the ways to ask a task, side by side
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
