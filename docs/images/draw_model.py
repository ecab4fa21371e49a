"""`mask` and `rope`: what a token may look at, and how it knows where it stands."""

from __future__ import annotations

import math

import numpy as np
import torch
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from example import Example
from torch import Tensor

from zero2all.model.rope import rope_tables
from zero2all.ops.attention import document_mask
from zero2all.tokenizer.stage import readable

TOKENS_BESIDE_BORDER = 7
CELL = 19.0
SHOWN_PAIRS = (0, 2, 4, 8)
SHOWN_POSITIONS = 6
PLACES = ((4, 1), (104, 101), (204, 201))
"""Positions of a query and a key, always three apart."""


# ---- mask ------------------------------------------------------------------------------------------------------------


def mask(example: Example, theme: Theme) -> Canvas:
    """Real tokens around the border of two documents, under both masks."""
    tokens, documents = _tokens_at_border(example)
    canvas = Canvas(
        theme,
        440,
        "A token sees itself and what came before it",
        "A row is a token, coloured cells are the tokens it may look at. Blue and orange are two documents.",
    )
    masks = {
        "causal": torch.zeros_like(documents),  # all tokens count as one document
        "causal, with document mask": documents,
    }
    for column, (title, ids) in enumerate(masks.items()):
        x = MARGIN + 60 + column * 346
        _draw_mask(canvas, title, document_mask(ids)[0, 0], tokens, documents[0], x, 152)
    return canvas


def _tokens_at_border(example: Example) -> tuple[list[str], Tensor]:
    """The last tokens of one document and the first of the next, and which document each belongs to, (1, T)."""
    split = next(one for one in example.data.splits if one.name == "en")
    border = int(split.docs[0][1])
    ids = np.empty(2 * TOKENS_BESIDE_BORDER, np.int64)
    split.read_into(ids, border - TOKENS_BESIDE_BORDER)
    names = {number: name for name, number in example.tokenizer.control.items()}
    pieces = example.tokenizer.text_pieces
    short = {"<|begin_of_text|>": "<begin>", "<|end_of_text|>": "<end>"}
    shown = [
        short.get(names[one], names[one]) if one in names else readable(pieces[one]).strip() for one in ids.tolist()
    ]
    documents = torch.arange(len(ids)) >= TOKENS_BESIDE_BORDER
    return shown, documents.long().unsqueeze(0)


def _draw_mask(
    canvas: Canvas, title: str, visible: Tensor, tokens: list[str], documents: Tensor, x: float, y: float
) -> None:
    """The matrix with its tokens on both sides."""
    theme = canvas.theme
    colours = [theme.blue if number == 0 else theme.orange for number in documents.tolist()]
    canvas.text(x, 88, title, weight="bold")
    for place, (token, colour) in enumerate(zip(tokens, colours, strict=True)):
        middle = (place + 0.5) * CELL
        canvas.text(x - 6, y + middle, token, size=SMALL, colour=colour, align="right")
        canvas.page.text(
            x + middle, y - 5, token, fontsize=SMALL, color=colour, rotation=60, ha="left", va="bottom",
            rotation_mode="anchor", family=font_families(), parse_math=False,
        )  # fmt: skip
    for query in range(len(tokens)):
        for key in range(len(tokens)):
            is_seen = bool(visible[query, key])
            colour = theme.blend(colours[key], 0.8) if is_seen else theme.panel
            canvas.box(x + key * CELL, y + query * CELL, CELL - 1.5, CELL - 1.5, colour, round_by=0)


# ---- rope ------------------------------------------------------------------------------------------------------------


def rope(example: Example, theme: Theme) -> Canvas:
    """Pairs of a head as clocks, and the scores of two tokens that are three positions apart."""
    config = example.config.model
    cos, sin = rope_tables(config, config.max_seq_len)
    canvas = Canvas(
        theme,
        516,
        "RoPE turns each pair of values by an angle that grows with the position",
        f"A head of {config.head_size} values has {config.head_size // 2} pairs. The first turns fastest.",
    )
    width = (WIDTH - 2 * MARGIN) / len(SHOWN_PAIRS)
    for column, pair in enumerate(SHOWN_PAIRS):
        _draw_clock(canvas, cos[:, pair], sin[:, pair], pair, MARGIN + (column + 0.5) * width, 150)
    y = 284.0
    canvas.text(MARGIN, y, "Only the distance counts", weight="bold")
    canvas.lines(
        MARGIN,
        y + 22,
        [
            "Query and key are both turned. The angle between",
            "them depends only on their distance.",
        ],
        colour=theme.faint,
        size=SMALL + 0.5,
    )
    pair = SHOWN_PAIRS[1]
    for column, (query, key) in enumerate(PLACES):
        _draw_distance(canvas, cos[:, pair], sin[:, pair], query, key, MARGIN + 56 + column * 112, y + 122)
    _draw_scores(canvas, cos, sin, 430, y + 18)
    return canvas


