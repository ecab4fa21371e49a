"""The look of the explaining pictures: two themes, one font, and a canvas measured in points of a 720-point page.

A canvas has a title on top and coordinates as a page has them: (0, 0) is the upper left corner, y grows downwards. It
is drawn with matplotlib at twice its size, so text of 11 points stays readable in a column of 700 pixels.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from zero2all.common.errors import UserError

WIDTH = 720
MARGIN = 24
MAX_BYTES = 200_000
SCALE = 2
"""Pixels per point."""
POINTS_PER_INCH = 72
SMALL, NORMAL, LARGE = 11.0, 12.5, 15.0
"""Sizes of text."""
CHINESE_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei")
MONO = "DejaVu Sans Mono"  # comes with matplotlib


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, by what they are for."""

    name: str
    page: str
    panel: str
    """Behind a group of things."""
    ink: str
    faint: str
    """Text that explains; lines that only guide the eye."""
    line: str
    blue: str
    orange: str
    green: str
    purple: str
    red: str
    on_colour: str
    """Text on one of the five colours."""

    @property
    def channels(self) -> dict[str, str]:
        """The colour of each channel of the quickstart, the same in all pictures."""
        return {"en": self.blue, "zh": self.orange, "code": self.green}

    def blend(self, colour: str, share: float) -> str:
        """`share` of a colour over the page: a paler one."""
        top, below = _rgb(colour), _rgb(self.page)
        return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(top, below, strict=True))


THEMES = (
    Theme(
        name="light",
        page="#ffffff",
        panel="#f4f6f9",
        ink="#1f2937",
        faint="#5b6675",
        line="#cbd5e1",
        blue="#2563eb",
        orange="#d9600a",
        green="#0e8a5f",
        purple="#8b3fd9",
        red="#d32f3a",
        on_colour="#ffffff",
    ),
    Theme(
        name="dark",
        page="#0d1117",
        panel="#171d26",
        ink="#e6edf3",
        faint="#9aa7b6",
        line="#3b4657",
        blue="#6ea0ff",
        orange="#f5984a",
        green="#4ac99a",
        purple="#c28bff",
        red="#ff7a80",
        on_colour="#0d1117",
    ),
)


