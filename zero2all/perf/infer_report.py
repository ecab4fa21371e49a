"""The files of `z2a perf infer`: inference.json and inference.png.

The picture has tokens/s on the left and the share of the bandwidth on the right, both over the size of the batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.files import write_json
from zero2all.common.progress import human_count
from zero2all.perf.infer import Inference, InferRow, as_json
from zero2all.perf.pictures import write_png
from zero2all.track.plot import COLORS, FAINT_INK, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write_results(found: Inference, folder: Path) -> Path:
    """Write the JSON file."""
    write_json(folder / "inference.json", as_json(found))
    return folder / "inference.json"


def write_picture(found: Inference, folder: Path) -> str:
    """Write the picture; returns its path, or why there is none."""
    rows = [row for row in found.rows if row.problem is None]
    if not rows:
        return "no picture: nothing was measured"

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        speed, share = figure.subplots(1, 2)
        _draw(speed, rows, "tokens/s, all sequences", lambda row: row.tokens_per_second, "{:,.0f}")
        _draw(share, rows, "share of the memory bandwidth, %", lambda row: row.bandwidth_percent, "{:.0f} %")
        speed.set_yscale("log")
        speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human_count(value)))
        speed.yaxis.set_minor_formatter(NullFormatter())
        share.set_ylim(0, max(100.0, 1.15 * max(row.bandwidth_percent for row in rows)))

    title = f"{found.model} on {found.device}: prompts of {found.prompt_tokens}, {found.new_tokens} new tokens"
    return write_png(folder / "inference.png", (11.0, 4.2), draw, title)


def _draw(axis: Axes, rows: list[InferRow], title: str, value: Any, form: str) -> None:
    kinds = list(dict.fromkeys(row.weights for row in rows))
    for color, kind in zip(COLORS, kinds, strict=False):
        own = [row for row in rows if row.weights == kind]
        batches, values = [row.batch for row in own], [value(row) for row in own]
        axis.plot(batches, values, "o-", color=color, linewidth=2, label=kind)
        for batch, height in zip(batches, values, strict=True):
            axis.annotate(
                form.format(height), (batch, height), xytext=(0, 7), textcoords="offset points", ha="center",
                fontsize=8, color=INK,
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    batches = sorted({row.batch for row in rows})
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.margins(x=0.08, y=0.15)
    axis.set_title(title, color=INK)
    axis.set_xlabel("batch (sequences)", color=FAINT_INK)
    if len(kinds) > 1:
        axis.legend(loc="best")
