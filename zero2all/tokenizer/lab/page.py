"""The report as one HTML page that needs nothing else: no script, no file, no network. Light and dark, wide and narrow.

It shows text from the corpus and pieces of vocabularies, so everything that goes into it is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from zero2all.common.files import human_bytes, package_text
from zero2all.common.html import html_page
from zero2all.tokenizer.lab.charts import COLOURS, bucket_name, colour, grouped_bars, legend, rank_curves, use_histogram
from zero2all.tokenizer.lab.segments import segmentation
from zero2all.tokenizer.lab.tables import LONGEST_COLUMN, evaluation_tables


def evaluation_page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    names = [tokenizer["name"] for tokenizer in report["tokenizers"]]
    body = [
        _heading(report),
        legend(names) if len(names) > 1 else "",
        _charts(report),
        _tables(report),
        _segmentations(report),
        _junk(report),
        _longest(report),
    ]
    style = package_text(__package__, "page.css") + "".join(
        f".c{n} {{ background: var(--c{n}); fill: var(--c{n}); }} .sc{n} {{ stroke: var(--c{n}); }}\n"
        for n in range(COLOURS)
    )
    return html_page("Tokenizer evaluation", style, body)


def _heading(report: Mapping[str, Any]) -> str:
    ours = report["tokenizers"][0]
    channels = report["text"]["channels"]
    text = ", ".join(
        f"{name} {facts['documents']:,} documents ({human_bytes(facts['bytes'])})" for name, facts in channels.items()
    )
    ratios = ", ".join(f"{ours['channels'][name]['bytes_per_token']:.2f} in {name}" for name in channels)
    back = ours["round_trip"]
    whole = (
        f"All {back['documents']:,} documents come back from their tokens exactly."
        if not back["changed"]
        else f"{back['changed']:,} of {back['documents']:,} documents come back changed."
    )
    return (
        f"<h1>{escape(str(round(ours['bytes_per_token'], 2)))} bytes per token with {ours['vocab_size']:,} ids</h1>"
        f'<p class="faint">Bytes per token: {escape(ratios)}. Judged on the {escape(report["text"]["split"])} text: '
        f"{escape(text)}. {escape(whole)}</p>"
    )


def _charts(report: Mapping[str, Any]) -> str:
    tokenizers = report["tokenizers"]
    channels = list(report["text"]["channels"])

    def bars(field: str, words: str) -> str:
        series = [(each["name"], [each["channels"][channel][field] for channel in channels]) for each in tokenizers]
        return grouped_bars(channels, series, words)

    curves = [(each["name"], each["vocabulary_use"]["by_rank"], each["pieces"]) for each in tokenizers]
    stacks = "".join(
        f'<p class="who"><span>{escape(each["name"])}</span><span>{each["vocabulary_use"]["share_used"]:.1%} of '
        f"{each['pieces']:,} pieces used</span></p>{use_histogram(each['vocabulary_use']['histogram'], number)}"
        for number, each in enumerate(tokenizers)
    )
    buckets = ", ".join(bucket_name(bucket) for bucket in tokenizers[0]["vocabulary_use"]["histogram"])
    return (
        '<h2>At a glance</h2><div class="panels">'
        f"{_panel('Bytes per token, by channel (more is better)', bars('bytes_per_token', '{:.2f}'))}"
        f"{_panel('Tokens per character (fewer is better)', bars('tokens_per_character', '{:.3f}'))}"
        f"{_panel('Use of the vocabulary by rank (dashed: all its pieces)', rank_curves(curves))}"
        f'<div class="panel"><h3>Share of the pieces by how often they were used</h3>{stacks}'
        f'<p class="faint"><small>From left to right: {escape(buckets)}.</small></p></div></div>'
    )


def _panel(title: str, drawing: str) -> str:
    return f'<div class="panel"><h3>{escape(title)}</h3>{drawing}</div>'


def _tables(report: Mapping[str, Any]) -> str:
    parts = ["<h2>Figures</h2>"]
    for table in evaluation_tables(report)[:4]:
        # The longest pieces have a part of the page to themselves.
        heading, *rows = [row[:-1] if table.rows[0][-1] == LONGEST_COLUMN else row for row in table.rows]
        head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        notes = "".join(f'<p class="faint">{escape(note)}</p>' for note in table.notes)
        parts.append(
            f'<h3>{escape(table.title)}</h3><div class="wide"><table><tr>{head}</tr>{lines}</table></div>{notes}'
        )
    return "".join(parts)


def _segmentations(report: Mapping[str, Any]) -> str:
    parts = [
        "<h2>How text is cut</h2>",
        '<p class="faint">Each colour is one token; point at it or touch it for its id and bytes. '
        '<span class="part">E4 BD</span> is a token that ends inside a character.</p>',
    ]
    for place, excerpt in enumerate(report["excerpts"]):
        rows = []
        for number, tokenizer in enumerate(report["tokenizers"]):
            tokens = tokenizer["segments"][place]
            rows.append(
                f'<div><div class="who"><span><i class="dot {colour(number)}"></i>{escape(tokenizer["name"])}</span>'
                f'<span>{len(tokens):,} tokens</span></div><div class="tokens">{segmentation(tokens)}</div></div>'
            )
        code = " code" if excerpt["title"].startswith(("code", "indentation", "numbers")) else ""
        opened = "" if excerpt["title"] == "indentation" else " open"
        parts.append(
            f'<details class="cut{code}"{opened}><summary>{escape(excerpt["title"])}</summary>'
            f'<div class="body">{"".join(rows)}</div></details>'
        )
    return "".join(parts)


def _junk(report: Mapping[str, Any]) -> str:
    meanings = "".join(
        f"<dt>{escape(sort)}</dt><dd>{escape(meaning)}</dd>" for sort, meaning in report["junk_definitions"].items()
    )
    head = "".join(f"<th>{escape(sort)}</th>" for sort in report["junk_definitions"])
    rows = []
    for tokenizer in report["tokenizers"]:
        cells = "".join(
            f"<td>{junk['pieces']:,} <small>{junk['share_of_vocabulary']:.1%}</small></td>"
            for junk in tokenizer["junk"].values()
        )
        rows.append(f"<tr><td>{escape(tokenizer['name'])}</td>{cells}</tr>")
    examples = []
    for tokenizer in report["tokenizers"]:
        inner = "".join(
            f"<h3>{escape(sort)}</h3>{_chips(junk['examples'])}"
            for sort, junk in tokenizer["junk"].items()
            if junk["examples"]
        )
        examples.append(f"<details><summary>Examples: {escape(tokenizer['name'])}</summary>{inner}</details>")
    return (
        f'<h2>Junk pieces</h2><div class="wide"><table><tr><th>tokenizer</th>{head}</tr>{"".join(rows)}</table></div>'
        f"<dl>{meanings}</dl>{''.join(examples)}"
    )


def _longest(report: Mapping[str, Any]) -> str:
    parts = ["<h2>Longest pieces</h2>"]
    for number, tokenizer in enumerate(report["tokenizers"]):
        parts.append(
            f'<h3><i class="dot {colour(number)}"></i>{escape(tokenizer["name"])}</h3>{_chips(tokenizer["longest"])}'
        )
    return "".join(parts)


def _chips(entries: Sequence[Mapping[str, Any]]) -> str:
    chips = []
    for entry in entries:
        facts = [f"id {entry['id']}"]
        if "bytes" in entry:
            facts += [f"{entry['bytes']} bytes", f"used {entry['used']:,} times"]
        shown = entry["piece"].replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
        if shown.strip() != shown or "  " in shown:
            shown = shown.replace(" ", "·")
        shown = shown if len(shown) <= 60 else f"{shown[:56]}… ({len(shown)})"
        chips.append(f'<code title="{escape(", ".join(facts))}">{escape(shown)}</code>')
    return f'<div class="chips">{"".join(chips)}</div>'
