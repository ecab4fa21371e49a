"""`report.html`: the report as one page that needs nothing else (`common/html.py`). Its looks are in `report.css`.

Plots are HTML bars; every figure in them also stands as text beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from zero2all.common.files import human_bytes, package_text
from zero2all.common.html import html_page
from zero2all.common.language import translate as t
from zero2all.common.progress import counted
from zero2all.corpus.clean.config import RULES
from zero2all.corpus.report import (
    EXAMPLE_CHARS,
    OTHER_REASONS,
    accounted_bytes,
    by_size,
    counts_in_words,
    facts_in_words,
    mapping_in_words,
    summary_rows,
)

REPORT_HTML_NAME = "report.html"

MANY_SOURCES = 6
"""With more, the names over the columns of a table stand upright."""
Source = Mapping[str, Any]
Sources = Mapping[str, Source]


def report_html(report: Mapping[str, Any]) -> str:
    """The whole page."""
    sources = report["sources"]
    anchors = {name: f"source-{number}" for number, name in enumerate(sources, 1)}
    body = [
        _headline(report["totals"]),
        _balance(sources),
        _make_up(sources),
        _sources_table(report, anchors),
        _rules_table(report, anchors),
        *(_source_section(name, source, anchors[name]) for name, source in sources.items()),
        _settings(report),
    ]
    style, script = (package_text(__package__, name) for name in ("report.css", "report.js"))
    return html_page(t("Corpus report"), style, body, script)


def _headline(totals: Mapping[str, Any]) -> str:
    dropped = sum(totals["dropped"].values())
    kept, valid = totals["records_kept"], totals["valid_records"]
    text_share = _share(totals["bytes_kept"], totals["bytes_in"])
    tiles = [
        ("text kept", human_bytes(totals["bytes_kept"]), t(f"{text_share} of the input text")),
        ("records kept", f"{kept:,}", t(f"of {totals['records_in']:,} read")),
        ("held out", f"{valid:,}", t(f"{_share(valid, kept)} of the kept records")),
        ("dropped", f"{dropped:,}", t(f"{_share(dropped, totals['records_in'])} of the records")),
        ("quarantined", f"{totals['quarantined']:,}", t("damaged items")),
    ]
    shown = "".join(
        f'<div class="tile"><dt>{t(label)}</dt><dd><b>{escape(value)}</b><span>{escape(under)}</span></dd></div>'
        for label, value, under in tiles
    )
    return f'<header><h1>{t("Corpus report")}</h1><dl class="tiles">{shown}</dl></header>'


def _balance(sources: Sources) -> str:
    """The two identities, in figures: what came in is what was kept and what was not."""
    total = Counter[str]()
    sizes = Counter[str](dict.fromkeys(("in", "kept", "dropped", "quarantined", "repaired"), 0))
    for source in sources.values():
        total.update({"in": source["records_in"], "kept": source["records_kept"]})
        total.update({"dropped": sum(source["dropped"].values()), "quarantined": source["quarantined"]})
        sizes.update({"in": source["bytes_in"], **accounted_bytes(source)})
    rows = "".join(
        f'<div class="balance"><h3>{t(title)}</h3>{_stacked(parts)}{_equation(parts)}</div>'
        for title, parts in (("Records", total), ("Bytes of text", sizes))
    )
    return f"<section><h2>{t('What became of the input')}</h2>{rows}</section>"


def _stacked(parts: Mapping[str, int]) -> str:
    """A bar of everything that came in; the equation below it has the figures."""
    bars = "".join(
        f'<i class="{name}" style="flex-grow:{size}" title="{t(name)}: {size:,} ({_share(size, parts["in"])})"></i>'
        for name, size in parts.items()
        if name != "in" and size
    )
    return f'<div class="stack" aria-hidden="true">{bars}</div>'


def _equation(parts: Mapping[str, int]) -> str:
    total, *terms = parts.items()
    words = " + ".join(
        f'<span class="term"><i class="key {name}"></i>{size:,} {t(name)}</span>'
        for name, size in terms
        if size or name in ("kept", "dropped", "quarantined")
    )
    holds = total[1] == sum(size for _, size in terms)
    mark = f'<b class="right">✓ {t("adds up")}</b>' if holds else f'<b class="wrong">✗ {t("does not add up")}</b>'
    return f'<p class="equation"><span class="term">{total[1]:,} {t("in")}</span> = {words} {mark}</p>'


def _make_up(sources: Sources) -> str:
    """How much of the text each channel and source has; nothing to say of one source."""
    total = sum(source["bytes_kept"] for source in sources.values())
    if len(sources) < 2 or not total:
        return ""
    channels: dict[str, dict[str, int]] = {}
    for name, source in sources.items():
        channels.setdefault(source["channel"], {})[name] = source["bytes_kept"]
    rows = []
    top = max(sum(of_channel.values()) for of_channel in channels.values())
    for channel, of_channel in sorted(channels.items(), key=lambda pair: -sum(pair[1].values())):
        size = sum(of_channel.values())
        bars = "".join(
            f'<i style="flex-grow:{part}" title="{escape(name)}: {human_bytes(part)}"></i>'
            for name, part in of_channel.items()
            if part
        )
        names = escape(", ".join(of_channel))
        rows.append(
            f'<div class="row"><span class="name">{escape(channel)}</span>'
            f'<span class="track"><span class="cut" style="width:{100 * size / top:.2f}%">{bars}</span></span>'
            f'<span class="figure">{human_bytes(size)} · {_share(size, total)}</span>'
            f'<span class="under">{names}</span></div>'
        )
    return f'<section><h2>{t("Channels, by text kept")}</h2><div class="bars">{"".join(rows)}</div></section>'


def _sources_table(report: Mapping[str, Any], anchors: Mapping[str, str]) -> str:
    heading, *rows = summary_rows(report)
    head = "".join(f'<th scope="col">{t(name)}</th>' for name in [*heading, "of the bytes read"])
    body = "".join(
        f'<tr><th scope="row"><a href="#{anchors[name]}">{escape(name)}</a></th>{_cells(figures)}'
        f"<td>{_share_bar(report['sources'][name])}</td></tr>"
        for name, *figures in rows[: len(anchors)]
    )
    foot = "".join(
        f'<tfoot><tr><th scope="row">{name}</th>{_cells(figures)}<td></td></tr></tfoot>'
        for name, *figures in rows[len(anchors) :]
    )
    return (
        f'<section><h2>{t("Sources")}</h2><div class="wide" tabindex="0" role="region" aria-label="{t("Sources")}">'
        f'<table class="sources"><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div></section>'
    )


def _cells(figures: Sequence[str]) -> str:
    return "".join(f"<td>{escape(figure)}</td>" for figure in figures)


def _share_bar(source: Source) -> str:
    parts = {"in": source["bytes_in"], **accounted_bytes(source)}
    words = ", ".join(f"{t(name)} {_share(size, parts['in'])}" for name, size in parts.items() if size and name != "in")
    return f'<div role="img" aria-label="{words}">{_stacked(parts)}</div>'


def _rules_table(report: Mapping[str, Any], anchors: Mapping[str, str]) -> str:
    """What each rule dropped from each source; one source has the same in its own section."""
    sources = report["sources"]
    totals = report["totals"]["dropped"]
    if len(sources) < 2 or not totals:
        return ""
    most = max(
        count / max(source["records_in"], 1) for source in sources.values() for count in source["dropped"].values()
    )
    kind = "rules many" if len(sources) > MANY_SOURCES else "rules"
    names = "".join(f'<th scope="col"><a href="#{anchors[name]}">{escape(name)}</a></th>' for name in sources)
    rows = []
    for rule, total in by_size(totals):
        cells = []
        for source in sources.values():
            count = source["dropped"].get(rule, 0)
            share = count / max(source["records_in"], 1)
            heat = (share / most) ** 0.5
            cells.append(
                f'<td class="heat" style="--heat:{heat:.3f}" title="{t(f"{share:.2%} of its records")}">'
                f"<span>{count:,}</span></td>"
                if count
                else '<td class="none">·</td>'
            )
        label = f'<th scope="row"><code>{escape(rule)}</code><small>{escape(_meaning(rule))}</small></th>'
        rows.append(f"<tr>{label}<td><b>{total:,}</b></td>{''.join(cells)}</tr>")
    title = t("Dropped, by rule and source")
    explained = t(
        "The figures are records. A deeper colour means a larger share of that source. Samples are listed below, under "
        "each source."
    )
    return (
        f'<section><h2>{title}</h2><p class="faint">{explained}</p>'
        f'<div class="wide" tabindex="0" role="region" aria-label="{title}"><table class="{kind}"><thead>'
        f'<tr><th scope="col">{t("rule")}</th><th scope="col">{t("all")}</th>{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _settings(report: Mapping[str, Any]) -> str:
    """What the build was told, and the name of everything that decided it."""
    rows = "".join(
        f'<tr><th scope="row"><code>{escape(name)}</code></th><td>{escape(value)}</td></tr>'
        for name, value in _flattened(report["options"])
    )
    notes = "".join(f"<li>{escape(t(note))}</li>" for note in report["notes"])
    return (
        (f"<section><h2>{t('Notes')}</h2><ul>{notes}</ul></section>" if notes else "")
        + f"<section><h2>{t('How it was built')}</h2><details><summary>{t('Settings')}</summary>"
        + f'<div class="wide"><table class="settings"><tbody>{rows}</tbody></table></div></details>'
        + f'<p class="faint">{t("Fingerprint of files, settings and rules")}: <code>{escape(report["inputs"])}</code>. '
        + f"{t('The same files, settings and rules give the same records, byte for byte.')}</p></section>"
    )


def _flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            words = t("defaults of each channel") if value == {} else str(value)
            yield f"{prefix}{name}", f"{value:,}" if type(value) is int else words


def _source_section(name: str, source: Source, anchor: str) -> str:
    scripts = {script: (shares["bytes"], human_bytes(shares["bytes"])) for script, shares in source["scripts"].items()}
    lows = [(int(low), count) for low, count in source["length_histogram"].items()]
    lengths = {f"{_binary_size(low)}–{_binary_size(2 * low)}": (count, f"{count:,}") for low, count in lows}
    plots = [_bars(lengths), _bars(scripts)]
    facts = "".join(f"<div><dt>{t(label)}</dt><dd>{escape(t(words))}</dd></div>" for label, words in _facts(source))
    kept = _texts(source["examples"]["kept"], source["channel"])
    captions = [t("Length of the kept texts"), t("Scripts, by bytes of kept text")]
    parts = [
        f'<section class="source" id="{anchor}"><h2>{escape(name)} ',
        f'<span class="chip">{escape(source["channel"])}</span></h2><dl class="facts">{facts}</dl>',
        f'<div class="plots"><figure><figcaption>{captions[0]}</figcaption>{plots[0]}</figure>',
        f"<figure><figcaption>{captions[1]}</figcaption>{plots[1]}</figure></div>",
        _dropped(source),
        _quarantined(name, source),
    ]
    if source["examples"]["kept"]:
        parts.append(f'<details class="samples"><summary>{t("The first kept texts")}</summary>{kept}</details>')
    return "".join(parts) + "</section>"


def _facts(source: Source) -> Iterator[tuple[str, str]]:
    """What is to be said of a source in a line each."""
    formats = source["formats"]
    kinds = ", ".join(t(kind) if len(formats) == 1 else f"{count:,} {t(kind)}" for kind, count in formats.items())
    files, size = counted(source["input_files"], "file"), human_bytes(source["input_file_bytes"])
    yield "files", f"{files} ({kinds}), {size} on disk" if kinds else f"{files}, {size} on disk"
    if source["skipped_files"]:
        yield "not read", counts_in_words(source["skipped_files"])
    if source["channel_guessed"]:
        yield "channel", f"{source['channel']} (guessed: {t(source['channel_reason'])})"
    else:
        yield "channel", f"{source['channel']} ({t(source['channel_reason'])})"
    for mapping in source["mappings"]:
        words = mapping_in_words(mapping)
        yield "fields", f"{words} (guessed)" if source["mapping_guessed"] else words
    kept = source["records_kept"]
    if kept:
        mean = human_bytes(source["bytes_kept"] / kept)
        yield "kept", f"{kept:,} of {source['records_in']:,} records, {mean} of text each on average"
    if source["masked"]:
        yield "masked", counts_in_words(source["masked"])
    yield from facts_in_words(source).items()
    for note in source["reading_notes"]:
        yield "note", note


def _bars(parts: Mapping[str, tuple[int, str]]) -> str:
    """A bar for each part: its size, and that in words."""
    total = sum(size for size, _ in parts.values()) or 1
    bars = "".join(_bar(name, size, total, words) for name, (size, words) in parts.items())
    return f'<div class="bars">{bars}</div>' if parts else f'<p class="faint">{t("nothing was kept")}</p>'


def _bar(name: str, size: int, total: int, words: str) -> str:
    return (
        f'<div class="row"><span class="name">{escape(name)}</span><span class="track">'
        f'<span class="fill" style="width:{100 * size / total:.2f}%"></span></span>'
        f'<span class="figure">{escape(words)} · {_share(size, total)}</span></div>'
    )


def _dropped(source: Source) -> str:
    """A line for each rule, which opens to show what it dropped."""
    if not source["dropped"]:
        return f'<h3>{t("Dropped")}</h3><p class="faint">{t("no record")}</p>'
    top = max(source["dropped"].values())
    rules = []
    for rule, count in by_size(source["dropped"]):
        share = _share(count, source["records_in"])
        line = (
            f"<summary><code>{escape(rule)}</code>"
            f'<span class="track"><span class="fill dropped" style="width:{100 * count / top:.2f}%"></span></span>'
            f'<span class="figure">{count:,} · {share}</span><small>{escape(_meaning(rule))}</small></summary>'
        )
        texts = _texts(source["examples"]["dropped"].get(rule, []), source["channel"])
        rules.append(f'<details class="rule">{line}{texts}</details>')
    return f"<h3>{t('Dropped, by rule (share of the records read)')}</h3>{''.join(rules)}"


def _quarantined(name: str, source: Source) -> str:
    if not source["quarantined"]:
        return ""
    reasons = by_size(source["quarantined_by_reason"])
    bars = "".join(_bar(reason, count, source["quarantined"], f"{count:,}") for reason, count in reasons)
    where = f"corpus/quarantine/{name}.jsonl"
    return (
        f'<h3>{t("Quarantined, by reason")}</h3><div class="bars damaged">{bars}</div>'
        f'<p class="faint">{t("Each item with its file, place and beginning:")} <code>{escape(where)}</code></p>'
    )


def _texts(texts: Sequence[str], channel: str) -> str:
    """Texts of the corpus, with a mark where one was cut; the language decides how Han characters are drawn."""
    if not texts:
        return f'<p class="faint">{t("no sample was kept")}</p>'
    language = ' lang="zh"' if channel == "zh" else ""
    kind = "code" if channel == "code" else "prose"
    shown = [f"{text} …" if len(text) >= EXAMPLE_CHARS else text for text in texts]
    return "".join(f'<pre class="{kind}"{language} dir="auto">{escape(text) or " "}</pre>' for text in shown)


def _binary_size(count: int) -> str:
    """2048 -> '2 KiB'."""
    power = min((count.bit_length() - 1) // 10, 3)
    return f"{count >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _meaning(rule: str) -> str:
    """A rule in a sentence."""
    return t({**OTHER_REASONS, **RULES}.get(rule, ""))


def _share(part: float, whole: float) -> str:
    """0.9987 -> '99.9%'; never rounds a remainder away."""
    share = part / whole if whole else 0.0
    if 0 < share < 0.001:
        return t("under 0.1%")
    return t("over 99.9%") if 0.9995 <= share < 1 else f"{share:.1%}"