class Canvas:
    """A page with a title, on which a picture is drawn."""

    def __init__(self, theme: Theme, height: float, title: str, subtitle: str = "") -> None:
        self.theme, self.height = theme, height
        self.note = ""
        """Kept in the file, as its description."""
        self.figure = Figure(figsize=(WIDTH / POINTS_PER_INCH, height / POINTS_PER_INCH), facecolor=theme.page)
        FigureCanvasAgg(self.figure)
        self.page = self.figure.add_axes((0, 0, 1, 1))
        self.page.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.page.axis("off")
        self.text(MARGIN, 26, title, size=LARGE, weight="bold")
        self.text(MARGIN, 47, subtitle, colour=theme.faint)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = NORMAL,
        colour: str | None = None,
        weight: str = "normal",
        align: str = "left",
        mono: bool = False,
        turn: float = 0,
    ) -> float:
        """Words on one line whose middle is at y; returns where they end."""
        style: dict[str, Any] = {
            "fontsize": size,
            "fontweight": weight,
            "family": font_families(mono),
            "parse_math": False,
        }
        colour = colour or self.theme.ink
        drawn = self.page.text(x, y, words, ha=align, va="center_baseline", color=colour, rotation=turn, **style)
        return float(drawn.get_window_extent().x1 / self.figure.dpi * POINTS_PER_INCH)

    def lines(self, x: float, y: float, words: Sequence[str], *, step: float = 18, **style: Any) -> None:
        """Several lines, one below the other."""
        for number, line in enumerate(words):
            self.text(x, y + number * step, line, **style)

    def text_width(self, words: str, size: float = NORMAL, mono: bool = False, weight: str = "normal") -> float:
        """How wide `text` would be."""
        drawn = self.page.text(
            0, 0, words, fontsize=size, fontweight=weight, family=font_families(mono), parse_math=False
        )
        width = drawn.get_window_extent().width / self.figure.dpi * POINTS_PER_INCH
        drawn.remove()
        return float(width)

    def shortened(self, words: str, width: float, size: float = NORMAL, mono: bool = False) -> str:
        """As much of the words as fits into `width`, with … where something was left out."""
        if self.text_width(words, size, mono) <= width:
            return words
        fits = bisect_right(range(len(words)), width, key=lambda end: self.text_width(words[:end] + "…", size, mono))
        return words[: fits - 1] + "…"

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        label: str = "",
        *,
        edge: str | None = None,
        text_colour: str | None = None,
        round_by: float = 3,
        size: float = NORMAL,
        weight: str = "normal",
        mono: bool = False,
    ) -> None:
        """A filled rectangle with a label in its middle."""
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": edge or "none", "linewidth": 1.0}
        if round_by:
            corners = f"round,pad=0,rounding_size={round_by}"
            self.page.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=corners, **style))
        else:
            self.page.add_patch(Rectangle((x, y), width, height, **style))
        if label:
            on = text_colour or self.theme.on_colour
            middle = y + height / 2
            self.text(x + width / 2, middle, label, colour=on, align="center", size=size, mono=mono, weight=weight)

    def line(self, points: Sequence[tuple[float, float]], colour: str | None = None, width: float = 1.2) -> None:
        """A line through the points."""
        xs, ys = zip(*points, strict=True)
        self.page.plot(xs, ys, color=colour or self.theme.line, linewidth=width, solid_capstyle="round")

    def area(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A filled polygon."""
        self.page.add_patch(Polygon(points, closed=True, facecolor=colour, edgecolor="none"))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str | None = None) -> None:
        """A straight arrow."""
        style: dict[str, Any] = {
            "arrowstyle": "-|>",
            "mutation_scale": 10,
            "linewidth": 1.3,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        self.page.add_patch(FancyArrowPatch(start, end, color=colour or self.theme.faint, **style))

    def chart(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes for a curve, at this place of the page."""
        place = (x / WIDTH, 1 - (y + height) / self.height, width / WIDTH, height / self.height)
        axes = self.figure.add_axes(place, facecolor=self.theme.page)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(self.theme.line)
        axes.tick_params(colors=self.theme.faint, labelsize=SMALL, length=3, labelfontfamily=font_families())
        axes.grid(color=self.theme.line, linewidth=0.5, alpha=0.6)
        axes.set_axisbelow(True)
        return axes

    def label(self, axes: Axes, x: float, y: float, words: str, *, colour: str | None = None, **style: Any) -> None:
        """Words beside a curve, at a place of its axes."""
        style = {"fontsize": SMALL, "family": font_families(), "va": "center", **style}
        axes.text(x, y, words, color=colour or self.theme.faint, parse_math=False, **style)

    def save(self, path: Path) -> None:
        """Write the picture as a PNG of at most MAX_BYTES, with its note; few colours are enough for it."""
        raw, packed = io.BytesIO(), io.BytesIO()
        dpi = SCALE * POINTS_PER_INCH
        self.figure.savefig(raw, format="png", dpi=dpi, facecolor=self.theme.page, metadata={"Software": None})
        # Maximum coverage keeps colours that are rare, such as those of small text.
        way, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
        picture = Image.open(raw).convert("RGB").quantize(64, method=way, dither=dither)
        note = PngInfo()
        if self.note:
            note.add_itxt("Description", self.note)
        picture.save(packed, "PNG", optimize=True, pnginfo=note)
        if packed.tell() > MAX_BYTES:
            raise ValueError(f"{path.name} has {packed.tell():,} bytes; at most {MAX_BYTES:,} are allowed")
        path.write_bytes(packed.getvalue())


@cache
def font_families(mono: bool = False) -> list[str]:
    """The fonts of all text; those after the first have the characters that it lacks."""
    installed = set(fontManager.get_font_names())
    chinese = [name for name in CHINESE_FONTS if name in installed]
    if not chinese:
        raise UserError(
            f"No font with Chinese characters is installed. Install one of {', '.join(CHINESE_FONTS)} "
            f"(on Debian and Ubuntu: apt install fonts-noto-cjk)."
        )
    return [MONO, *chinese[:1]] if mono else [*chinese[:1], "DejaVu Sans"]


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
