"""The report as one HTML page that needs nothing else: no script, no file, no network. Light and dark, wide and narrow.

It shows text from the corpus and pieces of vocabularies, so everything that goes into it is escaped. The charts are SVG
in the colours of the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zero2all.common.files import human_bytes, package_text
from zero2all.common.html import html_page
from zero2all.common.language import translate as t
from zero2all.common.progress import counted

COLOURS = 6
"""Classes c0 to c5 of the page's style; a seventh tokenizer begins again."""
TINTS = 5
VISIBLE = {"\n": "⏎\n", "\t": "⇥", "\r": "␍", "\x00": "␀"}


def evaluation_page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    names = [tokenizer["name"] for tokenizer in report["tokenizers"]]
    body = [
        _heading(report),
        _legend(names) if len(names) > 1 else "",
        _charts(report),
        _tables(report),
        _segmentations(report),
        _junk_examples(report),
        _longest(report),
    ]
    style = package_text(__package__, "evaluation_report.css") + "".join(
        f".c{n} {{ background: var(--c{n}); fill: var(--c{n}); }} .sc{n} {{ stroke: var(--c{n}); }}\n"
        for n in range(COLOURS)
    )
    return html_page(t("Tokenizer evaluation"), style, body)


def _heading(report: Mapping[str, Any]) -> str:
    ours = report["tokenizers"][0]
    channels = report["text"]["channels"]
    text = ", ".join(
        f"{name} {t(counted(facts['documents'], 'document'))} ({human_bytes(facts['bytes'])})"
        for name, facts in channels.items()
    )
    ratios = ", ".join(f"{name} {ours['channels'][name]['bytes_per_token']:.2f}" for name in channels)
    back = ours["round_trip"]
    if back["changed"]:
        whole = t(f"{back['changed']:,} of {back['documents']:,} documents come back changed.")
    else:
        whole = t(f"All {back['documents']:,} documents come back from their tokens unchanged.")
    title = t(f"{round(ours['bytes_per_token'], 2)} bytes per token with {ours['vocab_size']:,} ids")
    figures = t(f"Bytes per token: {ratios}. Measured on the {report['text']['split']} text: {text}.")
    return f'<h1>{escape(title)}</h1><p class="faint">{escape(figures)} {escape(whole)}</p>'


def _charts(report: Mapping[str, Any]) -> str:
    tokenizers = report["tokenizers"]
    channels = list(report["text"]["channels"])

    def bars(field: str, words: str) -> str:
        series = [(each["name"], [each["channels"][channel][field] for channel in channels]) for each in tokenizers]
        return _grouped_bars(channels, series, words)

    curves = [(each["name"], each["vocabulary_use"]["by_rank"], each["pieces"]) for each in tokenizers]
    stacks = "".join(
        f'<p class="who"><span>{escape(each["name"])}</span><span>'
        + t(f"{each['vocabulary_use']['share_used']:.1%} of {each['pieces']:,} pieces used")
        + f"</span></p>{_use_histogram(each['vocabulary_use']['histogram'], number)}"
        for number, each in enumerate(tokenizers)
    )
    buckets = ", ".join(_bucket_name(bucket) for bucket in tokenizers[0]["vocabulary_use"]["histogram"])
    order = t(f"From left to right: {buckets}.")
    panels = [
        _panel(t("Bytes per token, by channel (more is better)"), bars("bytes_per_token", "{:.2f}")),
        _panel(t("Tokens per character (fewer is better)"), bars("tokens_per_character", "{:.3f}")),
        _panel(t("Use of the vocabulary by rank (dashed: all its pieces)"), _rank_curves(curves)),
        _panel(
            t("Share of the pieces by how often they were used"),
            f'{stacks}<p class="faint"><small>{escape(order)}</small></p>',
        ),
    ]
    return f'<h2>{t("At a glance")}</h2><div class="panels">{"".join(panels)}</div>'


def _panel(title: str, drawing: str) -> str:
    return f'<div class="panel"><h3>{escape(title)}</h3>{drawing}</div>'


def _tables(report: Mapping[str, Any]) -> str:
    parts = [f"<h2>{t('Figures')}</h2>"]
    for table in evaluation_tables(report):
        # The longest pieces have a part of the page to themselves.
        heading, *rows = [row[:-1] if table.rows[0][-1] == LONGEST_COLUMN else row for row in table.rows]
        head = "".join(f"<th>{escape(t(cell))}</th>" for cell in heading)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        notes = "".join(f'<p class="faint">{escape(note)}</p>' for note in table.notes)
        parts.append(
            f'<h3>{escape(t(table.title))}</h3><div class="wide"><table><tr>{head}</tr>{lines}</table></div>{notes}'
        )
    return "".join(parts)


