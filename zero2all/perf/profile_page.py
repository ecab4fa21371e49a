"""The files and tables of a profile: profile.json, two pictures; the trace is `zero2all.perf.profile`'s."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zero2all.common.files import write_json
from zero2all.common.language import translate as t
from zero2all.perf.block_memory import MIB
from zero2all.perf.kernel_groups import GROUPS
from zero2all.perf.pictures import write_png
from zero2all.perf.profile import SNAPSHOT_NAME, TRACE_NAME, Profile
from zero2all.track.plot import COLORS, FAINT_INK, INK, thin_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 15
MOST_POINTS = 2_000
MOST_PHASES = 16
GIB = float(1 << 30)
Cells = list[list[str]]


def write_profile(found: Profile, output: Path) -> list[str]:
    """Write all files; returns their paths, or why one is missing."""
    said = [str(output / TRACE_NAME), *([str(output / SNAPSHOT_NAME)] if found.anatomy.kind == "cuda" else [])]
    write_json(output / "profile.json", as_json(found))
    for name, draw in (("anatomy.png", _draw_anatomy), ("memory.png", _draw_memory)):
        said.append(write_png(output / name, (7.6, 3.8), partial(draw, found)))
    return [*said, str(output / "profile.json")]


def as_json(found: Profile) -> dict[str, Any]:
    """Everything but the single allocations, of which the trace and the snapshot have all."""
    plain = dataclasses.asdict(found)
    for row, plain_row in zip(found.anatomy.rows, plain["anatomy"]["rows"], strict=True):
        plain_row["floor_percent"] = row.floor_percent
    seconds, peak = found.memory.peak
    plain["memory"] = {
        "source": found.memory.source,
        "peak_bytes": peak,
        "peak_at_seconds": seconds,
        "peak_phase": found.memory.phase_at(seconds),
        "phases": found.memory.phases,
    }
    return plain


# ---- tables ----------------------------------------------------------------------------------------------------------


def title_of(found: Profile) -> str:
    """What was profiled."""
    return (
        f"{found.config} on {found.device}, {found.dtype}, {found.batch}: {1e3 * found.seconds:,.1f} ms an iteration, "
        f"{found.batch.tokens / found.seconds:,.0f} tokens/s"
    )


def tables_of(found: Profile) -> list[Cells]:
    """All tables that have a row: groups, phases (without what is idle), kernels, memory, blocks."""
    whole = found.anatomy.seconds

    def times(of: dict[str, float]) -> Cells:
        return [[t(name), f"{1e3 * spent:,.2f}", f"{100 * spent / whole:.1f}"] for name, spent in of.items()]

    units = ["ms an iteration", "%"]
    blocks = [[row.name, *(f"{value / MIB:,.2f}" for value in dataclasses.astuple(row)[1:])] for row in found.blocks]
    tables = [
        [["group", *units], *times({**found.anatomy.groups, "together": whole})],
        [["phase (busy)", *units], *times(found.anatomy.phases)],
        _kernel_cells(found),
        _memory_cells(found),
        [["block, MiB", "forward, peak", "kept", "backward, peak", "kept"], *blocks],
    ]
    return [cells for cells in tables if len(cells) > 1]


def _kernel_cells(found: Profile) -> Cells:
    """The kernels or operators that take most of the time."""
    rows = []
    for row in found.anatomy.rows[:TOP]:
        floor = row.floor_percent
        figures = [f"{row.calls:g}", f"{1e3 * row.seconds:,.3f}", f"{100 * row.seconds / found.anatomy.seconds:.1f}"]
        rows.append([_short(row.name), t(row.group), *figures, "" if floor is None else f"{floor:.0f}"])
    name = "kernel" if found.anatomy.kind == "cuda" else "operator"
    return [[name, "group", "calls", "ms an iteration", "%", "% of floor"], *rows]


def _short(name: str, length: int = 70) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= length else f"{name[: length - 1]}…"


def _memory_cells(found: Profile) -> Cells:
    """Peak and start."""
    seconds, peak = found.memory.peak
    first = found.memory.points[0][1] if found.memory.points else 0.0
    return [
        ["memory", "MiB", "when"],
        [t("peak in the iteration"), f"{peak / MIB:,.1f}", f"{seconds:.3f} s, {t(found.memory.phase_at(seconds))}"],
        [t("at its start"), f"{first / MIB:,.1f}", "0 s"],
        [
            t("peak of the GPU" if found.anatomy.kind == "cuda" else "peak of the process"),
            f"{found.peak_bytes / MIB:,.1f}",
            "",
        ],
    ]


# ---- pictures --------------------------------------------------------------------------------------------------------


def _draw_anatomy(found: Profile, figure: Figure) -> None:
    axis = figure.add_subplot()
    groups = {name: seconds for name, seconds in found.anatomy.groups.items() if seconds > 0}
    places = range(len(groups), 0, -1)
    for place, (name, seconds) in zip(places, groups.items(), strict=True):
        color = COLORS[GROUPS.index(name)] if name in GROUPS else FAINT_INK
        axis.barh(place, 1e3 * seconds, height=0.66, color=color, zorder=2)
        text = f" {1e3 * seconds:,.1f} ms, {100 * seconds / found.anatomy.seconds:.1f} %"
        axis.text(1e3 * seconds, place, text, va="center", fontsize=8.5, color=INK)
    axis.set_yticks(list(places), list(groups), color=INK)
    axis.set_xlim(0, 1.3e3 * max(groups.values()))
    axis.set_xlabel("ms an iteration")


def _draw_memory(found: Profile, figure: Figure) -> None:
    axis = figure.add_subplot()
    points = np.array(found.memory.points or [(0.0, 0.0)])
    seconds, values = thin_out(points[:, 0], points[:, 1], MOST_POINTS)
    for number, (name, start, end) in enumerate(found.memory.phases[:MOST_PHASES]):
        axis.axvspan(start, end, color=COLORS[number % 3], alpha=0.10, linewidth=0)
        axis.text((start + end) / 2, 1.01, name, transform=axis.get_xaxis_transform(), ha="center", fontsize=7)
    axis.plot(seconds, values / GIB, drawstyle="steps-post", color=COLORS[0], linewidth=1.2)
    at, peak = found.memory.peak
    axis.plot([at], [peak / GIB], "o", color=COLORS[1], markersize=5)
    axis.annotate(f"{peak / GIB:.3g} GiB", (at, peak / GIB), xytext=(4, 4), textcoords="offset points", color=INK)
    axis.set_ylim(0, 1.12 * max(peak, 1.0) / GIB)
    axis.set_xlabel(f"seconds of an iteration; GiB allocated ({found.memory.source})")
