"""Writes the files of an ablation: ablation.json, ablation.md, ablation.png."""

from __future__ import annotations

from pathlib import Path

from zero2all.common.files import write_atomic, write_json
from zero2all.perf.ablate import Ablation
from zero2all.perf.chart import draw_ablation
from zero2all.perf.summary import as_json, as_markdown, batch_tables


def write_report(ablation: Ablation, folder: Path, title: str) -> list[str]:
    """Write the three files; returns their paths, or why one is missing."""
    tables = batch_tables(ablation)
    write_json(folder / "ablation.json", as_json(ablation, tables))
    write_atomic(folder / "ablation.md", as_markdown(ablation, tables).encode())
    said = [str(folder / "ablation.json"), str(folder / "ablation.md")]
    if not any(row.is_measured for table in tables for row in table.rows):
        return said
    try:
        draw_ablation(tables, title, folder / "ablation.png")
    except ImportError as error:
        return [*said, f"no picture: {error.name or 'matplotlib'} is not installed"]
    return [*said, str(folder / "ablation.png")]