def _segmentations(report: Mapping[str, Any]) -> str:
    parts = [
        f"<h2>{t('How text is cut')}</h2>",
        f'<p class="faint">{t("Each colour is one token. Point at it or touch it to see its id and bytes.")} '
        f'<span class="part">E4 BD</span>: {t("a token that ends inside a character.")}</p>',
    ]
    for place, excerpt in enumerate(report["excerpts"]):
        rows = []
        for number, tokenizer in enumerate(report["tokenizers"]):
            tokens = tokenizer["segments"][place]
            rows.append(
                f'<div><div class="who"><span><i class="dot {_colour(number)}"></i>{escape(tokenizer["name"])}</span>'
                f"<span>{t(counted(len(tokens), 'token'))}</span></div>"
                f'<div class="tokens">{_segmentation(tokens)}</div></div>'
            )
        code = " code" if excerpt["title"].startswith(("code", "indentation", "numbers")) else ""
        opened = "" if excerpt["title"] == "indentation" else " open"
        parts.append(
            f'<details class="cut{code}"{opened}><summary>{escape(t(excerpt["title"]))}</summary>'
            f'<div class="body">{"".join(rows)}</div></details>'
        )
    return "".join(parts)


def _junk_examples(report: Mapping[str, Any]) -> str:
    examples = [f"<h2>{t('Examples of junk pieces')}</h2>"]
    for tokenizer in report["tokenizers"]:
        inner = "".join(
            f"<h3>{escape(sort)}</h3>{_chips(junk['examples'])}"
            for sort, junk in tokenizer["junk"].items()
            if junk["examples"]
        )
        examples.append(f"<details><summary>{escape(tokenizer['name'])}</summary>{inner}</details>")
    return "".join(examples)


def _longest(report: Mapping[str, Any]) -> str:
    parts = [f"<h2>{t('Longest pieces')}</h2>"]
    for number, tokenizer in enumerate(report["tokenizers"]):
        parts.append(
            f'<h3><i class="dot {_colour(number)}"></i>{escape(tokenizer["name"])}</h3>{_chips(tokenizer["longest"])}'
        )
    return "".join(parts)


def _chips(entries: Sequence[Mapping[str, Any]]) -> str:
    chips = []
    for entry in entries:
        facts = [f"id {entry['id']}"]
        if "bytes" in entry:
            facts += [t(f"{entry['bytes']} bytes"), t(f"used {entry['used']:,} times")]
        shown = entry["piece"].replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
        if shown.strip() != shown or "  " in shown:
            shown = shown.replace(" ", "·")
        shown = shown if len(shown) <= 60 else f"{shown[:56]}… ({len(shown)})"
        chips.append(f'<code title="{escape(", ".join(facts))}">{escape(shown)}</code>')
    return f'<div class="chips">{"".join(chips)}</div>'


def _colour(number: int) -> str:
    """The class of the tokenizer with this number."""
    return f"c{number % COLOURS}"


def _legend(names: Sequence[str]) -> str:
    """Which colour is whose."""
    items = "".join(f'<span><i class="dot {_colour(n)}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="legend">{items}</div>'


def _grouped_bars(groups: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], words: str = "{:.2f}") -> str:
    """Horizontal bars, one group per channel and in it one bar per tokenizer."""
    row, gap, label, width = 20, 16, 74, 520
    top = max((value for _, values in series for value in values), default=1) or 1
    shapes = []
    y = 4
    for place, group in enumerate(groups):
        middle = y + row * len(series) / 2 + 4
        shapes.append(f'<text x="0" y="{middle:.0f}" class="strong">{escape(group)}</text>')
        for number, (name, values) in enumerate(series):
            value = values[place]
            long = max(2.0, (width - label - 62) * value / top)
            shapes.append(
                f'<rect x="{label}" y="{y + 2}" width="{long:.1f}" height="{row - 5}" rx="3" class="{_colour(number)}">'
                f"<title>{escape(name)}, {escape(group)}: {words.format(value)}</title></rect>"
                f'<text x="{label + long + 6:.1f}" y="{y + 13}" class="figure">{words.format(value)}</text>'
            )
            y += row
        y += gap
    return f'<svg viewBox="0 0 {width} {y - gap + 4}" role="img" aria-label="{t("bars")}">{"".join(shapes)}</svg>'


