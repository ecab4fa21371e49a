"""The figures for the terminal: tables with a row for each tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.progress import counted

SHOWN_PIECES = 6
SHOWN_CHARACTERS = 18


@dataclass(frozen=True)
class TextTable:
    """Rows, the first of which is the heading."""

    title: str
    rows: Sequence[Sequence[str]]
    notes: list[str] = field(default_factory=list)


def evaluation_tables(report: Mapping[str, Any]) -> list[TextTable]:
    """What `z2a tokenizer eval` prints."""
    return [_compression(report), _speed(report), _vocabulary(report), _junk(report)]


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
            *("bytes in split characters", "longest pieces"),
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
