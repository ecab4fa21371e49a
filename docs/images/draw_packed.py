"""`packing` and `order`: which tokens stand in a row, and which row comes when."""

from __future__ import annotations

from functools import cache

import numpy as np
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from example import Example

from zero2all.packed.bestfit import best_fit_rows, cut_documents
from zero2all.packed.shard_format import PackedSplit
from zero2all.tokenizer.stage import readable

ROWS = 6
SHOWN_STEPS = 4
BORDER_TOKENS = 7
"""Shown on each side of a border."""


# ---- packing ---------------------------------------------------------------------------------------------------------


def packing(example: Example, theme: Theme) -> Canvas:
    """The first rows of the English text: as windows over the stream, and by best fit."""
    split = next(one for one in example.data.splits if one.name == "en")
    length = example.config.data.seq_len
    canvas = Canvas(
        theme,
        430,
        f"Documents become rows of {length} tokens, and one more to predict",
        "Each colour is one of the first documents of the English text, grey are later ones. Numbers count tokens.",
    )
    left, width = MARGIN, (WIDTH - 2 * MARGIN - 28) / 2
    right = left + width + 28
    borders = _borders(split)
    canvas.text(left, 80, "concat: windows over the stream", weight="bold")
    canvas.text(left, 99, "no padding; documents are cut at the end of a row", size=SMALL, colour=theme.faint)
    for number in range(ROWS):
        _draw_row(canvas, _window(borders, number * length, length + 1), length, left, 116 + number * 30, width)
    canvas.text(right, 80, "best_fit: whole documents", weight="bold")
    rows, padding = _best_fit(borders, length)
    said = f"no document is cut that fits in a row; {padding:.1%} padding in all"
    canvas.text(right, 99, said, size=SMALL, colour=theme.faint)
    for number, row in enumerate(rows):
        _draw_row(canvas, row, length, right, 116 + number * 30, width)
    _draw_border(canvas, example, split, int(borders[1]), 326)
    return canvas


def _borders(split: PackedSplit) -> np.ndarray:
    """Where the documents of the first shard begin, and its end."""
    return np.append(split.docs[0].astype(np.int64), split.shards.lengths[0])


def _window(borders: np.ndarray, start: int, length: int) -> list[tuple[int, int]]:
    """The documents in a window of the stream: the number of each, and its tokens in the window."""
    found = []
    for number in range(np.searchsorted(borders, start, "right") - 1, len(borders) - 1):
        first, end = int(borders[number]), int(borders[number + 1])
        if first >= start + length:
            break
        found.append((number, min(end, start + length) - max(first, start)))
    return found


@cache
def _best_fit_of(borders: bytes, length: int) -> tuple[list[list[tuple[int, int]]], float]:
    chunks = cut_documents(np.frombuffer(borders, np.int64), length)
    row_of = best_fit_rows(chunks.lengths, length + 1)
    documents = np.searchsorted(np.frombuffer(borders, np.int64), chunks.starts, "right") - 1
    wanted = list(dict.fromkeys(row_of.tolist()))[:ROWS]  # the rows of the first documents
    rows = [[(int(documents[at]), int(chunks.lengths[at])) for at in np.flatnonzero(row_of == row)] for row in wanted]
    padding = 1 - chunks.lengths.sum() / ((row_of.max() + 1) * (length + 1))
    return rows, float(padding)


def _best_fit(borders: np.ndarray, length: int) -> tuple[list[list[tuple[int, int]]], float]:
    """The rows that the first documents are placed in, and the share of padding in all rows."""
    return _best_fit_of(borders.tobytes(), length)


def _draw_row(canvas: Canvas, documents: list[tuple[int, int]], length: int, x: float, y: float, width: float) -> None:
    """A row to scale; what no document fills is padding."""
    theme, scale = canvas.theme, width / (length + 1)
    colours = (theme.blue, theme.orange, theme.green, theme.purple, theme.red)
    canvas.box(x, y, width, 22, theme.panel, edge=theme.line, round_by=0)
    for number, tokens in documents:
        size = tokens * scale
        label = str(tokens) if size > 24 else ""
        colour = theme.blend(colours[number % len(colours)] if number < ROWS else theme.faint, 0.45)
        canvas.box(x, y, size - 1, 22, colour, label, text_colour=theme.ink, size=SMALL, round_by=0)
        x += size


