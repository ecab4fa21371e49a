"""`bits` and `result`: what the trained model has learned."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any, NamedTuple

from canvas import MARGIN, SMALL, WIDTH, Canvas, Theme, font_families
from example import Example
from matplotlib.axes import Axes

from zero2all.common.files import read_json
from zero2all.evals.options import report_path
from zero2all.evals.probes import run_probes, summarize
from zero2all.infer.boundary import opening_id
from zero2all.infer.engine import Engine
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import generate
from zero2all.model.config import parameter_counts
from zero2all.quickstart.pipeline import GREEDY_SAMPLE_TOKENS, SAMPLE_PROMPTS, SAMPLE_TOKENS, WORLD_SEED
from zero2all.quickstart.world.questions import probes
from zero2all.tokenizer.stage import readable
from zero2all.train.validate import all_rows

LANGUAGES = {"en": "English", "zh": "Chinese"}
CHANNELS = LANGUAGES | {"code": "Python"}
BEGINNINGS = {"en": "The capital city of", "zh": "要说"}
"""Of the held-out texts whose first tokens are shown."""
SENTENCE_TOKENS = {"en": 16, "zh": 15}
BAR = 13.0
MOST_BITS = 13.0
POINTS = 11
"""Checkpoints that are asked for facts, at most."""


# ---- bits ------------------------------------------------------------------------------------------------------------


class ScoredSentence(NamedTuple):
    """The first tokens of a held-out text, and the bits that each costs."""

    pieces: list[bytes]
    before: list[float]
    after: list[float]


def bits(example: Example, theme: Theme) -> Canvas:
    """Bars of bits over the tokens of a sentence, for the untrained and the trained model."""
    canvas = Canvas(
        theme,
        500,
        "The model cannot foresee which country comes, but then it knows the capital",
        "Height: bits = −log₂ P(token | all before it). Grey: before training. Colour: after. A space is ␣.",
    )
    for number, (channel, language) in enumerate(LANGUAGES.items()):
        _draw_bits(canvas, language, theme.channels[channel], _scored(example, channel), 84 + number * 208)
    return canvas


@cache
def _scored(example: Example, channel: str) -> ScoredSentence:
    """Held-out text that begins with a fact."""
    text = next(text for text in example.texts(channel, "valid") if text.startswith(BEGINNINGS[channel]))
    ids = example.tokenizer.encode_text(text)[: SENTENCE_TOKENS[channel]]
    pieces = [example.tokenizer.text_pieces[number] for number in ids]
    return ScoredSentence(pieces, _bits_of(example.untrained, ids), _bits_of(example.trained, ids))


def _bits_of(engine: Engine, ids: list[int]) -> list[float]:
    """−log2 P of each token, given those before it."""
    row = [opening_id(engine.tokenizer), *ids]
    return [-logprob / math.log(2) for logprob in engine.score([row], [1])[0].logprobs]


def _draw_bits(canvas: Canvas, language: str, colour: str, sentence: ScoredSentence, y: float) -> None:
    theme, height = canvas.theme, 118.0
    count = sum(len(piece) for piece in sentence.pieces)
    before, after = sum(sentence.before), sum(sentence.after)
    end = canvas.text(MARGIN, y, language, weight="bold")
    said = f"{count} bytes: {before:.0f} bits before, {after:.0f} after"
    end = canvas.text(end + 12, y, said, colour=theme.faint)
    canvas.text(end + 12, y, f"= {after / count:.2f} bits per byte", colour=colour, weight="bold")
    base, widths = y + 24 + height, [_token_width(canvas, piece) for piece in sentence.pieces]
    gap = (WIDTH - 2 * MARGIN - sum(widths)) / (len(widths) - 1)
    x = float(MARGIN)
    for piece, width, was, now in zip(sentence.pieces, widths, sentence.before, sentence.after, strict=True):
        middle = x + width / 2
        for value, left, fill in ((was, middle - BAR - 1, theme.line), (now, middle + 1, colour)):
            tall = max(1.0, height * value / MOST_BITS)
            canvas.box(left, base - tall, BAR, tall, fill, round_by=0)
        above = base - height * now / MOST_BITS - 8
        canvas.text(middle + 1 + BAR / 2, above, f"{now:.1f}", size=10, colour=colour, align="center")
        canvas.box(x, base + 5, width, 21, theme.panel, _shown(piece), text_colour=theme.ink, size=SMALL)
        x += width + gap
    canvas.line([(MARGIN, base), (WIDTH - MARGIN, base)], theme.faint)


def _token_width(canvas: Canvas, piece: bytes) -> float:
    return max(2 * BAR + 4, canvas.text_width(_shown(piece), SMALL) + 4)


def _shown(piece: bytes) -> str:
    return readable(piece).replace(" ", "␣")


# ---- result ----------------------------------------------------------------------------------------------------------


class Continuation(NamedTuple):
    """What the model makes of a prompt."""

    channel: str
    prompt: str
    before: str
    after: str


def result(example: Example, theme: Theme) -> Canvas:
    """The same prompts before and after training; facts and held-out loss over the steps."""
    steps, config = example.steps[-1], example.config
    tokens = steps * config.train.tokens_per_step
    canvas = Canvas(
        theme,
        590,
        f"Before training: noise. After {steps} steps: facts in English and Chinese.",
        f"{parameter_counts(config.model)['total'] / 1e6:.1f} M parameters, {tokens / 1e6:.1f} M tokens, "
        f"minutes on two CPU cores: the quickstart.",
    )
    y = 84.0
    for each in _continuations(example):
        _draw_continuation(canvas, each, y)
        y += 66
    _draw_facts(canvas, example, y + 14)
    _draw_loss(canvas, example, y + 14)
    canvas.note = json.dumps(figures(example), ensure_ascii=False)
    return canvas


@cache
def figures(example: Example) -> dict[str, Any]:
    """What the quickstart's own report says of its last checkpoint: the figures of the picture and the READMEs."""
    report = read_json(report_path(example.run, example.steps[-1]))
    held_out, probes = report["held_out"], report["probes"]
    return {
        "steps": report["step"],
        "facts": {channel: round(probes["channels"][channel]["accuracy"], 6) for channel in LANGUAGES},
        "all facts": round(probes["accuracy"], 6),
        "bits per byte": {channel: round(held_out[channel]["bits_per_byte"], 6) for channel in CHANNELS},
        "gzip": {channel: round(held_out[channel]["gzip_bits_per_byte"], 6) for channel in CHANNELS},
        "held-out loss": round(all_rows(held_out)["loss"], 6),
    }


