"""From the lines of an ablation to its tables, for the terminal, and to its files: ablation.json, ablation.md and
ablation.png.

The picture has one bar per row and one panel per batch; for the reference project's model also its A800 figures. MFU is
the scale where the device's peak is known, because it can be compared between devices; else tokens/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.files import write_atomic, write_json
from zero2all.common.language import translate as t
from zero2all.estimate.flops import CONVENTIONS
from zero2all.estimate.run.batch import SEED_BATCH, BatchShape
from zero2all.estimate.run.pictures import write_png
from zero2all.measure.ablate import PACKAGES, Ablation, Line, anchors, row_key
from zero2all.measure.seed_table import DEVICE, SeedRow, seed_rows
from zero2all.measure.variants import ANCHOR, VARIANTS, Variant, title_of
from zero2all.track.plot import COLORS, FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPS = ("whole", "leave one out", "step by step", "other choices", "vocabulary", "compile", "tensor")

SEED_COLUMNS = tuple(f"{DEVICE} {name}" for name in ("s", "x fused", "MFU %", "GB"))
DRIFT_WORTH_SAYING = 0.01  # if anchors differ by more, a second column is scaled to the speed of the first sitting


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    variant: Variant
    title: str
    line: Line
    pace: float | None  # anchor of the first sitting / anchor of this row's sitting; None where one of them is missing
    seed: list[SeedRow | None]  # published by the reference project, see `seed_table.seed_rows`

    @property
    def result(self) -> Any:
        """The figures, by name."""
        return self.line["result"]

    @property
    def is_measured(self) -> bool:
        """False for rows that only have a reason."""
        return bool(self.line["status"] == "measured")

    @property
    def scaled_seconds(self) -> float | None:
        """Seconds per iteration at the pace of the first sitting."""
        seconds = float(self.result["seconds_per_iteration"]) if self.is_measured else None
        return None if seconds is None or self.pace is None else seconds * self.pace


@dataclass(frozen=True)
class BatchTable:
    """All rows of one batch."""

    batch: BatchShape
    rows: list[Row]
    anchors: dict[int, float]  # sitting -> seconds per iteration of its anchor

    @property
    def has_seed(self) -> bool:
        """Whether the reference project measured the same model."""
        return any(row.seed for row in self.rows)

    @property
    def drifted(self) -> bool:
        """Whether the sittings were not equally fast."""
        return bool(self.anchors) and max(self.anchors.values()) > (1 + DRIFT_WORTH_SAYING) * min(self.anchors.values())

    @property
    def anchor_seconds(self) -> float | None:
        """Of the first sitting: what the others are compared with."""
        return next(iter(self.anchors.values()), None)


def batch_tables(ablation: Ablation) -> list[BatchTable]:
    """The results, batch by batch, in the order of the variants."""
    tables = [_batch_table(ablation, batch) for batch in ablation.batches]
    return [table for table in tables if table.rows]


def _batch_table(ablation: Ablation, batch: BatchShape) -> BatchTable:
    found = anchors(str(batch), ablation.environment, ablation.lines)
    reference = next(iter(found.values()), None)
    rows = []
    for variant in VARIANTS:
        key = row_key(ablation.config, variant, batch, ablation.environment)
        lines = [line for line in ablation.lines if line["key"] == key]
        if not lines:
            continue
        line = lines[0] if variant.name == ANCHOR else lines[-1]  # of the anchor the first measurement counts
        own = found.get(line["sitting"])
        pace = reference / own if own and reference else None
        seed = seed_rows(variant.name, ablation.config.model)
        rows.append(Row(variant, title_of(variant, ablation.config), line, pace, seed))
    return BatchTable(batch, rows, found)


# ---- cells -----------------------------------------------------------------------------------------------------------


def heading(table: BatchTable) -> list[str]:
    """The names of the columns."""
    return ["row", *_own_columns(table), *(SEED_COLUMNS if table.has_seed else ())]


def _own_columns(table: BatchTable) -> list[str]:
    scaled = ["scaled s"] if table.drifted else []
    return [
        *("s/iter", *scaled, "x fused", "tokens/s", f"MFU % {'/'.join(CONVENTIONS)}"),
        *("peak GiB", "state GiB", "first s"),
    ]


def cells(table: BatchTable) -> list[list[str]]:
    """The rows as text."""
    return [
        [t(row.title), *_own_cells(row, table), *(_seed_cells(row) if table.has_seed else [])] for row in table.rows
    ]


def _own_cells(row: Row, table: BatchTable) -> list[str]:
    if not row.is_measured:
        return [t(str(row.line["status"])), *[""] * (len(_own_columns(table)) - 1)]
    result, scaled = row.result, row.scaled_seconds
    share = None if scaled is None or table.anchor_seconds is None else scaled / table.anchor_seconds
    return [
        f"{result['seconds_per_iteration']:.3f}",
        *([_figure(scaled, ".3f")] if table.drifted else []),
        _figure(share, ".3f"),
        f"{result['tokens_per_second']:,.0f}",
        " / ".join(f"{100 * result['mfu'][name]:.1f}" for name in CONVENTIONS if name in result["mfu"]),
        f"{result['peak_gib']:.1f}",
        f"{result['state_gib']:.1f}",
        f"{result['first_step_seconds']:.1f}",
    ]


def _seed_cells(row: Row) -> list[str]:
    columns = (
        [row and format(row.seconds, ".2f") for row in row.seed],
        [row and format(row.seconds / row.fused_seconds, ".3f") for row in row.seed],
        [row and format(row.mfu_percent, ".2f") for row in row.seed],
        [row and format(row.memory_gb, ".2f") for row in row.seed],
    )
    return [" / ".join(figure or "-" for figure in column) for column in columns]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# ---- notes, JSON, Markdown -------------------------------------------------------------------------------------------


def notes(ablation: Ablation, tables: list[BatchTable]) -> list[str]:
    """The notes below the tables."""
    here = ablation.environment
    versions = ", ".join(f"{name} {here[name]}" for name in ("driver", *PACKAGES) if here.get(name))
    found = [f"{device_of(ablation)}; {versions}; random tokens, {ablation.config.train.precision}"]
    for table in tables:
        if len(table.anchors) > 1:
            each = ", ".join(f"{number}: {seconds:.3f} s" for number, seconds in table.anchors.items())
            found.append(f"{table.batch}: seconds of the anchor row (all fused), by session: {each}")
        found += [
            f"{table.batch} {row.variant.name}: {row.line['status']}: {_in_short(row.result.get('reason', ''))}"
            for row in table.rows
            if not row.is_measured
        ]
    rows = [row for table in tables for row in table.rows]
    found += sorted({row.result["mfu_note"] for row in rows if row.is_measured and row.result["mfu_note"]})
    if len({row.line["code"] for row in rows}) > 1:
        found.append("the rows were measured with more than one version of the code")
    if any(table.has_seed for table in tables):
        found.append(
            f"{DEVICE}: the tables of Gstdioh/llm-zero2all, at {SEED_BATCH}: torch 1.12.1 / 2.0.1, or 2.0.1 compiled. "
            f"MFU in its convention (seed); `x fused` is relative to its all-fused row, whose AdamW was not "
            f"fused in 1.12.1"
        )
    return found


def _in_short(reason: str) -> str:
    """Its first two sentences: torch's messages about memory are too long for a table."""
    return ". ".join(reason.split(". ")[:2])


