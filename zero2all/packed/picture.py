"""The figures of `z2a data stats` as a picture: tokens, lengths of documents, what packing loses, epochs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from zero2all.common.files import write_atomic
from zero2all.common.progress import human_count

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#4f46e5", "#65a30d", "#64748b")
STYLE: Any = {
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
}
MOST_BARS = 30


def draw_stats(stats: dict[str, Any], png: Path) -> None:
    """Draw what `packed_stats` returned into `png`."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = sorted((row for row in stats["sources"] if row["split"] == "train"), key=lambda row: -row["tokens"])
    shown = train[:MOST_BARS]
    channels = sorted(stats["channels"])
    color_of = {channel: COLORS[number % len(COLORS)] for number, channel in enumerate(channels)}
    with matplotlib.rc_context(STYLE):
        panels = 4 if "budget" in stats else 3
        figure = Figure(figsize=(11, 1.4 + 0.28 * len(shown) + 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2).flatten()
        _bars(
            axes[0], f"tokens per source{_more(train)}", shown, [row["tokens"] for row in shown], color_of, human_count
        )
        _lengths(axes[1], train, channels, color_of)
        lost = [max(kind["lost_share"] for kind in row["packing"].values()) for row in shown]
        _bars(axes[2], "lost to packing (largest of the packings)", shown, lost, color_of, lambda share: f"{share:.2%}")
        if panels == 4:
            budget = stats["budget"]
            read = [row for row in shown if row["source"] in budget["sources"]]
            epochs = [budget["sources"][row["source"]]["epochs"] for row in read]
            title = f"epochs in {human_count(budget['tokens'])} tokens"
            _bars(axes[3], title, read, epochs, color_of, lambda value: f"{value:.2f}")
        else:
            axes[3].set_axis_off()
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=110)
    write_atomic(png, data.getvalue())


def _more(rows: list[dict[str, Any]]) -> str:
    return f" (the {MOST_BARS} largest of {len(rows)})" if len(rows) > MOST_BARS else ""


def _bars(axes: Any, title: str, rows: list[Any], values: list[float], color_of: dict[str, str], in_words: Any) -> None:
    places = range(len(rows))[::-1]
    axes.barh(places, values, color=[color_of[row["channel"]] for row in rows])
    axes.set_yticks(places, [row["source"] for row in rows])
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            in_words(value), (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_title(title)
    axes.margins(x=0.18)
    axes.xaxis.set_visible(False)


def _lengths(axes: Any, rows: list[dict[str, Any]], channels: list[str], color_of: dict[str, str]) -> None:
    for channel in channels:
        counts: dict[int, int] = {}
        for row in rows:
            if row["channel"] == channel:
                for start, count in row["length_histogram"].items():
                    counts[int(start)] = counts.get(int(start), 0) + count
        total = sum(counts.values()) or 1
        starts = sorted(counts)
        edges = [*starts, 2 * starts[-1]] if starts else []
        shares = [counts[start] / total for start in starts]
        if edges:
            axes.stairs(shares, edges, color=color_of[channel], label=channel, fill=False, linewidth=1.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: human_count(value))  # the usual one speaks mathematics
    axes.set_xlabel("tokens of a document")
    axes.set_title("documents by length (share per channel)")
    if channels:
        axes.legend()