@cache
def _continuations(example: Example) -> list[Continuation]:
    """The prompts of the quickstart: a fact as greedy text, a story as sampled text."""
    found = []
    for index in (0, 1):
        for channel in LANGUAGES:
            prompt = SAMPLE_PROMPTS[channel][index]
            tokens, sampling = GREEDY_SAMPLE_TOKENS, Sampling()
            if index:
                tokens, sampling = SAMPLE_TOKENS, Sampling(temperature=0.7, top_p=0.9, seed=index)
            texts = [_one_line(generate(one, prompt, tokens, sampling)) for one in (example.untrained, example.trained)]
            found.append(Continuation(channel, prompt, *texts))
    return found


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() and char != "\ufffd" else " " for char in " ".join(text.split()))


def _draw_continuation(canvas: Canvas, each: Continuation, y: float) -> None:
    """The prompt with what followed it, once for each model."""
    theme, left = canvas.theme, MARGIN + 56
    canvas.box(MARGIN - 8, y - 14, WIDTH - 2 * MARGIN + 16, 56, theme.panel)
    for number, (name, text) in enumerate((("before", each.before), ("after", each.after))):
        at = y + number * 27
        is_after = number == 1
        canvas.text(MARGIN, at, name, size=SMALL, colour=theme.green if is_after else theme.faint)
        end = canvas.text(left, at, each.prompt, colour=theme.blue, weight="bold") + (7 if each.channel == "en" else 2)
        shown = canvas.shortened(text.strip(), WIDTH - MARGIN - end)
        canvas.text(end, at, shown, colour=theme.ink if is_after else theme.faint)


@cache
def _known_facts(example: Example) -> dict[str, list[tuple[int, float]]]:
    """Per language: (step, share of the facts that the model completes correctly)."""
    steps = [0, *example.steps]
    chosen = sorted({steps[round(place * (len(steps) - 1) / (POINTS - 1))] for place in range(POINTS)})
    asked = [probe for channel in LANGUAGES for probe in probes(channel, WORLD_SEED) if probe.counts]
    found: dict[str, list[tuple[int, float]]] = {channel: [] for channel in LANGUAGES}
    for step in chosen:
        channels = summarize(run_probes(example.engine(step), asked))["channels"]
        for channel, points in found.items():
            points.append((step, channels[channel]["accuracy"]))
    return found


def _draw_facts(canvas: Canvas, example: Example, y: float) -> None:
    theme = canvas.theme
    canvas.text(MARGIN, y, "Facts it completes correctly", weight="bold")
    canvas.text(MARGIN, y + 18, "each in a phrasing it never saw for that fact", size=SMALL, colour=theme.faint)
    axes = canvas.chart(MARGIN + 42, y + 36, 270, 130)
    for channel, points in _known_facts(example).items():
        steps, shares = zip(*points, strict=True)
        axes.plot(steps, [100 * share for share in shares], "o-", color=theme.channels[channel], markersize=4)
    _finish_curves(canvas, axes, example.steps[-1], 104)
    axes.set(yticks=[0, 50, 100], yticklabels=["0 %", "50 %", "100 %"])
    for number, (channel, points) in enumerate(_known_facts(example).items()):
        label = f"{LANGUAGES[channel]} {points[-1][1]:.0%}"
        canvas.label(
            axes,
            example.steps[-1],
            36 - 16 * number,
            label,
            colour=theme.channels[channel],
            ha="right",
            fontweight="bold",
        )


def _draw_loss(canvas: Canvas, example: Example, y: float) -> None:
    theme, left = canvas.theme, WIDTH / 2 + 24
    canvas.text(left, y, "Bits per byte of held-out text", weight="bold")
    canvas.text(left, y + 18, "fewer is better; gzip -9 in brackets", size=SMALL, colour=theme.faint)
    axes = canvas.chart(left + 30, y + 36, WIDTH - MARGIN - left - 30, 130)
    curves = {channel: example.metrics.series(f"eval/valid/bpb/{channel}") for channel in CHANNELS}
    highest = max(float(curve.value.max()) for curve in curves.values())
    for number, (channel, curve) in enumerate(curves.items()):
        axes.plot(curve.step, curve.value, "o-", color=theme.channels[channel], markersize=4)
        canvas.label(
            axes,
            example.steps[-1],
            highest * (0.34 + 0.15 * number),
            f"{CHANNELS[channel]} {curve.value[-1]:.2f} ({figures(example)['gzip'][channel]:.2f})",
            colour=theme.channels[channel],
            ha="right",
            fontweight="bold",
        )
    _finish_curves(canvas, axes, example.steps[-1], highest * 1.05)


def _finish_curves(canvas: Canvas, axes: Axes, last: int, top: float) -> None:
    axes.set(xlim=(0, last * 1.02), ylim=(0, top))
    axes.set_xlabel("step", fontsize=SMALL, color=canvas.theme.faint, family=font_families())
