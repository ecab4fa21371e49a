"""Pictures of runs: PNG, SVG or PDF.

One run: loss, loss per channel, held-out bits per byte per channel, learning rate, gradient norm, tokens per second,
each only when its metrics are there. Several runs: one panel per metric, one color per run. Thin lines are the values
as logged, thick lines are smoothed; below 50 points nothing is. Long curves keep the minimum and maximum of a bin;
values that are not finite are marked in red at the bottom, resumes are dashed, unreadable lines are counted below.

matplotlib is used through its objects, not through pyplot, so neither the caller's backend nor its settings change.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import write_atomic
from zero2all.common.language import translate
from zero2all.common.progress import counted, human_count, terminal_safe
from zero2all.common.schema import nearest_hint
from zero2all.track.bins import MIN_POINTS, Floats, smooth, width_for
from zero2all.track.listing import distinct_names
from zero2all.track.reader import Axis, RunReader, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PNG_BYTES = 200_000
DPI_CHOICES = (140, 110, 80, 50, 30)  # tried in turn until the picture fits into MAX_PNG_BYTES
MAX_LINE_POINTS = 3_000
MAX_LEGEND_ENTRIES = 10
MAX_PANELS = 8
FORMATS = (".png", ".svg", ".pdf")
BPB = "eval/valid/bpb/"
AXIS_LABELS = {"step": "step", "tokens": "tokens", "time": "hours since the first row", "flops": "model FLOPs"}

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


@dataclass(frozen=True)
class PlotOptions:
    """How a picture is drawn."""

    title: str | None = None  # none takes the name of the run, or how many runs there are
    axis: Axis = "step"
    smoothing: float | Literal["auto"] | None = "auto"  # the width in rows; `auto`: long curves, as much as they need
    metrics: tuple[str, ...] = ()  # one panel for each of these; empty: the usual ones
    width_inches: float = 11.5
    height_inches: float | None = None  # none makes room for the panels
    dpi: int | None = None  # dots per inch of a PNG; None: the most that stay below 200 KB
    log_y: bool = False


def plot_runs(folders: Sequence[Path], target: Path, options: PlotOptions | None = None) -> None:
    """Draw one run, or several over each other, into `target`: a .png, .svg or .pdf."""
    options = options or PlotOptions()
    if target.suffix.lower() not in FORMATS:
        raise UsageError(f"{target} must end with one of {', '.join(FORMATS)}: the ending selects the format.")
    runs = [_open(folder) for folder in folders]
    panels = _chosen_panels(runs, options) if options.metrics or len(runs) > 1 else _usual_panels(runs[0])
    if not panels:
        raise BadInputError(
            f"The run {folders[0]} has none of the metrics this picture shows (loss, loss/<channel>, "
            f"{BPB}<channel>, lr, grad_norm, tokens_per_second). It has: {', '.join(runs[0].metrics()[:10])}. "
            f"Choose some of them with --metric."
        )
    curves = [line for panel in panels for line in panel.lines.values()]
    if options.axis == "flops" and not any(np.isfinite(curve.along("flops")).any() for curve in curves):
        raise BadInputError(f"The run {folders[0]} has no `flops`, so they cannot be the x axis. Choose another axis.")
    write_atomic(target, _render(runs, panels, options, target.suffix.lower()))


def thin_out(x: NDArray[Any], values: NDArray[np.float64], max_points: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """At most `max_points` points that look the same: the lowest and the highest of every bin, in order."""
    if len(x) <= max_points:
        return x, values
    keep = []
    for places in np.array_split(np.arange(len(x)), max_points // 2):
        if np.isfinite(values[places]).any():
            low, high = np.nanargmin(values[places]), np.nanargmax(values[places])
            keep += [places[min(low, high)], places[max(low, high)]]
    index = np.unique(np.asarray(keep, dtype=np.int64))
    return x[index], values[index]


@dataclass(frozen=True)
class _Curve:
    """One metric of one run."""

    run: RunReader
    series: Series

    def along(self, axis: Axis) -> NDArray[np.float64]:
        """The x of every point."""
        x = self.run.along(self.series, axis)
        return (x - x.min()) / 3600 if axis == "time" else x


@dataclass(frozen=True)
class _Panel:
    title: str
    lines: dict[str, _Curve]  # by label; the only line of a panel may have none
    is_smoothed: bool = True
    tick: Callable[[float, int], str] | None = None
    starts_at_zero: bool = False


def _open(folder: Path) -> RunReader:
    if not folder.is_dir():
        raise BadInputError(f"There is no run in {folder}. Give a run's folder, for example work/runs/NAME.")
    run = RunReader(folder)
    if not run.metrics():
        problem = (
            f"The run {folder} has no metrics to draw: {folder / 'metrics'} has no rows. Metrics appear with the first "
            f"training step. Check that this is the folder of a run that has started."
        )
        if run.skipped_lines:
            problem = f"{problem} Unreadable lines: {run.skipped_lines}."
        raise BadInputError(problem)
    return run


def _usual_panels(run: RunReader) -> list[_Panel]:
    """One run: all channels of a kind in one panel."""
    panels = [
        _panel_of("loss", _one(run, "loss")),
        _Panel("Training loss per channel", _channels(run, "loss/")),
        _Panel("Held-out bits per byte", _channels(run, BPB), is_smoothed=False),
        *(_panel_of(metric, _one(run, metric)) for metric in ("lr", "grad_norm", "tokens_per_second")),
    ]
    return [panel for panel in panels if panel.lines]


def _chosen_panels(runs: list[RunReader], options: PlotOptions) -> list[_Panel]:
    """Several runs, or metrics by name: one panel per metric, one line per run."""
    known = sorted({metric for run in runs for metric in run.metrics()})
    unknown = [metric for metric in options.metrics if metric not in known]
    if unknown:
        raise UsageError(f"No metric `{unknown[0]}` in {runs[0].name}. {nearest_hint(unknown[0], known)}")
    usual = [metric for metric in ("loss", "grad_norm", "lr", "tokens_per_second") if metric in known]
    by_channel = [metric for prefix in ("loss/", BPB) for metric in known if metric.startswith(prefix)]
    metrics = list(options.metrics) or [*usual[:1], *by_channel, *usual[1:]][:MAX_PANELS]
    labels = _run_labels(runs)
    if len(runs) == 1:
        labels = [""]
    panels = []
    for metric in metrics:
        lines = {label: _Curve(run, run.series(metric)) for label, run in zip(labels, runs, strict=True)}
        panels.append(_panel_of(metric, {label: line for label, line in lines.items() if len(line.series)}))
    return [panel for panel in panels if panel.lines]


def _run_labels(runs: list[RunReader]) -> list[str]:
    """The name of each run; where two have the same, so much of their paths that they can be told apart."""
    labels = distinct_names([run.folder for run in runs])
    is_alone = [labels.count(label) == 1 for label in labels]
    return [label if is_alone[n] else f"{label} ({n + 1})" for n, label in enumerate(labels)]


def _panel_of(metric: str, lines: dict[str, _Curve]) -> _Panel:
    if metric == "loss":
        return _Panel("Training loss (nats per token)", lines)
    if metric == "lr":
        return _Panel("Learning rate", lines, is_smoothed=False, tick=_scientific, starts_at_zero=True)
    if metric == "grad_norm":
        return _Panel("Gradient norm", lines, starts_at_zero=True)
    if metric == "tokens_per_second":
        return _Panel("Tokens per second", lines, tick=_count, starts_at_zero=True)
    if metric.startswith("loss/"):
        return _Panel(f"Training loss: {metric.removeprefix('loss/')}", lines)
    if metric.startswith(BPB):
        return _Panel(f"Held-out bits per byte: {metric.removeprefix(BPB)}", lines, is_smoothed=False)
    return _Panel(metric, lines, is_smoothed=not metric.startswith("eval/"))


def _one(run: RunReader, key: str) -> dict[str, _Curve]:
    series = run.series(key)
    return {"": _Curve(run, series)} if len(series) else {}


def _channels(run: RunReader, prefix: str) -> dict[str, _Curve]:
    return {key.removeprefix(prefix): _Curve(run, run.series(key)) for key in run.metrics() if key.startswith(prefix)}


def _scientific(value: float, _: int) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _count(value: float, _: int) -> str:
    return human_count(value).replace(".0", "")


X_TICKS: dict[Axis, Callable[[float, int], str]] = {
    "step": lambda value, _: f"{value:,.0f}",
    "tokens": _count,
    "time": lambda value, _: f"{value:g}",
    "flops": _scientific,
}


def _render(runs: list[RunReader], panels: list[_Panel], options: PlotOptions, suffix: str) -> bytes:
    import matplotlib.style
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {**STYLE, "font.family": ["DejaVu Sans", *cjk_fonts()], "svg.hashsalt": "zero2all", "pdf.fonttype": 42}
    # "default" puts aside what the person has in matplotlibrc; both contexts give everything back at the end.
    with matplotlib.style.context("default"), rc_context(style):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.02, wspace=0.02)
        columns = 1 if len(panels) == 1 else 2
        grid_rows = math.ceil(len(panels) / columns)
        height = options.height_inches or 1.0 + 3.0 * grid_rows
        figure = Figure(figsize=(options.width_inches, height), facecolor="white", layout=layout)
        FigureCanvasAgg(figure)
        _draw_heading(figure, runs, options.title)
        grid = figure.add_gridspec(grid_rows, columns)
        cells = [(index // columns, index % columns) for index in range(grid_rows * columns)]
        axes: list[Axes] = []
        if len(panels) % columns:  # an odd number: the first panel takes the whole width
            axes.append(figure.add_subplot(grid[0, :]))
            cells = cells[columns:]
        axes += [figure.add_subplot(grid[cell]) for cell in cells[: len(panels) - len(axes)]]
        colors = _colors(panels)
        limits = _x_limits(panels, options.axis)
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, colors, options)
            axis.set_xlim(*limits)
        return _saved(figure, suffix, options.dpi)


def _x_limits(panels: list[_Panel], axis: Axis) -> tuple[float, float]:
    edges = []
    for panel in panels:
        for curve in panel.lines.values():
            x = curve.along(axis)
            x = x[np.isfinite(x)]
            edges += [float(x.min()), float(x.max())] if len(x) else []
    first, last = min(edges, default=0.0), max(edges, default=1.0)
    pad = 0.015 * (last - first) or 0.5
    pad = max(1.0, pad) if axis == "step" else pad
    return first - pad, last + pad


def _draw_heading(figure: Figure, runs: list[RunReader], title: str | None) -> None:
    facts = _facts(runs[0]) if len(runs) == 1 else [", ".join(_shortened(_printable(run.name), 20) for run in runs[:4])]
    if len(runs) > 4:
        facts.append(f"+ {len(runs) - 4}")
    title = title or (runs[0].name if len(runs) == 1 else _t(counted(len(runs), "run")))
    figure.suptitle(_shortened(_printable(title), 48), x=0.012, ha="left", fontsize=16, fontweight="bold", color=INK)
    figure.text(0.988, 0.988, "   ·   ".join(facts), ha="right", va="top", fontsize=10, color=FAINT_INK)
    left_out = {run.name: run.problems for run in runs if run.problems}
    if left_out:
        total = sum(sum(problems.values()) for problems in left_out.values())
        reasons = "; ".join(problem for problems in left_out.values() for problem in problems)
        note = _t(f"left out {total:,}: {reasons}")
        figure.supxlabel(_shortened(_printable(note), 140), x=0.988, ha="right", fontsize=8.5, color=ALARM)


def _facts(run: RunReader) -> list[str]:
    last = max((run.series(metric) for metric in run.metrics()), key=lambda series: series.step[-1])
    facts = [f"step {int(last.step[-1]):,}"]
    if last.tokens[-1] > 0:
        facts.append(f"{human_count(float(last.tokens[-1]))} tokens")
    loss = run.series("loss")
    if len(loss):
        facts.append(f"last loss {loss.value[-1]:.4g}")
    resumed = run.resumed_at_steps
    if len(resumed) == 1:
        facts.append(f"resumed at step {resumed[0]:,}")
    elif resumed:
        facts.append(f"resumed {len(resumed)} times")
    return [_t(fact) for fact in facts]


def _draw_panel(axis: Axes, panel: _Panel, colors: dict[str, str], options: PlotOptions) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    not_finite = 0
    used: float | None = None
    for label, curve in panel.lines.items():
        x = curve.along(options.axis)
        width = _smoothing_width(curve.series.value, options.smoothing) if panel.is_smoothed else None
        used = width or used
        _draw_line(axis, x, curve.series.value, colors[label], width)
        bad = x[~np.isfinite(curve.series.value)]
        not_finite += len(bad)
        if len(bad):
            axis.plot(
                bad, np.full(len(bad), 0.03), "x", color=ALARM, markersize=5, markeredgewidth=1.4,
                transform=axis.get_xaxis_transform(), clip_on=False, zorder=5,
            )  # fmt: skip
    if options.axis == "step":
        runs = {id(curve.run): curve.run for curve in panel.lines.values()}
        for step in [step for run in runs.values() for step in run.resumed_at_steps]:
            axis.axvline(step, color="#94a3b8", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    axis.set_title(_shortened(_printable(_t(panel.title)), 60), color=INK)
    notes = [_t(f"thick: smoothed (exponential mean over {used:.0f} rows)")] if used else []
    notes += [_t(f"{not_finite} not finite (×)")] if not_finite else []
    axis.set_title(", ".join(notes), loc="right", fontsize=8.5, fontweight="normal", color=FAINT_INK)
    axis.set_xlabel(_t(AXIS_LABELS[options.axis]))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=options.axis == "step", steps=[1, 2, 2.5, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(X_TICKS[options.axis]))
    if options.log_y:
        axis.set_yscale("log", nonpositive="mask")
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        if panel.tick:
            axis.yaxis.set_major_formatter(FuncFormatter(panel.tick))
        if panel.starts_at_zero and axis.get_ylim()[0] > 0:
            axis.set_ylim(bottom=0)
    if list(panel.lines) != [""]:
        _draw_legend(axis, panel, colors)


def _smoothing_width(values: NDArray[np.float64], wanted: float | Literal["auto"] | None) -> float | None:
    if wanted == "auto":
        rows = len(values)
        wanted = min(rows / (4 * MIN_POINTS), 1_000.0) if rows >= 3 * MIN_POINTS else None
    return width_for(values, wanted)


def _draw_line(axis: Axes, x: Floats, logged: Floats, color: str, width: float | None) -> None:
    """The values as logged, thin where the smoothed curve is drawn over them."""
    values = np.where(np.isfinite(logged) & np.isfinite(x), logged, np.nan)
    marker: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    if width is None:
        line = thin_out(x, values, MAX_LINE_POINTS)
        axis.plot(*line, color=color, linewidth=1.9, zorder=3, **(marker if len(values) <= 60 else {}))
        return
    axis.plot(*thin_out(x, values, MAX_LINE_POINTS), color=color, linewidth=0.8, alpha=0.4, zorder=2)
    axis.plot(*thin_out(x, smooth(values, width), MAX_LINE_POINTS), color=color, linewidth=2.0, zorder=3)


def _draw_legend(axis: Axes, panel: _Panel, colors: dict[str, str]) -> None:
    """Name and last value of each line, the highest first, as the curves lie in the panel."""
    from matplotlib.lines import Line2D

    last = {label: float(curve.series.value[-1]) for label, curve in panel.lines.items()}
    ranked = sorted(last, key=lambda label: -last[label] if math.isfinite(last[label]) else -math.inf)
    named = ranked[:MAX_LEGEND_ENTRIES]
    handles: list[Any] = [Line2D([], [], color=colors[label], linewidth=2.5) for label in named]
    labels = [f"{_shortened(_printable(label), 24)}  {last[label]:.3g}" for label in named]
    if len(ranked) > MAX_LEGEND_ENTRIES:
        handles.append(Line2D([], [], linewidth=0))
        labels.append(f"+ {len(ranked) - MAX_LEGEND_ENTRIES}")
    axis.legend(handles, labels, loc="upper right", ncols=1 + (len(labels) > 5), handlelength=1.4, labelcolor=INK)


def _colors(panels: list[_Panel]) -> dict[str, str]:
    """The first color for what has no label; a channel, or a run, has the same one in every panel."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.lines if label))
    return {"": COLORS[0]} | {label: COLORS[1 + index % (len(COLORS) - 1)] for index, label in enumerate(labels)}


