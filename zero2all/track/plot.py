"""One picture of a run: a PNG for a paper, a chat or a README.

Panels, each only when its metrics are there: loss, loss per channel, held-out bits per byte per channel, learning
rate, gradient norm, tokens per second. Thin lines are the values as logged, thick lines are smoothed.

The picture does not lie about what it cannot show: long curves are thinned to the minimum and maximum of each
bucket, so a one-step spike stays visible; steps whose value was not finite are marked in red at the bottom; resumes
are dashed lines; lines of the metrics files that could not be read are counted in the last line.

matplotlib is used through its objects, not through pyplot, so neither the caller's backend nor its settings change.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError
from zero2all.common.files import write_atomic
from zero2all.common.progress import human_count
from zero2all.track.reader import RunData, Series, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PNG_BYTES = 200_000
DPI_CHOICES = (140, 110, 80, 50, 30)
"""Tried in turn until the picture fits into MAX_PNG_BYTES."""
MAX_LINE_POINTS = 3_000
MAX_LEGEND_ENTRIES = 10

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#db2777", "#0891b2", "#ca8a04", "#4f46e5", "#65a30d", "#64748b")
INK, FAINT_INK, GRID, ALARM = "#1e293b", "#64748b", "#e2e8f0", "#dc2626"
CJK_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei")
STYLE: dict[str, Any] = {
    "text.parse_math": False,  # a run may be called "a$b"
    "text.color": INK,
    "font.size": 9.5,
    "axes.edgecolor": "#cbd5e1",
    "axes.labelcolor": FAINT_INK,
    "axes.labelsize": 9,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.01,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT_INK,
    "ytick.color": FAINT_INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


def plot_run(run_folder: Path, png: Path, title: str | None = None) -> None:
    """Draw the run in `run_folder` into `png`, at most 200 KB; `title` None takes the name of the run."""
    run = read_run(run_folder)
    if not run.series:
        left_out = f" ({run.skipped_lines} lines could not be read)" if run.skipped_lines else ""
        raise BadInputError(
            f"The run {run_folder} has no metrics to draw: there are no rows in {run_folder / 'metrics'}{left_out}. "
            f"Metrics appear with the first training step; check that this is the folder of a run that has started."
        )
    panels = _panels(run)
    if not panels:
        raise BadInputError(
            f"The run {run_folder} has none of the metrics this picture shows (loss, loss/<channel>, "
            f"eval/valid/bpb/<channel>, lr, grad_norm, tokens_per_second). It has: {', '.join(list(run.series)[:10])}."
        )
    write_atomic(png, _render(run, panels, title or run.name))


def smooth(values: NDArray[np.float64], half_width: int) -> NDArray[np.float64]:
    """Two running means over `half_width` neighbours on either side; values that are not finite weigh nothing.

    The window grows from nothing at the start, where a loss falls so fast that a full window would begin far below
    it; at the end and at gaps it takes what is there.
    """
    return _running_mean(_running_mean(values, half_width), half_width)


def thin_out(
    steps: NDArray[np.int64], values: NDArray[np.float64], max_points: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most `max_points` points that look the same: the lowest and the highest of every bucket, in order."""
    if len(steps) <= max_points:
        return steps, values
    keep = []
    for bucket in np.array_split(np.arange(len(steps)), max_points // 2):
        if np.isfinite(values[bucket]).any():
            low, high = np.nanargmin(values[bucket]), np.nanargmax(values[bucket])
            keep += [bucket[min(low, high)], bucket[max(low, high)]]
    index = np.unique(np.asarray(keep, dtype=np.int64))
    return steps[index], values[index]


# ---- what to draw ----


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: dict[str, Series]
    is_smoothed: bool = True
    tick: Callable[[float, int], str] | None = None
    starts_at_zero: bool = False


def _panels(run: RunData) -> list[_Panel]:
    choices = [
        _Panel("Training loss (nats per token)", _one(run, "loss")),
        _Panel("Training loss per channel", _channels(run, "loss/")),
        _Panel("Held-out bits per byte", _channels(run, "eval/valid/bpb/"), is_smoothed=False),
        _Panel("Learning rate", _one(run, "lr"), is_smoothed=False, tick=_scientific, starts_at_zero=True),
        _Panel("Gradient norm", _one(run, "grad_norm"), starts_at_zero=True),
        _Panel("Tokens per second", _one(run, "tokens_per_second"), tick=_count, starts_at_zero=True),
    ]
    return [panel for panel in choices if panel.lines]


def _one(run: RunData, key: str) -> dict[str, Series]:
    return {"": run.series[key]} if key in run.series else {}


def _channels(run: RunData, prefix: str) -> dict[str, Series]:
    return {key.removeprefix(prefix): series for key, series in run.series.items() if key.startswith(prefix)}


def _scientific(value: float, _: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _count(value: float, _: int) -> str:
    return human_count(value).replace(".0", "")


# ---- how to draw it ----


def _render(run: RunData, panels: list[_Panel], title: str) -> bytes:
    import matplotlib.style
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {**STYLE, "font.sans-serif": _fonts()}
    # "default" puts aside what the person has in matplotlibrc; both contexts give everything back at the end.
    with matplotlib.style.context("default"), rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.02, wspace=0.02)
        columns = 1 if len(panels) == 1 else 2
        grid_rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(11.5, 1.0 + 3.0 * grid_rows), facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        _draw_heading(figure, run, title)
        grid = figure.add_gridspec(grid_rows, columns)
        cells = [(index // columns, index % columns) for index in range(grid_rows * columns)]
        axes: list[Axes] = []
        if len(panels) % columns:  # an odd number: the first panel takes the whole width
            axes.append(figure.add_subplot(grid[0, :]))
            cells = cells[columns:]
        axes += [figure.add_subplot(grid[cell]) for cell in cells[: len(panels) - len(axes)]]
        colors = _colors(panels)
        last_step = max(int(series.step[-1]) for panel in panels for series in panel.lines.values())
        first_step = min(int(series.step[0]) for panel in panels for series in panel.lines.values())
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, run, colors)
            pad = max(1.0, 0.015 * (last_step - first_step))
            axis.set_xlim(first_step - pad, last_step + pad)
        return png_bytes(figure)


def _draw_heading(figure: Figure, run: RunData, title: str) -> None:
    last = max(run.series.values(), key=lambda series: series.step[-1])
    facts = [f"step {int(last.step[-1]):,}"]
    if last.tokens[-1] > 0:
        facts.append(f"{human_count(float(last.tokens[-1]))} tokens")
    if "loss" in run.series:
        facts.append(f"last loss {run.series['loss'].value[-1]:.4g}")
    if run.resumed_at_steps:
        times = len(run.resumed_at_steps)
        facts.append(f"resumed at step {run.resumed_at_steps[0]:,}" if times == 1 else f"resumed {times} times")
    figure.suptitle(_shortened(_printable(title), 48), x=0.012, ha="left", fontsize=16, fontweight="bold", color=INK)
    figure.text(0.988, 0.988, "   ·   ".join(facts), ha="right", va="top", fontsize=10, color=FAINT_INK)
    if run.skipped_lines or run.skipped_values:
        left_out = f"left out: {run.skipped_lines} unreadable lines, {run.skipped_values} values that are no numbers"
        figure.supxlabel(left_out, x=0.988, ha="right", fontsize=8.5, color=ALARM)


def _draw_panel(axis: Axes, panel: _Panel, run: RunData, colors: dict[str, str]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    not_finite = 0
    half_width = 0
    for label, series in panel.lines.items():
        half_width = max(half_width, _draw_line(axis, series, colors[label], panel.is_smoothed))
        bad_steps = series.step[~np.isfinite(series.value)]
        not_finite += len(bad_steps)
        if len(bad_steps):
            axis.plot(
                bad_steps, np.full(len(bad_steps), 0.03), "x", color=ALARM, markersize=5, markeredgewidth=1.4,
                transform=axis.get_xaxis_transform(), clip_on=False, zorder=5,
            )  # fmt: skip
    for step in run.resumed_at_steps:
        axis.axvline(step, color="#94a3b8", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axis.set_title(panel.title, color=INK)
    notes = [f"smoothed over ±{half_width} rows"] if half_width else []
    notes += [f"{not_finite} not finite (×)"] if not_finite else []
    axis.set_title(", ".join(notes), loc="right", fontsize=8.5, fontweight="normal", color=FAINT_INK)
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    if panel.tick:
        axis.yaxis.set_major_formatter(FuncFormatter(panel.tick))
    if panel.starts_at_zero and axis.get_ylim()[0] > 0:
        axis.set_ylim(bottom=0)
    if list(panel.lines) != [""]:
        _draw_legend(axis, panel, colors)


def _draw_line(axis: Axes, series: Series, color: str, is_smoothed: bool) -> int:
    """Raw values thin and, where they are many and noisy, the smoothed curve thick; returns the smoothing used."""
    values = np.where(np.isfinite(series.value), series.value, np.nan)
    half_width = min(len(values) // 100, 2_000) if is_smoothed else 0
    marker: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    if half_width == 0:
        line = thin_out(series.step, values, MAX_LINE_POINTS)
        axis.plot(*line, color=color, linewidth=1.9, zorder=3, **(marker if len(values) <= 60 else {}))
        return 0
    axis.plot(*thin_out(series.step, values, MAX_LINE_POINTS), color=color, linewidth=0.8, alpha=0.4, zorder=2)
    axis.plot(*thin_out(series.step, smooth(values, half_width), MAX_LINE_POINTS), color=color, linewidth=2.0, zorder=3)
    return 2 * half_width


def _draw_legend(axis: Axes, panel: _Panel, colors: dict[str, str]) -> None:
    """Name and last value of each channel, the highest first, as the curves lie in the panel."""
    from matplotlib.lines import Line2D

    last = {label: float(series.value[-1]) for label, series in panel.lines.items()}
    ranked = sorted(last, key=lambda label: -last[label] if math.isfinite(last[label]) else -math.inf)
    named = ranked[:MAX_LEGEND_ENTRIES]
    handles: list[Any] = [Line2D([], [], color=colors[label], linewidth=2.5) for label in named]
    labels = [f"{_shortened(_printable(label), 24)}  {last[label]:.3g}" for label in named]
    if len(ranked) > MAX_LEGEND_ENTRIES:
        handles.append(Line2D([], [], linewidth=0))
        labels.append(f"and {len(ranked) - MAX_LEGEND_ENTRIES} more")
    axis.legend(handles, labels, loc="upper right", ncols=1 + (len(labels) > 5), handlelength=1.4, labelcolor=INK)


def _colors(panels: list[_Panel]) -> dict[str, str]:
    """The first color for what has no channel; a channel has the same one in every panel."""
    labels = sorted({label for panel in panels for label in panel.lines if label})
    return {"": COLORS[0]} | {label: COLORS[1 + index % (len(COLORS) - 1)] for index, label in enumerate(labels)}


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG bytes, at the highest resolution that stays within MAX_PNG_BYTES."""
    from PIL import Image

    data = b""
    for dpi in DPI_CHOICES:
        raw, picture = io.BytesIO(), io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi, metadata={"Software": None})
        # A chart has few colors: a palette of 256 looks the same and takes a third of the bytes.
        palette = Image.open(raw).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        palette.save(picture, format="png")
        data = picture.getvalue()
        if len(data) <= MAX_PNG_BYTES:
            break
    return data


def _fonts() -> list[str]:
    """matplotlib's own font, and after it whatever this machine has for Chinese."""
    return ["DejaVu Sans", *_cjk_fonts()]


def _cjk_fonts() -> list[str]:
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return [name for name in CJK_FONTS if name in installed]


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _printable(text: str) -> str:
    """Names from a run may hold any character; without a font for them they are escaped instead of boxes."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if _cjk_fonts() else text.encode("latin-1", "backslashreplace").decode("latin-1")


def _running_mean(values: NDArray[np.float64], half_width: int) -> NDArray[np.float64]:
    """Mean over `half_width` neighbours on either side; fewer, but as many on both sides, near the start."""
    finite = np.isfinite(values)
    index = np.arange(len(values))
    reach = np.minimum(index, half_width)
    first, end = index - reach, np.minimum(index + reach + 1, len(values))
    totals = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    count = counts[end] - counts[first]
    return np.where(count > 0, (totals[end] - totals[first]) / np.maximum(count, 1), np.nan)
