"""PNG files in the style of `z2a plot`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.files import write_atomic
from zero2all.common.language import translate as t
from zero2all.track.plot import INK, STYLE, png_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_png(
    png: Path, size: tuple[float, float], draw: Callable[[Figure], None], title: str = "", grid: str = "both"
) -> str:
    """Write what `draw` puts on a figure; returns the path, or why there is no picture."""
    try:
        import matplotlib.style
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return t(f"no picture: {error.name or 'matplotlib'} is not installed")
    style: Any = {**STYLE, "axes.grid.axis": grid}
    with matplotlib.style.context("default"), rc_context(style):
        figure = Figure(figsize=size, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=INK)
        draw(figure)
        write_atomic(png, png_bytes(figure))
    return str(png)
