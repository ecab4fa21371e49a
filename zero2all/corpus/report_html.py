"""`report.html`: the report as one page that needs nothing else. Plots are small SVG drawings made here.

The page holds text from the corpus, so everything that goes into it is escaped, and it has no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from zero2all.common.files import human_bytes
from zero2all.corpus.report import mapping_in_words, summary_notes

REPORT_HTML_NAME = "report.html"

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --faint: #64748b; --line: #d7dee6; --back: #fff; --panel: #f6f8fa;
        --kept: #2f7d5b; --dropped: #c77d2e; --damaged: #b3403a; --bar: #3c6e9f; }
@media (prefers-color-scheme: dark) {
:root { --ink: #e3e8ee; --faint: #93a1b1; --line: #36414d; --back: #14191f; --panel: #1c232b;
        --kept: #54b58b; --dropped: #dfa05a; --damaged: #df726b; --bar: #6ea6dc; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; color: var(--ink);
       background: var(--back); max-width: 1080px; margin: 0 auto; padding: 2rem 1.2rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .3rem; color: var(--faint); font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; } th:first-child, td:first-child, .text { text-align: left; }
.wide { overflow-x: auto; } .faint { color: var(--faint); } section { border-top: 1px solid var(--line); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 1.2rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 11px; }
svg .faint { fill: var(--faint); } .share { height: 10px; border-radius: 3px; overflow: hidden; display: flex; }
.share i { display: block; height: 100%; } .kept { background: var(--kept); } .dropped { background: var(--dropped); }
.damaged { background: var(--damaged); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border: 1px solid var(--line);
      border-radius: 6px; padding: .6rem .8rem; margin: .4rem 0; font-size: 13px; max-height: 12rem; overflow-y: auto; }
summary { cursor: pointer; padding: .25rem 0; } ul { margin: .3rem 0; padding-left: 1.2rem; }
"""


