"""Pictures of runs over months (`z2a perf simulate`) and of where a run's time went (`z2a perf explain`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.files import write_atomic
from zero2all.limits.simulate import DAY, Outcome
from zero2all.track.plot import COLORS, FAINT_INK, INK, STYLE, png_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOSS, GAIN = COLORS[1], COLORS[0]


def picture(draw: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
    """A PNG of what `draw` puts on a figure; raises ImportError where matplotlib is not installed."""
    import matplotlib.style
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: Any = STYLE
    with matplotlib.style.context("default"), rc_context(style):
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        return png_bytes(figure)


def write_simulation(outcome: Outcome, path: Path) -> None:
    """Progress over time with its band, and where the time went."""

    def draw(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
        days = outcome.times / DAY
        work = outcome.plan.work_seconds / DAY
        for axis, lines in ((left, 100 * outcome.progress), (middle, days - work * outcome.progress)):
            low, centre, high = lines
            axis.fill_between(days, low, high, color=GAIN, alpha=0.3, linewidth=0, label="10 to 90 % of repetitions")
            axis.plot(days, centre, color=GAIN, linewidth=1.6, label="median")
            axis.set(xlabel="days")
        left.plot([0, work], [0, 100], color=FAINT_INK, linestyle="--", label="undisturbed")
        left.legend(loc="upper left")
        left.set_title("progress that is kept, %")
        middle.set_title("days behind the undisturbed run")
        middle.set(xlim=(0, work))
        shares = {name: 100 * share for name, share in outcome.shares().items() if name != "useful" and share > 0}
        _bars(right, shares, f"lost wall time, % (goodput {outcome.goodput.mean():.1%})")

    write_atomic(path, picture(draw, (13.0, 4.0)))


def _bars(axis: Any, shares: dict[str, float], title: str) -> None:
    places = range(len(shares), 0, -1)
    longest = max(shares.values(), default=1.0)
    axis.barh(list(places), list(shares.values()), height=0.6, color=LOSS, zorder=2)
    for place, share in zip(places, shares.values(), strict=True):
        axis.text(share + 0.02 * longest, place, f"{share:.2f}", va="center", fontsize=8.5, color=INK)
    axis.set_yticks(list(places), list(shares), fontsize=8.5, color=INK)
    axis.set_title(title)
    axis.set(xlim=(0, 1.25 * longest))


def waterfall(levels: Sequence[tuple[str, float]], total: str, left_over: str, title: str) -> bytes:
    """From 100 % down: one bar for each loss in percent, then what is left over."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        names = [total, *(name for name, _ in levels), left_over]
        places = list(range(len(names), 0, -1))
        height = 100.0
        axis.barh(places[0], height, height=0.62, color=FAINT_INK, zorder=2)
        axis.text(height + 1, places[0], "100", va="center", fontsize=8.5, color=INK)
        for place, (_, lost) in zip(places[1:], levels, strict=False):
            height -= lost
            axis.barh(place, lost, left=height, height=0.62, color=LOSS, zorder=2)
            axis.text(height + lost + 1, place, f"-{lost:.2f}", va="center", fontsize=8.5, color=INK)
        axis.barh(places[-1], height, height=0.62, color=GAIN, zorder=2)
        axis.text(max(height, 0.0) + 1, places[-1], f"{height:.2f}", va="center", fontsize=8.5, color=INK)
        axis.set_yticks(places, names, fontsize=8.5, color=INK)
        axis.set_title(title)
        axis.set(xlim=(0, 112), xlabel="%")

    return picture(draw, (9.0, 1.2 + 0.3 * (len(levels) + 2)))


def curves(panels: Sequence[tuple[str, Any, Any]], marks: Sequence[float]) -> bytes:
    """One small panel per (title, steps, values); `marks` are steps with a restart or rollback."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, steps, values) in zip(axes, panels, strict=True):
            axis.plot(steps, values, color=GAIN, linewidth=0.9)
            for mark in marks:
                axis.axvline(mark, color=LOSS, linestyle="--", linewidth=0.8)
            axis.set_title(title)
            axis.set(xlabel="step")

    return picture(draw, (4.2 * max(1, len(panels)), 3.0))
