"""`cleaning` and `near-copies`: what the corpus room does to records."""

from __future__ import annotations

import json
import tempfile
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from corpus_report import rubbish
from example import Example

from zero2all.corpus import BuildOptions, Source, build_corpus
from zero2all.corpus.dedup.config import DedupConfig, jaccard_estimate
from zero2all.corpus.dedup.signatures import describe

EXCERPT_WIDTH = 330


# ---- cleaning --------------------------------------------------------------------------------------------------------


class Dropped(NamedTuple):
    """Records that one rule removed."""

    rule: str
    records: int
    example: str


class CleaningStep(NamedTuple):
    """A step of the build, and what it removed."""

    name: str
    dropped: list[Dropped]


def cleaning(example: Example, theme: Theme) -> Canvas:
    """Records flow down through the steps; the stream narrows where a step drops some."""
    report = _report_of_web_pages(example)
    steps = _cleaning_steps(report)
    lines = sum(max(1, len(step.dropped)) for step in steps)
    canvas = Canvas(
        theme,
        lines * 25 + len(steps) * 22 + 150,
        f"Of {report['records_in']:,} web pages, {report['records_kept']:,} become training text",
        "Every step counts what it drops and keeps examples of it.",
    )
    left, middle, widest = MARGIN, 150.0, 150.0
    count, y = report["records_in"], 84.0

    def half(records: int) -> float:
        return widest / 2 * records / report["records_in"]

    canvas.text(middle, y, f"{count:,} records", align="center", weight="bold")
    y += 16
    for step in steps:
        height = max(1, len(step.dropped)) * 25 + 22
        after = count - sum(each.records for each in step.dropped)
        ends = [(middle - half(count), y), (middle + half(count), y)]
        ends += [(middle + half(after), y + height), (middle - half(after), y + height)]
        canvas.area(ends, theme.blend(theme.blue, 0.30))
        canvas.text(middle, y + height / 2, step.name, align="center", weight="bold")
        canvas.line([(left, y), (WIDTH - MARGIN, y)])
        for number, each in enumerate(step.dropped):
            at = y + 23 + number * 25
            canvas.text(290, at, f"−{each.records}", colour=theme.red, weight="bold", align="right")
            end = canvas.text(300, at, each.rule, colour=theme.ink)
            room = WIDTH - MARGIN - end - 12
            excerpt = canvas.shortened(each.example, min(room, EXCERPT_WIDTH), SMALL, mono=True)
            canvas.text(end + 10, at, excerpt, size=SMALL, colour=theme.faint, mono=True)
        count, y = after, y + height
    canvas.line([(left, y), (WIDTH - MARGIN, y)])
    kept = f"{count:,} records kept: {report['train_records']:,} to train on, {report['valid_records']:,} held out"
    canvas.text(middle - widest / 2, y + 22, kept, weight="bold", colour=theme.green)
    return canvas


@cache
def _report_of_web_pages(example: Example) -> dict[str, Any]:
    """What `z2a corpus build` reports of pages made from the quickstart's stories, with rubbish among them."""
    with tempfile.TemporaryDirectory() as folder:
        stories, pages = Path(folder) / "stories.jsonl", Path(folder) / "web.jsonl"
        lines = [json.dumps({"text": text}) for text in example.texts("en", "train", 3000)]
        stories.write_text("\n".join(lines), encoding="utf-8")
        rubbish(stories, pages)
        options = BuildOptions(max_damaged_share=0.05, accept_drops=True)
        report = build_corpus(Path(folder) / "corpus", [Source("web", pages, "en")], options)
        web: dict[str, Any] = report["sources"]["web"]
        cut_line = next(line for line in pages.read_text(encoding="utf-8").splitlines() if not line.endswith("}"))
    web["examples"]["dropped"]["invalid_json"] = [cut_line]
    return web


def _cleaning_steps(report: dict[str, Any]) -> list[CleaningStep]:
    """The steps in their order, each with the rules that dropped something."""
    copies = {"duplicate": "exact copies", "near_duplicate": "near copies"}
    examples, counts = report["examples"]["dropped"], dict(report["dropped"])

    def dropped(rules: list[str], all_counts: dict[str, int]) -> list[Dropped]:
        found = [Dropped(rule, all_counts[rule], " ".join(examples[rule][0].split())) for rule in rules]
        return sorted(found, key=lambda each: -each.records)

    damaged = report["quarantined_by_reason"]
    steps = [CleaningStep("read", dropped(list(damaged), damaged))]
    steps.append(CleaningStep("rules", dropped([rule for rule in counts if rule not in copies], counts)))
    steps += [CleaningStep(name, dropped([rule], counts)) for rule, name in copies.items() if rule in counts]
    return steps


# ---- near copies -----------------------------------------------------------------------------------------------------


STORY_LETTERS = (380, 460)
EDITS = 2


class Comparison(NamedTuple):
    """A story, an edited copy of it and another story, with their signatures."""

    texts: tuple[str, str, str]
    signatures: np.ndarray

    def equal(self, other: int) -> np.ndarray:
        """Where the signature of the story equals that of text 1 (the copy) or 2 (the other story)."""
        same: np.ndarray = self.signatures[0] == self.signatures[other]
        return same