def report_html(report: Mapping[str, Any]) -> str:
    """The whole page."""
    totals, sources = report["totals"], report["sources"]
    dropped = sum(totals["dropped"].values())
    lead = (
        f"{totals['records_in']:,} records came in: {totals['records_kept']:,} kept "
        f"({totals['valid_records']:,} of them held out), {dropped:,} dropped, {totals['quarantined']:,} quarantined. "
        f"{human_bytes(totals['bytes_kept'])} of text."
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in summary_notes(dict(report)))
    body = [
        "<h1>Corpus</h1>",
        f'<p class="faint">{escape(lead)}</p>',
        _sources_table(sources),
        f"<h3>Notes</h3><ul>{notes}</ul>" if notes else "",
        *(_source_section(name, source) for name, source in sources.items()),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Corpus report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _sources_table(sources: Mapping[str, Mapping[str, Any]]) -> str:
    heading = ("source", "channel", "records in", "kept", "dropped", "quarantined", "train", "valid", "text kept")
    rows = ["".join(f"<th>{name}</th>" for name in heading) + '<th class="text">of the bytes read</th>']
    for name, source in sources.items():
        counts = (
            source["records_in"],
            source["records_kept"],
            sum(source["dropped"].values()),
            source["quarantined"],
            source["train_records"],
            source["valid_records"],
        )
        cells = [escape(name), escape(source["channel"]), *(f"{count:,}" for count in counts)]
        cells.append(human_bytes(source["bytes_kept"]))
        rows.append("".join(f"<td>{cell}</td>" for cell in cells) + f"<td>{_share_bar(source)}</td>")
    return '<div class="wide"><table>' + "".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"


def _share_bar(source: Mapping[str, Any]) -> str:
    total = max(source["bytes_in"], 1)
    parts = {
        "kept": source["bytes_kept"],
        "dropped": sum(source["bytes_dropped"].values()),
        "damaged": source["bytes_quarantined"],
    }
    bars = "".join(f'<i class="{kind}" style="width:{100 * size / total:.2f}%"></i>' for kind, size in parts.items())
    words = ", ".join(f"{kind} {size / total:.1%}" for kind, size in parts.items())
    return f'<div class="share" title="{words}" style="min-width:120px;background:var(--line)">{bars}</div>'


def _source_section(name: str, source: Mapping[str, Any]) -> str:
    facts = [
        f"channel {source['channel']} ({source['channel_reason']})",
        f"{source['input_files']:,} files, {human_bytes(source['input_file_bytes'])} on disk",
        *(f"{count:,} {kind}" for kind, count in source["formats"].items()),
        *(mapping_in_words(mapping) for mapping in source["mappings"]),
    ]
    lengths = {int(low): count for low, count in source["length_histogram"].items()}
    scripts = {script: shares["bytes"] for script, shares in source["scripts"].items()}
    dropped = sorted(source["dropped"].items(), key=lambda pair: (-pair[1], pair[0]))
    parts = [
        f'<section><h2>{escape(name)}</h2><p class="faint">{escape("; ".join(facts))}</p><div class="plots">',
        f"<div><h3>Length of the kept texts, in bytes</h3>{length_plot(lengths)}</div>",
        f"<div><h3>Scripts, by bytes of kept text</h3>{bar_plot(list(scripts.items()), human_bytes)}</div>",
        "</div>",
    ]
    if dropped:
        parts.append(f"<h3>Dropped, by rule</h3>{bar_plot(dropped, lambda count: f'{count:,.0f}', 'var(--dropped)')}")
        parts += [_examples(f"dropped by {rule}", source["examples"]["dropped"].get(rule, [])) for rule, _ in dropped]
    if source["quarantined"]:
        reasons = sorted(source["quarantined_by_reason"].items(), key=lambda pair: (-pair[1], pair[0]))
        plot = bar_plot(reasons, lambda count: f"{count:,.0f}", "var(--damaged)")
        parts.append(f"<h3>Quarantined, by reason (each item: quarantine/{escape(name)}.jsonl)</h3>{plot}")
    parts.append(_examples("kept", source["examples"]["kept"]))
    return "".join(parts) + "</section>"


def _examples(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    shown = "".join(f"<pre>{escape(text)}</pre>" for text in texts)
    return f"<details><summary>Examples: {escape(title)}</summary>{shown}</details>"


def length_plot(lengths: Mapping[int, int]) -> str:
    """A histogram over powers of two, as SVG."""
    if not lengths:
        return '<p class="faint">nothing was kept</p>'
    first, last = min(lengths).bit_length() - 1, max(lengths).bit_length() - 1
    buckets = range(first, last + 1)
    top = max(lengths.values())
    width, height, base = 480, 180, 150
    step = (width - 10) / len(buckets)
    shapes = []
    for place, bucket in enumerate(buckets):
        count = lengths.get(1 << bucket, 0)
        tall = 125 * count / top
        x = 5 + place * step
        shapes.append(
            f'<rect x="{x + 1:.1f}" y="{base - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}" fill="var(--bar)">'
            f"<title>{human_bytes(1 << bucket)} to {human_bytes(2 << bucket)}: {count:,} records</title></rect>"
        )
        if len(buckets) <= 12 or place % 2 == 0:
            label = human_bytes(1 << bucket).replace(".0 ", " ").replace(" B", "").replace(" ", "")
            shapes.append(f'<text class="faint" x="{x:.1f}" y="{base + 16}">{label}</text>')
    shapes.append(f'<line x1="5" x2="{width - 5}" y1="{base}" y2="{base}" stroke="var(--line)"/>')
    shapes.append(f'<text class="faint" x="5" y="14">{top:,} records in the highest bar</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="length histogram">{"".join(shapes)}</svg>'


def bar_plot(values: Sequence[tuple[str, float]], words: Any, colour: str = "var(--bar)") -> str:
    """Horizontal bars with their share of the sum, as SVG."""
    if not values:
        return '<p class="faint">nothing was kept</p>'
    total = sum(value for _, value in values) or 1
    top = max(value for _, value in values) or 1
    width, row = 480, 20
    shapes = []
    for place, (name, value) in enumerate(values):
        y = place * row
        long = max(200 * value / top, 1)
        shapes.append(
            f'<text x="0" y="{y + 14}">{escape(name)}</text>'
            f'<rect x="150" y="{y + 4}" width="{long:.1f}" height="12" rx="2" fill="{colour}"/>'
            f'<text class="faint" x="{156 + long:.1f}" y="{y + 14}">{escape(words(value))} ({value / total:.1%})</text>'
        )
    height = row * len(values)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="shares">{"".join(shapes)}</svg>'
