"""The page of `z2a perf explain`: one HTML file with its tables and pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from zero2all.common.files import write_atomic
from zero2all.common.language import language, translate
from zero2all.perf.explain import Explanation
from zero2all.perf.run_pictures import curves, waterfall

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1e293b;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.6rem 0 1.4rem}th,td{padding:.3rem .8rem .3rem 0;text-align:left}
th{border-bottom:1px solid #cbd5e1;font-weight:600}td{border-bottom:1px solid #eef2f6}img{max-width:100%}
"""


def write_page(explanation: Explanation, tables: Sequence[tuple[str, Sequence[Sequence[str]]]], path: Path) -> None:
    """Write the page; `tables` are those of the terminal: a title, and rows of which the first is the heading."""
    record = explanation.record
    title = f"{record.name}: {translate('what limits this run')}"
    parts = [f"<h1>{escape(title)}</h1><p>{escape(translate(explanation.limit))}</p>"]
    inside = (base64.b64encode(picture).decode() for picture in _pictures(explanation))
    parts += [f'<p><img alt="" src="data:image/png;base64,{picture}"></p>' for picture in inside]
    parts += [f"<h2>{escape(translate(heading))}</h2>{_table(rows)}" for heading, rows in tables]
    head = f'<!doctype html><html lang="{language()}"><meta charset="utf-8"><title>{escape(title)}</title>'
    write_atomic(path, f"{head}<style>{STYLE}</style>{''.join(parts)}</html>".encode())


def _table(rows: Sequence[Sequence[str]]) -> str:
    heading, *body = rows
    first = "".join(f"<th>{escape(translate(cell))}</th>" for cell in heading)
    others = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{first}</tr>{others}</table>"


def _pictures(explanation: Explanation) -> list[bytes]:
    record, levels = explanation.record, explanation.waterfall
    found = []
    if levels and record.peak is not None:
        found.append(waterfall(levels, "peak x wall time", "model FLOPs (MFU of the whole run)", "MFU waterfall"))
    elif levels:
        found.append(waterfall(levels, "wall time", "forward and backward passes", "where the wall time went"))
    panels = []
    for name, title, unit in (
        ("tokens_per_second", "tokens/s", 1),
        ("loss", "loss", 1),
        ("memory/peak", "peak memory, GiB", 2**30),
    ):
        points = record.reader.series(name)
        if len(points) > 1:
            panels.append((title, points.step, points.value / unit))
    marks = [float(event.step) for event in (*record.events("segment")[1:], *record.events("rollback"))]
    return [*found, curves(panels, marks)] if panels else found
