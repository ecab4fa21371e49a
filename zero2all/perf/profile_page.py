"""The files of a profile: profile.json, two pictures, and profile.html, one page that needs nothing else
(`common/html.py`), with the pictures beside the tables."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zero2all.common.files import write_atomic, write_json
from zero2all.common.html import html_page
from zero2all.common.language import translate as t
from zero2all.perf.block_memory import MIB
from zero2all.perf.kernel_groups import GROUPS
from zero2all.perf.profile import SNAPSHOT_NAME, TRACE_NAME, Profile
from zero2all.track.plot import COLORS, FAINT_INK, INK, STYLE, png_bytes, thin_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOP = 15
MOST_POINTS = 2_000
MOST_PHASES = 16
GIB = float(1 << 30)
CSS = """\
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 1rem; }
section { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1.5rem; align-items: start; }
section > h2, section > .all { grid-column: 1 / -1; margin: 1rem 0 0; }
svg { width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; }
@media (max-width: 50rem) { section { grid-template-columns: minmax(0, 1fr); } }
"""
Cells = list[list[str]]


def write_profile(found: Profile, output: Path) -> list[str]:
    """Write all files; returns their paths, or why one is missing."""
    said = [str(output / TRACE_NAME), *([str(output / SNAPSHOT_NAME)] if found.anatomy.kind == "cuda" else [])]
    write_json(output / "profile.json", as_json(found))
    pictures = ["", ""]
    try:
        pictures = [
            _picture(output / "anatomy.png", lambda axis: _draw_anatomy(axis, found)),
            _picture(output / "memory.png", lambda axis: _draw_memory(axis, found)),
        ]
        said += [str(output / "anatomy.png"), str(output / "memory.png")]
    except ImportError as error:
        said.append(t(f"no picture: {error.name or 'matplotlib'} is not installed"))
    write_atomic(output / "profile.html", _page(found, *pictures).encode())
    return [*said, str(output / "profile.json"), str(output / "profile.html")]


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


def group_cells(found: Profile) -> Cells:
    """The anatomy: groups, and phases below them."""
    whole = found.anatomy.seconds
    rows = [
        [t(name), f"{1e3 * seconds:,.2f}", f"{100 * seconds / whole:.1f}"]
        for name, seconds in found.anatomy.groups.items()
    ]
    return [["group", "ms an iteration", "%"], *rows, [t("together"), f"{1e3 * whole:,.2f}", "100.0"]]


def phase_cells(found: Profile) -> Cells:
    """The same time by phase, without what is idle."""
    rows = [
        [t(name), f"{1e3 * seconds:,.2f}", f"{100 * seconds / found.anatomy.seconds:.1f}"]
        for name, seconds in found.anatomy.phases.items()
    ]
    return [["phase (busy)", "ms an iteration", "%"], *rows]


def kernel_cells(found: Profile, top: int = TOP) -> Cells:
    """The kernels or operators that take most of the time."""
    rows = []
    for row in found.anatomy.rows[:top]:
        floor = row.floor_percent
        figures = [f"{row.calls:g}", f"{1e3 * row.seconds:,.3f}", f"{100 * row.seconds / found.anatomy.seconds:.1f}"]
        rows.append([_short(row.name), t(row.group), *figures, "" if floor is None else f"{floor:.0f}"])
    name = "kernel" if found.anatomy.kind == "cuda" else "operator"
    return [[name, "group", "calls", "ms an iteration", "%", "% of floor"], *rows]


def _short(name: str, length: int = 70) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= length else f"{name[: length - 1]}…"


def memory_cells(found: Profile) -> Cells:
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


def block_cells(found: Profile) -> Cells:
    """What each block allocates and keeps, in MiB."""
    rows = [[row.name, *(f"{value / MIB:,.2f}" for value in dataclasses.astuple(row)[1:])] for row in found.blocks]
    return [["block, MiB", "forward, peak", "kept", "backward, peak", "kept"], *rows]


def _page(found: Profile, anatomy: str, memory: str) -> str:
    ceilings = found.ceilings
    limits = (
        f"Floors: copy {ceilings.copy_bytes_per_second / 1e9:,.1f} GB/s, matmul "
        f"{ceilings.matmul_flops_per_second / 1e12:.3g} TFLOPS, measured here in a short burst."
    )
    body = [
        f"<h1>{escape(t('Profile'))}: {escape(found.config)}</h1><p>{escape(t(title_of(found)))}</p>",
        f"<section><h2>{escape(t('Where the time goes'))}</h2>{_table(group_cells(found))}<div>{anatomy}</div>"
        f"{_table(phase_cells(found))}</section>",
        f"<section><h2>{escape(t('What takes most of it'))}</h2><p class='all'>{escape(t(limits))}</p>"
        f"<div class='all'>{_table(kernel_cells(found))}</div></section>",
        f"<section><h2>{escape(t('Memory over an iteration'))}</h2>{_table(memory_cells(found))}"
        f"<div>{memory}</div></section>",
    ]
    if found.blocks:
        body.append(f"<section><h2>{escape(t('Memory of each block'))}</h2>{_table(block_cells(found))}</section>")
    body.append("<ul>" + "".join(f"<li>{escape(t(note))}</li>" for note in found.notes) + "</ul>")
    return html_page(f"{found.config}: profile", CSS, body)


def _table(cells: Cells) -> str:
    head = "".join(f"<th>{escape(t(name))}</th>" for name in cells[0])
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


# ---- pictures --------------------------------------------------------------------------------------------------------


def _picture(png: Path, draw: Callable[[Axes], None]) -> str:
    """Write the PNG; returns the same picture as SVG, for the page."""
    import matplotlib.style
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": png.stem}
    with matplotlib.style.context("default"), rc_context(style):
        figure = Figure(figsize=(7.6, 3.8), facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot())
        write_atomic(png, png_bytes(figure))
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    text = drawing.getvalue()
    return text[text.index("<svg") :]


def _draw_anatomy(axis: Axes, found: Profile) -> None:
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


def _draw_memory(axis: Axes, found: Profile) -> None:
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
