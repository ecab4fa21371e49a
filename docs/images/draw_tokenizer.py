"""`bpe`: how the merges of the quickstart's tokenizer build words and sentences out of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme
from example import Example

from zero2all.common.files import read_json
from zero2all.tokenizer.config import byte_alphabet
from zero2all.tokenizer.save import TOKENIZER_NAME

WORDS = (" capital", "首都")
SENTENCES = ("The capital of France is Paris.", "中国的首都是北京。")
STAGES = (0, 100, 600)
"""After so many merges, and after all."""


@dataclass(frozen=True)
class Piece:
    """A byte, or two pieces that a merge joined."""

    content: bytes
    merge: int = 0
    """Number of the merge, from 1."""
    parts: tuple[Piece, Piece] | None = None


def bpe(example: Example, theme: Theme) -> Canvas:
    """Two words as trees of merges; two sentences after more and more merges."""
    merges = _merges(example)
    trees = [_merged(word.encode(), merges) for word in WORDS]
    canvas = Canvas(
        theme,
        520,
        "BPE joins neighbours in the order in which it learned them",
        f"Orange: the number of the merge. Merge 1 joins the most frequent pair, merge {len(merges):,} is the last.",
    )
    _draw_tree(canvas, trees[0][0], MARGIN, 380, 202)
    _draw_tree(canvas, trees[1][0], 430, WIDTH - MARGIN - 430, 202)
    y = 276.0
    for sentence in SENTENCES:
        for stage in (*STAGES, len(merges)):
            _draw_sentence(canvas, example, sentence, stage, y)
            y += 27
        y += 14
    return canvas


@cache
def _merges(example: Example) -> dict[tuple[bytes, bytes], int]:
    """The pairs that are joined, with their numbers from 1, as the tokenizer's file has them."""
    stored = read_json(example.workspace.tokenizer / TOKENIZER_NAME)["model"]["merges"]
    byte_of = byte_alphabet()

    def content(text: str) -> bytes:
        return bytes(byte_of[char] for char in text)

    return {(content(left), content(right)): number for number, (left, right) in enumerate(stored, 1)}


def _merged(word: bytes, merges: dict[tuple[bytes, bytes], int], most: int | None = None) -> list[Piece]:
    """The word after the merges up to number `most`: of the neighbours that have a merge, the earliest is joined."""
    pieces = [Piece(bytes([byte])) for byte in word]
    while True:
        pairs = [merges.get((left.content, right.content)) for left, right in pairwise(pieces)]
        known = [number for number in pairs if number is not None and (most is None or number <= most)]
        if not known:
            return pieces
        at = pairs.index(min(known))
        left, right = pieces[at : at + 2]
        pieces[at : at + 2] = [Piece(left.content + right.content, min(known), (left, right))]


def _draw_tree(canvas: Canvas, tree: Piece, x: float, width: float, y: float) -> None:
    """The bytes at the bottom, the word on top; every join bears the number of its merge."""
    slot, rise, theme = width / len(tree.content), 38.0, canvas.theme

    def draw(piece: Piece, first: int) -> tuple[float, float, int]:
        """Returns the middle of the piece and how many joins are below it."""
        shown = _shown(piece.content)
        if piece.parts is None:
            middle, level = x + (first + 0.5) * slot, 0
        else:
            left = draw(piece.parts[0], first)
            right = draw(piece.parts[1], first + len(piece.parts[0].content))
            middle, level = (left[0] + right[0]) / 2, max(left[2], right[2]) + 1
            for child in (left, right):
                canvas.line([(child[0], child[1] - 12), (middle, y - level * rise + 12)], theme.faint)
        at = y - level * rise
        size = max(canvas.text_width(shown), 18) + 12
        is_byte = piece.parts is None
        colour = theme.panel if is_byte else theme.blend(theme.blue, 0.25) if piece is not tree else theme.blue
        ink = theme.on_colour if piece is tree else theme.ink
        canvas.box(middle - size / 2, at - 12, size, 24, colour, shown, text_colour=ink, edge=theme.line)
        if piece.merge:
            canvas.text(middle + size / 2 + 4, at - 6, f"{piece.merge:,}", size=SMALL, colour=theme.orange)
        return middle, at, level

    draw(tree, 0)
    canvas.text(x + width / 2, y + 24, f"{len(tree.content)} bytes", colour=theme.faint, size=SMALL, align="center")


def _draw_sentence(canvas: Canvas, example: Example, sentence: str, most: int, y: float) -> None:
    """A sentence in the pieces it has after `most` merges."""
    theme, merges = canvas.theme, _merges(example)
    pretokens = example.tokenizer.backend.pre_tokenizer.pre_tokenize_str(sentence)
    pieces = [
        piece.content for _, (start, end) in pretokens for piece in _merged(sentence[start:end].encode(), merges, most)
    ]
    is_last = most == len(merges)
    if is_last:
        vocabulary = example.tokenizer.text_pieces
        assert pieces == [vocabulary[number] for number in example.tokenizer.encode_text(sentence)]
    name = "bytes" if most == 0 else f"{most:,} merges"
    canvas.text(MARGIN, y, name, size=SMALL, colour=theme.faint)
    end = WIDTH - MARGIN - 74
    x, natural = 106.0, sum(_piece_width(canvas, piece) + 2 for piece in pieces)
    squeeze = min(1.0, (end - x) / natural)
    for number, piece in enumerate(pieces):
        width = _piece_width(canvas, piece) * squeeze
        colour = theme.blend((theme.blue, theme.green)[number % 2], 0.28 if squeeze == 1 else 0.18)
        label = _shown(piece) if squeeze > 0.6 else ""
        canvas.box(x, y - 11, width, 22, colour, label, text_colour=theme.ink, size=SMALL)
        x += width + 2 * squeeze
    weight = "bold" if is_last else "normal"
    canvas.text(WIDTH - MARGIN, y, f"{len(pieces)} tokens", size=SMALL, align="right", weight=weight)


def _piece_width(canvas: Canvas, piece: bytes) -> float:
    return canvas.text_width(_shown(piece), SMALL) + 8


def _shown(piece: bytes) -> str:
    """Characters as they are, a space as ␣, bytes that are no character alone in hex."""
    try:
        return piece.decode().replace(" ", "␣")
    except UnicodeDecodeError:
        return piece.hex(" ").upper()