def _draw_clock(canvas: Canvas, cos: Tensor, sin: Tensor, pair: int, x: float, y: float) -> None:
    """The direction of one pair at the first positions."""
    theme, radius = canvas.theme, 56.0
    step = float(torch.atan2(sin[1], cos[1]))
    _draw_circle(canvas, x, y, radius)
    for position in reversed(range(SHOWN_POSITIONS)):
        share = 0.35 + 0.65 * (1 - position / SHOWN_POSITIONS)
        end = (x + radius * float(cos[position]), y - radius * float(sin[position]))
        canvas.arrow((x, y), end, theme.blend(theme.blue, share))
        far = 1.18
        label = (x + far * radius * float(cos[position]), y - far * radius * float(sin[position]))
        if step > 0.15 or (step > 0.05 and position in (0, SHOWN_POSITIONS - 1)):
            canvas.text(*label, str(position), size=SMALL, colour=theme.faint, align="center")
    if step <= 0.05:
        canvas.text(x + radius + 6, y, f"0–{SHOWN_POSITIONS - 1}", size=SMALL, colour=theme.faint)
    canvas.text(x, y + radius + 26, f"pair {pair}", align="center", weight="bold")
    said = f"once round in {2 * math.pi / step:,.0f} positions"
    canvas.text(x, y + radius + 44, said, align="center", size=SMALL, colour=theme.faint)


def _draw_distance(canvas: Canvas, cos: Tensor, sin: Tensor, query: int, key: int, x: float, y: float) -> None:
    """A query and a key at two positions, and the angle between them."""
    theme, radius = canvas.theme, 42.0
    _draw_circle(canvas, x, y, radius)
    start = math.atan2(float(sin[key]), float(cos[key]))
    angle = math.remainder(math.atan2(float(sin[query]), float(cos[query])) - start, 2 * math.pi)
    arc = [start + angle * share / 20 for share in range(21)]
    points = [(x + radius * 0.55 * math.cos(one), y - radius * 0.55 * math.sin(one)) for one in arc]
    canvas.area([(x, y), *points], theme.blend(theme.green, 0.45))
    for position, colour in ((query, theme.blue), (key, theme.orange)):
        tip = (x + radius * float(cos[position]), y - radius * float(sin[position]))
        canvas.arrow((x, y), tip, colour)
    width = canvas.text_width(f"q at {query}", SMALL) + canvas.text_width(f"k at {key}", SMALL) + 8
    end = canvas.text(x - width / 2, y + radius + 18, f"q at {query}", size=SMALL, colour=theme.blue)
    canvas.text(end + 8, y + radius + 18, f"k at {key}", size=SMALL, colour=theme.orange)
    said = f"{math.degrees(angle):.0f}° apart"
    canvas.text(x, y + radius + 36, said, size=SMALL, colour=theme.green, align="center", weight="bold")


def _draw_circle(canvas: Canvas, x: float, y: float, radius: float) -> None:
    angles = np.linspace(0, 2 * np.pi, 90)
    canvas.line([(x + radius * math.cos(one), y + radius * math.sin(one)) for one in angles])


def _draw_scores(canvas: Canvas, cos: Tensor, sin: Tensor, x: float, y: float) -> None:
    """q k of equal vectors over their distance, for queries at two places: the curves lie on each other."""
    theme, distances = canvas.theme, np.arange(0, 100)
    axes = canvas.chart(x + 40, y + 10, WIDTH - MARGIN - x - 40, 150)
    for query, colour, style in ((110, theme.blue, "-"), (210, theme.orange, ":")):
        # Turning by m and n and multiplying gives cos(m - n) for each pair.
        score = cos[query] * cos[query - distances] + sin[query] * sin[query - distances]
        axes.plot(distances, score.mean(dim=1), style, color=colour, linewidth=2.4, label=f"query at {query}")
    axes.set(xlim=(0, 99), ylim=(0, 1.02), yticks=[0, 0.5, 1])
    axes.set_xlabel("distance of query and key", fontsize=SMALL, color=theme.faint, family=font_families())
    canvas.text(x, y - 18, "Score of equal vectors, all pairs", weight="bold")
    canvas.label(axes, 30, 0.92, "query at 110", colour=theme.blue)
    canvas.label(axes, 30, 0.79, "query at 210: the same curve", colour=theme.orange)
