"""The files of an ablation: ablation.json, ablation.md and ablation.png.

The picture has one bar per row and one panel per batch; for the reference project's model also its A800 figures.

MFU is the scale where the device's peak is known, because it can be compared between devices; else tokens/s.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.common.files import write_atomic, write_json
from zero2all.perf.ablate import Ablation
from zero2all.perf.pictures import write_png
from zero2all.perf.seed_table import DEVICE
from zero2all.perf.summary import BatchTable, Row, as_json, as_markdown, batch_tables
from zero2all.track.plot import COLORS, FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPS = ("whole", "leave one out", "step by step", "other choices", "vocabulary", "compile", "tensor")


def write_report(ablation: Ablation, folder: Path, title: str) -> list[str]:
    """Write the three files; returns their paths, or why one is missing."""
    tables = batch_tables(ablation)
    write_json(folder / "ablation.json", as_json(ablation, tables))
    write_atomic(folder / "ablation.md", as_markdown(ablation, tables).encode())
    said = [str(folder / "ablation.json"), str(folder / "ablation.md")]
    shown = [table for table in tables if any(row.is_measured for row in table.rows)]
    if not shown:
        return said

    def draw(figure: Figure) -> None:
        for number, table in enumerate(shown):
            _draw_batch(figure.add_subplot(1, len(shown), number + 1), table)

    size = (7.2 * len(shown), 1.3 + 0.27 * max(len(table.rows) for table in shown))
    return [*said, write_png(folder / "ablation.png", size, draw, title, grid="x")]


def _draw_batch(axis: Axes, table: BatchTable) -> None:
    by_mfu = all(row.result["mfu"] for row in table.rows if row.is_measured)
    places = range(len(table.rows), 0, -1)
    longest = max(_length(row, by_mfu) for row in table.rows)
    for place, row in zip(places, table.rows, strict=True):
        length = _length(row, by_mfu)
        axis.barh(place, length, height=0.66, color=COLORS[GROUPS.index(row.variant.group) % len(COLORS)], zorder=2)
        seed = max((each.mfu_percent for each in row.seed if each), default=None) if by_mfu else None
        behind = max(length, seed or 0.0) + 0.022 * longest
        axis.text(behind, place, _label(row), va="center", fontsize=7.5, color=INK, zorder=4)
        if seed is not None:
            axis.plot([seed], [place], "D", color="white", markeredgecolor=INK, markersize=5, zorder=5)
    axis.set_yticks(list(places), [row.title for row in table.rows], fontsize=8.5, color=INK)
    axis.set_xlim(0, 1.42 * longest)
    axis.set_ylim(0.3, len(table.rows) + 0.7)
    axis.set_title(f"{table.batch}", color=INK)
    label = "MFU, %, as llm-zero2all counts" if by_mfu else "tokens/s"
    if by_mfu and table.has_seed:
        label = f"MFU, %, as llm-zero2all counts; ◇ its best table on one {DEVICE}"
    axis.set_xlabel(label, color=FAINT_INK)


def _length(row: Row, by_mfu: bool) -> float:
    if not row.is_measured:
        return 0.0
    return 100.0 * row.result["mfu"]["seed"] if by_mfu else float(row.result["tokens_per_second"])


def _label(row: Row) -> str:
    if not row.is_measured:
        return str(row.line["status"])
    return f"{row.result['tokens_per_second']:,.0f} tok/s, {row.result['peak_gib']:.0f} GiB"
