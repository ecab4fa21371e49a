"""The report as one HTML page that needs nothing else: no script, no file, no network. Light and dark, wide and narrow.

It shows text from the corpus and pieces of vocabularies, so everything that goes into it is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from zero2all.common.files import human_bytes
from zero2all.tokenizer.lab.charts import COLOURS, bucket_name, colour, grouped_bars, legend, rank_curves, use_histogram
from zero2all.tokenizer.lab.segments import segmentation
from zero2all.tokenizer.lab.tables import LONGEST_COLUMN, evaluation_tables

STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --faint: #66717f; --line: #dfe4ea; --back: #ffffff; --panel: #f6f7f9;
  --c0: #2a78c8; --c1: #d9662b; --c2: #1f9d77; --c3: #8a5cc2; --c4: #c23b6b; --c5: #8c7a1c;
  --t0: #cfe3fa; --t1: #fddcc6; --t2: #c9ecdc; --t3: #e2d5f6; --t4: #f5eab5; --part: #f2c6c6; --never: #c9d0d8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --faint: #95a1af; --line: #313b46; --back: #12171d;
  --panel: #1a2129; --c0: #5aa2ee; --c1: #f08a52; --c2: #45c79c; --c3: #b08be6; --c4: #ec6c98; --c5: #cdb84a;
  --t0: #1d3a57; --t1: #53331f; --t2: #1d463a; --t3: #3a2e55; --t4: #474018; --part: #5b2b2f; --never: #46515d; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; color: var(--ink);
  background: var(--back); max-width: 1120px; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; }
h3 { font-size: .92rem; margin: 1.4rem 0 .4rem; color: var(--faint); font-weight: 600; }
p { margin: .4rem 0; } .faint { color: var(--faint); } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; font-size: .86rem; vertical-align: bottom; }
th:first-child, td:first-child, .text { text-align: left; } tr:last-child td { border-bottom: 0; }
td .best { font-weight: 700; } td small { color: var(--faint); white-space: nowrap; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; }
.panel { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1.1rem 1rem;
  min-width: 0; }
.panel h3 { margin-top: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: .3rem 0 .8rem; font-size: .9rem; }
.dot { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem; }
svg { width: 100%; height: auto; display: block; overflow: visible; } svg text { fill: var(--ink); font-size: 12px; }
svg .strong { font-weight: 600; font-size: 13px; } svg .figure { font-variant-numeric: tabular-nums; }
svg .tick { fill: var(--faint); font-size: 11px; } .middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); stroke-width: 1; } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.limit { stroke-width: 1; stroke-dasharray: 3 4; opacity: .7; }
.stack { display: flex; height: 22px; border-radius: 5px; overflow: hidden; gap: 1px; background: var(--back); }
.stack span { position: relative; display: block; min-width: 2px; } .stack span i { position: absolute; inset: 0; }
.stack b { position: absolute; inset: 0; text-align: center; font: 600 11px/22px system-ui, sans-serif; color:
  var(--ink); }
.never { background: repeating-linear-gradient(135deg, var(--never) 0 4px, var(--panel) 4px 7px); }
.cut { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; margin: .7rem 0; }
.cut > summary { cursor: pointer; padding: .55rem .9rem; font-weight: 600; }
.cut .body { padding: 0 .9rem .8rem; display: grid; gap: .9rem;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.who { display: flex; justify-content: space-between; font-size: .86rem; color: var(--faint); margin-bottom: .25rem; }
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 15px; line-height: 1.95; background: var(--back);
  border: 1px solid var(--line); border-radius: 6px; padding: .45rem .6rem; tab-size: 4; }
.code .tokens { font: 13px/1.95 ui-monospace, "SF Mono", Menlo, Consolas, "Noto Sans Mono CJK SC", monospace; }
.tokens i { font-style: normal; border-radius: 3px; padding: .12em 0; position: relative; outline: 0;
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.t0 { background: var(--t0); } .t1 { background: var(--t1); } .t2 { background: var(--t2); }  .t3 {
  background: var(--t3); } .t4 { background: var(--t4); }
.part { background: var(--part); font: 11px/1 ui-monospace, Menlo, Consolas, monospace; margin: 0 1px; }
.tokens i:hover, .tokens i:focus { box-shadow: 0 0 0 2px var(--ink); z-index: 2; }
.tokens i:hover::after, .tokens i:focus::after { content: attr(data-tip); position: absolute; left: 0; top: 1.9em;
  background: var(--ink); color: var(--back); font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace;
  padding: .2rem .5rem; border-radius: 5px; white-space: nowrap; z-index: 3; pointer-events: none; }
.chips { display: flex; flex-wrap: wrap; gap: .3rem; } .chips code { background: var(--back);
  border: 1px solid var(--line); border-radius: 5px; padding: .05rem .4rem; font-size: 12.5px; white-space: pre-wrap;
  overflow-wrap: anywhere; max-width: 100%; }
details summary { cursor: pointer; } dl { margin: .4rem 0; }
dt { font-weight: 600; float: left; clear: left; width: 6.2rem; }
dd { margin: 0 0 .3rem 6.4rem; color: var(--faint); }
html { overflow-x: clip; }
@media (max-width: 700px) { .tokens i:hover::after, .tokens i:focus::after { position: fixed; left: 50%; top: auto;
  bottom: 1rem; transform: translateX(-50%); font-size: 14px; max-width: 94vw; overflow: hidden; } }
@media (max-width: 560px) { body { padding: 1.2rem .8rem 3rem; } .panel { padding: .7rem .7rem .8rem; }
  th, td { padding: .3rem .4rem; } }
"""
STYLE += "".join(
    f".c{n} {{ background: var(--c{n}); fill: var(--c{n}); }} .sc{n} {{ stroke: var(--c{n}); }}\n"
    for n in range(COLOURS)
)


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
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Tokenizer evaluation</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


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