def device_of(ablation: Ablation) -> str:
    """The GPU, from the driver or from a row measured on it; else CPU."""
    measured = [line["result"].get("device", "cpu") for line in ablation.lines if line["status"] == "measured"]
    name = ablation.environment["gpu"] or (measured[-1] if measured else "cpu")
    return "CPU" if name == "cpu" else str(name)


def as_json(ablation: Ablation, tables: list[BatchTable]) -> dict[str, Any]:
    """Everything in the tables, and the results they come from."""
    return {
        "environment": ablation.environment,
        "notes": notes(ablation, tables),
        "pending": [f"{batch} {variant.name}" for batch, variant in ablation.pending],
        "batches": {
            str(table.batch): {
                "anchors": table.anchors,
                "rows": {
                    row.variant.name: {
                        "title": row.title,
                        "status": row.line["status"],
                        "sitting": row.line["sitting"],
                        "when": row.line["when"],
                        "code": row.line["code"],
                        "scaled_seconds": row.scaled_seconds,
                        **row.result,
                    }
                    for row in table.rows
                },
            }
            for table in tables
        },
    }


def as_markdown(ablation: Ablation, tables: list[BatchTable]) -> str:
    """The tables for a README."""
    parts = []
    for table in tables:
        names = heading(table)
        parts += [f"**{table.batch}** ({table.batch.tokens:,} tokens per iteration)", ""]
        parts += [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
        parts += [f"| {' | '.join(row)} |" for row in cells(table)]
        parts.append("")
    return "\n".join([*parts, *(f"- {note}" for note in notes(ablation, tables))]) + "\n"


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
