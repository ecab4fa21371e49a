"""An incident, as one HTML page that needs nothing else (`common/html.py`) and as text for a terminal.

Both show text from the corpus. On the terminal, characters that could move the cursor or colour the screen are
replaced. matplotlib could draw the curves, but a machine that only trains does not have it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from zero2all.common.files import package_text
from zero2all.common.html import html_page
from zero2all.common.language import flush_right, padded
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, terminal_safe

TITLES = {
    "loss_spike": "Loss spike",
    "grad_spike": "Gradient spike",
    "loss_drop": "Sudden drop of the loss",
    "nonfinite": "NaN or infinite step",
    "level_shift": "The loss has a new level",
}
ACTIONS = {
    "continue": "Nothing was changed. The run continues.",
    "skip": "The data was skipped. The run continues.",
    "rollback": "The run went back to a checkpoint and skips the data.",
    "stop": "The run was stopped (exit code 12).",
}
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 180, 56, 22


@dataclass(frozen=True)
class Incident:
    """What happened at a step, what was done, and what to do."""

    run: str
    step: int
    kind: str
    findings: list[dict[str, Any]]
    action: str  # continue, skip, rollback or stop
    done: str  # A sentence for people
    curve: list[list[Any]]
    """[step, loss, gradient norm, whether it stood out], oldest first; null where not finite."""
    channels: list[list[Any]]  # [channel, usual loss, loss in this step]
    advice: list[dict[str, str]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the step with their documents."""
    samples_note: str = ""  # which rows these are, and why not all
    row_losses: list[float | None] = field(default_factory=list)
    """Mean loss of each row of the step, where it was recorded."""
    tokens: list[int] = field(default_factory=list)  # first and end token of the step
    skipped: dict[str, Any] | None = None
    """The decision to skip data, as in skipped.json; None where there was none."""

    def name(self) -> str:
        """Of its files, without their ending."""
        return f"{self.step}-{self.kind}"


def incident_html(incident: Incident) -> str:
    """The whole page."""
    title = t(f"{TITLES.get(incident.kind, incident.kind)}, step {incident.step:,}")
    action = t(ACTIONS.get(incident.action, incident.action))
    body = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="dim">{t("Run")} {_e(incident.run)}</p>',
        f'<p class="done"><b>{_e(action)}</b><br>{_e(t(incident.done))}</p>',
        _list(t("What was found"), incident.findings),
        _list(t("What to do"), incident.advice),
        _curve(incident, 1, t("Loss")),
        _curve(incident, 2, t("Gradient norm")),
        _channels(incident),
        _samples(incident),
    ]
    return html_page(title, package_text(__package__, "page.css"), body)


def incident_text(incident: Incident) -> str:
    """The same for a terminal."""
    return "\n".join(_text_lines(incident)) + "\n"