def _rank_curves(series: Sequence[tuple[str, Sequence[Sequence[int]], int]]) -> str:
    """How often the piece of each rank was used, both axes logarithmic; the dashed line is the number of pieces."""
    width, height, left, bottom, right, over = 520, 270, 46, 34, 12, 10
    far = max((pieces for _, _, pieces in series), default=10)
    high = max((points[0][1] for _, points, _ in series if points), default=10)
    along = math.log10(max(far, 10))
    up = math.log10(max(high, 10))

    def x(rank: float) -> float:
        return left + (width - left - right) * math.log10(max(rank, 1)) / along

    def y(count: float) -> float:
        return height - bottom - (height - bottom - over) * math.log10(max(count, 1)) / up

    shapes = []
    for power in range(int(along) + 1):
        place = x(10**power)
        shapes.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{over}" y2="{height - bottom}" class="grid"/>')
        shapes.append(f'<text x="{place:.1f}" y="{height - bottom + 15}" class="tick middle">{_power(power)}</text>')
    for power in range(int(up) + 1):
        place = y(10**power)
        shapes.append(f'<line x1="{left}" x2="{width - right}" y1="{place:.1f}" y2="{place:.1f}" class="grid"/>')
        shapes.append(f'<text x="{left - 6}" y="{place + 4:.1f}" class="tick end">{_power(power)}</text>')
    across, upward = t("rank of the piece"), t("times used")
    shapes.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 4}" class="tick middle">{across}</text>')
    middle = f"{height / 2:.0f}"
    turned = f'transform="rotate(-90 12 {middle})"'
    shapes.append(f'<text x="12" y="{middle}" class="tick middle" {turned}>{upward}</text>')
    for number, (name, points, pieces) in enumerate(series):
        if not points:
            continue
        path = " ".join(f"{x(rank):.1f},{y(count):.1f}" for rank, count in points)
        end, count = points[-1]
        shapes.append(
            f'<line x1="{x(pieces):.1f}" x2="{x(pieces):.1f}" y1="{over}" y2="{height - bottom}" '
            f'class="limit s{_colour(number)}"/>'
            f'<polyline points="{path}" class="curve s{_colour(number)}"><title>{escape(name)}: '
            + t(f"{end:,} of {pieces:,} pieces used")
            + "</title></polyline>"
            f'<circle cx="{x(end):.1f}" cy="{y(count):.1f}" r="3.5" class="{_colour(number)}"/>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{t("use by rank")}">{"".join(shapes)}</svg>'


def _use_histogram(histogram: Sequence[Mapping[str, Any]], number: int) -> str:
    """One bar over 100 %: which share of the pieces was used how often; never used is hatched grey."""
    total = sum(bucket["pieces"] for bucket in histogram) or 1
    parts = []
    for place, bucket in enumerate(histogram):
        share = bucket["pieces"] / total
        if share == 0:
            continue
        words = f"{_bucket_name(bucket)}: {t(counted(bucket['pieces'], 'piece'))} ({share:.1%})"
        strength = 25 + 75 * place / (len(histogram) - 1)
        style = "" if place == 0 else f"opacity:{strength / 100:.2f}"
        kind = "never" if place == 0 else _colour(number)
        shown = f"{share:.0%}" if share > 0.08 else ""
        parts.append(
            f'<span style="width:{100 * share:.2f}%" title="{escape(words)}"><i class="{kind}" style="{style}"></i>'
            f"<b>{shown}</b></span>"
        )
    return f'<div class="stack">{"".join(parts)}</div>'


def _bucket_name(bucket: Mapping[str, Any]) -> str:
    """Such as `4 to 15 times`."""
    low, high = bucket["from"], bucket["to"]
    if low == high:
        return t("never" if low == 0 else "once")
    return t(f"{low} to {high} times" if high is not None else f"{low} times or more")


def _power(power: int) -> str:
    return {0: "1", 1: "10", 2: "100", 3: "1k", 4: "10k", 5: "100k", 6: "1M", 7: "10M"}.get(power, f"1e{power}")


def _segmentation(tokens: Sequence[Sequence[Any]]) -> str:
    """One excerpt as spans, colours in turn; a token that ends inside a character shows its bytes instead.

    Pointing at a token shows its id and bytes, by style alone.
    """
    spans = []
    for place, (number, digits) in enumerate(tokens):
        data = bytes.fromhex(digits)
        shown, is_text = _shown(data)
        tip = f"{number} · {' '.join(f'{byte:02X}' for byte in data[:12])}{' …' if len(data) > 12 else ''}"
        kind = f"t{place % TINTS}" if is_text else "part"
        spans.append(f'<i class="{kind}" tabindex="0" data-tip="{escape(tip)}">{shown}</i>')
    return "".join(spans)


def _shown(data: bytes) -> tuple[str, bool]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return escape(data.decode("utf-8", "backslashreplace").replace("\\x", "")), False
    return "".join(VISIBLE.get(character, escape(character)) for character in text), True


# The figures for the terminal: one row per tokenizer.


SHOWN_PIECES = 6
SHOWN_CHARACTERS = 18
LONGEST_COLUMN = "longest pieces"


@dataclass(frozen=True)
class TextTable:
    """Rows, the first of which is the heading."""

    title: str
    rows: Sequence[Sequence[str]]
    notes: list[str] = field(default_factory=list)


def evaluation_tables(report: Mapping[str, Any]) -> list[TextTable]:
    """What `z2a tokenizer eval` prints."""
    return [_compression(report), _speed(report), _vocabulary(report), _fertility(report), _junk(report)]


def _compression(report: Mapping[str, Any]) -> TextTable:
    channels = report["text"]["channels"]
    first = report["tokenizers"][0]
    rows = [
        ["tokenizer", "ids", *(f"{name} {t(unit)}" for unit in ("bytes/token", "tokens/char") for name in channels)]
    ]
    for tokenizer in report["tokenizers"]:
        cells = [tokenizer["name"], f"{tokenizer['vocab_size']:,}"]
        for name in channels:
            value = tokenizer["channels"][name]["bytes_per_token"]
            other = "" if tokenizer is first else f" ({value / first['channels'][name]['bytes_per_token'] - 1:+.1%})"
            cells.append(f"{value:.3f}{other}")
        cells += [f"{tokenizer['channels'][name]['tokens_per_character']:.3f}" for name in channels]
        rows.append(cells)
    parts = (
        f"{name} {t(counted(facts['documents'], 'document'))}, {human_bytes(facts['bytes'])}"
        for name, facts in channels.items()
    )
    title = t(f"Compression on the {report['text']['split']} text: {'; '.join(parts)}")
    return TextTable(title, rows)


def _speed(report: Mapping[str, Any]) -> TextTable:
    channels = report["text"]["channels"]
    rows = [["tokenizer", "encoded by", *(f"{name} MB/s" for name in channels), "documents that come back changed"]]
    notes = []
    for tokenizer in report["tokenizers"]:
        speeds = [f"{tokenizer['channels'][name]['megabytes_per_second']:.1f}" for name in channels]
        back = tokenizer["round_trip"]
        rows.append([tokenizer["name"], tokenizer["kind"], *speeds, f"{back['changed']:,} / {back['documents']:,}"])
        if back["changed"]:
            notes.append(t(f"{tokenizer['name']} changes, for example, {back['example']!r}"))
    return TextTable("Encoding, in MB per second of one core", rows, notes)


def _vocabulary(report: Mapping[str, Any]) -> TextTable:
    rows = [
        [
            *("tokenizer", "pieces", "used", "share used", "half of all tokens", "characters that are pieces"),
            *("bytes in split characters", LONGEST_COLUMN),
        ]
    ]
    for tokenizer in report["tokenizers"]:
        use, coverage = tokenizer["vocabulary_use"], tokenizer["coverage"]
        longest = " ".join(_short(entry["piece"]) for entry in tokenizer["longest"][:SHOWN_PIECES])
        rows.append(
            [
                tokenizer["name"],
                f"{tokenizer['pieces']:,}",
                f"{use['used']:,}",
                f"{use['share_used']:.1%}",
                t(counted(use["pieces_for_half_of_tokens"], "piece")),
                f"{coverage['share_single']:.3%}",
                f"{coverage['share_bytes_split']:.3%}",
                longest,
            ]
        )
    return TextTable("Vocabulary", rows)


def _fertility(report: Mapping[str, Any]) -> TextTable:
    rows = [
        ["tokenizer", "tokens/digit", "tokens/line of code", "bytes/token of code", "tokens/indentation", "mixed text"]
    ]
    for tokenizer in report["tokenizers"]:
        fertility = tokenizer["fertility"]
        rows.append(
            [
                tokenizer["name"],
                f"{fertility['tokens_per_digit']:.2f}",
                f"{fertility['code_tokens_per_line']:.1f}",
                f"{fertility['code_bytes_per_token']:.2f}",
                f"{fertility['indentation_tokens_per_line']:.2f}",
                t(counted(fertility["fixed_texts"]["mixed"], "token")),
            ]
        )
    return TextTable("Fertility on fixed texts (fewer is better, except for bytes per token)", rows)


def _junk(report: Mapping[str, Any]) -> TextTable:
    definitions = report["junk_definitions"]
    rows = [["tokenizer", *definitions]]
    for tokenizer in report["tokenizers"]:
        sorts = tokenizer["junk"].values()
        cells = [f"{junk['pieces']:,} ({junk['share_of_vocabulary']:.1%})" for junk in sorts]
        rows.append([tokenizer["name"], *cells])
    return TextTable("Junk pieces", rows, [f"{sort}: {t(meaning)}" for sort, meaning in definitions.items()])


def _short(piece: str) -> str:
    visible = piece.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
    return visible if len(visible) <= SHOWN_CHARACTERS else f"{visible[: SHOWN_CHARACTERS - 1]}…"