def _draw_border(canvas: Canvas, example: Example, split: PackedSplit, border: int, y: float) -> None:
    """The tokens around the end of the first document."""
    theme, tokenizer = canvas.theme, example.tokenizer
    tokens = np.empty(2 * BORDER_TOKENS, np.int64)
    split.read_into(tokens, border - BORDER_TOKENS)
    names = {number: name for name, number in tokenizer.control.items()}
    canvas.text(MARGIN, y, "Two control tokens separate documents. Below each token: its id, as it is stored.")
    x = float(MARGIN)
    for place, number in enumerate(tokens.tolist()):
        is_control = number in names
        shown = names.get(number) or readable(tokenizer.text_pieces[number]).replace(" ", "␣")
        width = max(canvas.text_width(shown, SMALL), canvas.text_width(str(number), SMALL)) + 8
        if x + width > WIDTH - MARGIN:
            break
        colour = theme.blend(theme.blue if place < BORDER_TOKENS else theme.orange, 0.45)
        colour = theme.red if is_control else colour
        ink = theme.on_colour if is_control else theme.ink
        canvas.box(x, y + 20, width, 26, colour, shown, text_colour=ink, size=SMALL)
        canvas.text(x + width / 2, y + 60, str(number), size=SMALL, colour=theme.faint, align="center")
        x += width + 3


# ---- order -----------------------------------------------------------------------------------------------------------


def order(example: Example, theme: Theme) -> Canvas:
    """The rows of the first steps, and all rows of the run by source."""
    data = example.data
    segment, names = data.segments[0], [split.name for split in data.splits]
    batch = example.config.train.tokens_per_step // segment.seq_len
    positions = np.arange(example.config.train.steps * batch, dtype=np.int64)
    sources, rows = segment.order.lookup(positions)
    canvas = Canvas(
        theme,
        540,
        "Which row comes when is a function of seed, mixture and position",
        "No shuffled list is stored, so a run can continue at any position on any number of processes.",
    )
    _draw_steps(canvas, names, sources, rows, batch, 84)
    shares = data.shares["main"]
    y = 250.0
    canvas.text(
        MARGIN, y, f"The whole run: {len(positions):,} rows in {example.config.train.steps} steps", weight="bold"
    )
    canvas.text(
        MARGIN,
        y + 19,
        "Each dot is a row that was read. No row of a source comes twice before all came once.",
        size=SMALL,
        colour=theme.faint,
    )
    width = (WIDTH - 2 * MARGIN - 3 * 48) / 3
    by_share = sorted(range(len(names)), key=lambda number: -shares[number])
    for column, number in enumerate(by_share):
        name, count = names[number], segment.order.sources[number].samples
        here = sources == number
        x = MARGIN + 44 + column * (width + 50)
        axes = canvas.chart(x, y + 62, width, 180)
        axes.plot(positions[here], rows[here], ".", color=theme.channels[name], markersize=1.6, rasterized=True)
        axes.set(xlim=(0, len(positions)), ylim=(0, count), xticks=[0, 4000, 8000])
        axes.set_xlabel("position in the run", fontsize=SMALL, color=theme.faint, family=font_families())
        read = f"{name}: {shares[number]:.0%} of the rows"
        canvas.text(x, y + 46, read, weight="bold", colour=theme.channels[name], size=SMALL + 0.5)
        if column == 0:
            axes.set_ylabel(
                "number of the row in its source", fontsize=SMALL, color=theme.faint, family=font_families()
            )
    return canvas


def _draw_steps(canvas: Canvas, names: list[str], sources: np.ndarray, rows: np.ndarray, batch: int, y: float) -> None:
    """A line for each of the first steps: its rows, coloured by source, with their numbers."""
    theme = canvas.theme
    cell = (WIDTH - 2 * MARGIN - 46) / batch
    for step in range(SHOWN_STEPS):
        at = y + step * 32
        canvas.text(MARGIN, at + 13, f"step {step + 1}", size=SMALL, colour=theme.faint)
        for place in range(batch):
            position = step * batch + place
            colour = theme.channels[names[sources[position]]]
            x = MARGIN + 46 + place * cell
            canvas.box(x, at, cell - 2, 26, colour, str(rows[position]), size=10)
    x = float(MARGIN + 46)
    for name in ("en", "zh", "code"):
        canvas.box(x, y + SHOWN_STEPS * 32 + 5, 12, 12, theme.channels[name])
        x = canvas.text(x + 17, y + SHOWN_STEPS * 32 + 11, name, size=SMALL, colour=theme.faint) + 16
    canvas.text(
        x, y + SHOWN_STEPS * 32 + 11, "The number is that of the row in its source.", size=SMALL, colour=theme.faint
    )