def _saved(figure: Figure, suffix: str, dpi: int | None) -> bytes:
    if suffix == ".png":
        return png_bytes(figure, DPI_CHOICES if dpi is None else (dpi,))
    drawing = io.BytesIO()
    # No date and no version: the same run gives the same file.
    metadata = {"Date": None, "Creator": None} if suffix == ".svg" else {"CreationDate": None, "Producer": None}
    figure.savefig(drawing, format=suffix[1:], metadata=metadata)
    return drawing.getvalue()


def png_bytes(figure: Figure, dpi_choices: Sequence[int] = DPI_CHOICES) -> bytes:
    """The figure as PNG bytes, at the first resolution that stays within MAX_PNG_BYTES, or the last."""
    from PIL import Image

    data = b""
    for dpi in dpi_choices:
        raw, picture = io.BytesIO(), io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi, metadata={"Software": None})
        # A chart has few colors: a palette of 256 looks the same and takes a third of the bytes.
        palette = Image.open(raw).convert("RGB").quantize(256, dither=Image.Dither.NONE)
        palette.save(picture, format="png")
        data = picture.getvalue()
        if len(data) <= MAX_PNG_BYTES:
            break
    return data


def cjk_fonts() -> list[str]:
    """The fonts for Chinese that this machine has."""
    from matplotlib.font_manager import fontManager

    # A font with one weight is fine; matplotlib would warn of it in English, once per weight, on the terminal.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    installed = set(fontManager.get_font_names())
    return [name for name in CJK_FONTS if name in installed]


def _t(text: str) -> str:
    """The text in the person's language, if this machine has a font for it."""
    return translate(text) if cjk_fonts() else text


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _printable(text: str) -> str:
    """Names from a run may hold any character; without a font for them they are escaped instead of boxes."""
    text = terminal_safe(text, "?")
    return text if cjk_fonts() else text.encode("latin-1", "backslashreplace").decode("latin-1")