def near_copies(example: Example, theme: Theme) -> Canvas:
    """The texts, where their signatures agree, and why LSH brings near copies together."""
    config, found = DedupConfig(), _compared_stories(example)
    story, copy, other = found.texts
    canvas = Canvas(
        theme,
        575,
        "A near copy has nearly the same signature",
        f"A is a text of the quickstart, B a copy with {EDITS} words changed, C another text.",
    )
    y = 78.0
    for name, words in zip(("A", "B"), _marked_words(story, copy), strict=True):
        y = _draw_words(canvas, name, words, y) + 8
    canvas.text(MARGIN, y, "C", weight="bold", colour=theme.blue)
    canvas.text(MARGIN + 24, y, canvas.shortened(other, WIDTH - 2 * MARGIN - 24), colour=theme.faint)
    y += 36
    _draw_grid(canvas, "A and B", found.equal(1), _jaccard(story, copy, config), MARGIN, y)
    _draw_grid(canvas, "A and C", found.equal(2), _jaccard(story, other, config), MARGIN + 196, y)
    canvas.text(440, y, "Chance that a pair is compared", weight="bold")
    rule = f"{config.bands} bands of {config.rows} bytes; one equal is enough"
    canvas.text(440, y + 20, rule, size=SMALL, colour=theme.faint)
    _draw_bands(canvas, config, [("A and B", found.equal(1)), ("A and C", found.equal(2))], y + 42)
    least = config.needed("en")[0]
    needed = f"A pair with at least {least} equal bytes of 256 is a near copy: one of the two is dropped."
    canvas.text(MARGIN, canvas.height - 24, needed, colour=theme.ink)
    return canvas


@cache
def _compared_stories(example: Example) -> Comparison:
    shortest, longest = STORY_LETTERS
    stories = [text for text in example.texts("en", "train", 2000) if text.startswith("On a") and "\n" not in text]
    story, other = [text for text in stories if shortest < len(text) < longest and text.count(" the ") > EDITS][:2]
    texts = (story, story.replace(" the ", " that ", EDITS), other)
    signatures = describe(texts, "en", DedupConfig()).signatures
    assert signatures is not None, "near dedup is on"
    return Comparison(texts, signatures)


def _jaccard(a: str, b: str, config: DedupConfig) -> float:
    """The share of common shingles, counted."""
    first, second = _shingles(a, config), _shingles(b, config)
    return len(first & second) / len(first | second)


def _shingles(text: str, config: DedupConfig) -> set[tuple[str, ...]]:
    words = "".join(char.lower() if char.isalnum() else " " for char in text).split()
    size = config.word_ngram
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


def _marked_words(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """The words of both texts, each with whether the other text has it in its place."""
    first, second = a.split(), b.split()
    same_a, same_b = [False] * len(first), [False] * len(second)
    for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks():
        same_a[block.a : block.a + block.size] = [True] * block.size
        same_b[block.b : block.b + block.size] = [True] * block.size
    return list(zip(first, same_a, strict=True)), list(zip(second, same_b, strict=True))


def _draw_words(canvas: Canvas, name: str, words: list[tuple[str, bool]], y: float) -> float:
    """A text with its different words in colour; returns where it ends."""
    theme, left = canvas.theme, MARGIN + 24
    canvas.text(MARGIN, y, name, weight="bold", colour=theme.blue)
    x, space = float(left), canvas.text_width("n n") - canvas.text_width("nn")
    for word, is_same in words:
        width = canvas.text_width(word, weight="normal" if is_same else "bold")
        if x + width > WIDTH - MARGIN:
            x, y = float(left), y + 19
        colour, weight = (theme.ink, "normal") if is_same else (theme.orange, "bold")
        canvas.text(x, y, word, colour=colour, weight=weight)
        x += width + space + (0 if is_same else 1)
    return y + 19


def _draw_grid(canvas: Canvas, title: str, equal: np.ndarray, jaccard: float, x: float, y: float) -> None:
    """256 cells, blue where the signatures agree."""
    theme, size = canvas.theme, 11
    canvas.text(x, y, title, weight="bold")
    for place, is_equal in enumerate(equal):
        colour = theme.blue if is_equal else theme.blend(theme.faint, 0.25)
        canvas.box(x + place % 16 * size, y + 16 + place // 16 * size, size - 1.5, size - 1.5, colour, round_by=0)
    below = y + 16 + 16 * size + 16
    canvas.text(x, below, f"{equal.sum()} of 256 bytes equal", colour=theme.blue, weight="bold")
    estimate = jaccard_estimate(int(equal.sum()))
    canvas.text(x, below + 18, f"similarity {estimate:.2f} (counted: {jaccard:.2f})", colour=theme.faint, size=SMALL)


def _draw_bands(canvas: Canvas, config: DedupConfig, pairs: list[tuple[str, np.ndarray]], y: float) -> None:
    """1 - (1 - s^rows)^bands, with the pairs on it."""
    theme = canvas.theme
    axes = canvas.chart(470, y, WIDTH - MARGIN - 470, 140)
    similarity = np.linspace(0, 1, 200)
    axes.plot(similarity, 100 * _chance(similarity, config), color=theme.faint, linewidth=2)
    for name, equal in pairs:
        at = jaccard_estimate(int(equal.sum()))
        chance = 100 * float(_chance(np.array(at), config))
        axes.plot([at], [chance], "o", color=theme.blue, markersize=8, clip_on=False)
        right, up, align = (-0.05, -4, "right") if at > 0.5 else (0.02, 10, "left")
        canvas.label(axes, at + right, chance + up, name, colour=theme.blue, ha=align, fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(0, 104), yticks=[0, 50, 100], yticklabels=["0 %", "50 %", "100 %"])
    axes.set_xlabel("similarity", color=theme.faint, fontsize=SMALL, family=font_families())


def _chance(similarity: np.ndarray, config: DedupConfig) -> np.ndarray:
    """That at least one band of two signatures is equal."""
    chance: np.ndarray = 1 - (1 - similarity**config.rows) ** config.bands
    return chance