def _list(title: str, lines: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(f"<li>{_e(t(line['text']))}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{items}</ul>"


def _channels(incident: Incident) -> str:
    if not incident.channels:
        return ""
    rows = []
    for name, before, now in incident.channels:
        change = None if before is None or now is None else now - before
        mark = " up" if change is not None and before and change > 0.1 * before else ""
        cells = (
            f'<td class="n">{_n(before)}</td><td class="n">{_n(now)}</td><td class="n{mark}">{_n(change, "+.4g")}</td>'
        )
        rows.append(f"<tr><td>{_e(name)}</td>{cells}</tr>")
    figures = "".join(f'<th class="n">{t(name)}</th>' for name in ("usual", "this step", "change"))
    head = f"<tr><th>{t('channel')}</th>{figures}</tr>"
    return f"<h2>{t('Loss per channel')}</h2><table>{head}{''.join(rows)}</table>"


def _curve(incident: Incident, column: int, title: str) -> str:
    """A line over the steps around the incident; steps that stood out are dots."""
    points = [(row[0], row[column], row[3]) for row in incident.curve if row[column] is not None]
    if len(points) < 2:
        return ""
    steps, values = [point[0] for point in points], [float(point[1]) for point in points]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (step - steps[0]) / max(1, steps[-1] - steps[0]) * (WIDTH - LEFT - 8)
        return across, (HEIGHT - BOTTOM) * (1 - (value - low) / (high - low))

    line = " ".join("{:.1f},{:.1f}".format(*place(step, value)) for step, value, _ in points)
    dots = "".join(
        '<circle class="bad" cx="{:.1f}" cy="{:.1f}" r="3"/>'.format(*place(step, value))
        for step, value, flagged in points
        if flagged
    )
    base = HEIGHT - BOTTOM
    return (
        f"<h2>{_e(title)}</h2>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{_e(title)}: {_n(values[0])} – {_n(values[-1])}">'
        f'<line class="axis" x1="{LEFT}" y1="0" x2="{LEFT}" y2="{base}"/>'
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>'
        f'<text x="2" y="11">{_n(high)}</text><text x="2" y="{base - 2}">{_n(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{t(f"step {steps[0]:,}")}</text>'
        f'<text x="{WIDTH - 4}" y="{HEIGHT - 6}" text-anchor="end">{t(f"step {steps[-1]:,}")}</text>'
        f'<polyline class="curve" points="{line}"/>{dots}</svg>'
    )


def _samples(incident: Incident) -> str:
    if not incident.samples and not incident.samples_note:
        return ""
    parts = [f"<h2>{t('Documents')}</h2><p class='dim'>{_e(t(incident.samples_note))}</p>"]
    for sample in incident.samples:
        parts.append(f"<h3>{_e(_sample_heading(sample))}</h3>")
        parts += (
            f'<div class="dim">{_e(_document_heading(document))}</div><pre>{_e(_excerpt(document))}</pre>'
            for document in sample["documents"]
        )
    return "".join(parts)


def _e(value: Any) -> str:
    """Escaped; control characters, which no page may hold, become visible."""
    return escape(terminal_safe(str(value), keep=TEXT_MARKS))


def _n(value: float | None, style: str = ".4g") -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, style)


def _text_lines(incident: Incident) -> Iterator[str]:
    title = TITLES.get(incident.kind, incident.kind)
    yield t(f"{title}, step {incident.step:,}, run {terminal_safe(incident.run)}")
    yield f"  {t(ACTIONS.get(incident.action, incident.action))}"
    yield f"  {t(terminal_safe(incident.done))}"
    yield ""
    yield from (f"  {t('found')}: {t(terminal_safe(finding['text']))}" for finding in incident.findings)
    yield from (f"  {t('advice')}: {t(terminal_safe(line['text']))}" for line in incident.advice)
    if incident.channels:
        yield ""
        yield f"  {padded(t('channel'), 20)} {flush_right(t('usual'), 10)} {flush_right(t('this step'), 10)}"
        yield from (f"  {terminal_safe(name):<20} {_n(old):>10} {_n(new):>10}" for name, old, new in incident.channels)
    if incident.samples_note:
        yield ""
        yield f"  {t(terminal_safe(incident.samples_note))}"
    for sample in incident.samples:
        yield f"── {terminal_safe(_sample_heading(sample))}"
        for document in sample["documents"]:
            yield f"   {terminal_safe(_document_heading(document))}"
            yield from (f"   {line}" for line in terminal_safe(_excerpt(document), keep=TEXT_MARKS).split("\n"))


def _sample_heading(sample: dict[str, Any]) -> str:
    where = t(f"source {sample['source']}, channel {sample['channel']}, shard {sample['shard']}")
    if sample["row"] is None:
        return where
    row = t(f"row {sample['row']}")
    if sample.get("loss") is not None:
        row = t(f"row {sample['row']}, loss {sample['loss']:.4g}")
    number = t(f"sample {sample['sample']:,}")
    return f"{row}: {where}, {number}"


def _document_heading(document: dict[str, Any]) -> str:
    last = document["first_column"] + document["tokens"] - 1
    facts = [t(f"document {document['number']:,}, tokens {document['first_column']} to {last}")]
    if document["gid"] is not None and not document["origin"]:  # an origin ends with the gid
        facts.append(f"gid {document['gid']}")
    facts += [f"“{document['title']}”"] if document["title"] else []
    return "; ".join([", ".join(facts), *([document["origin"]] if document["origin"] else [])])


def _excerpt(document: dict[str, Any]) -> str:
    return f"{document['text']} …" if document["is_cut"] else str(document["text"])
