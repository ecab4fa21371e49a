"""All figures about each tokenizer, as plain JSON, and as tables with a row for each tokenizer.

Bytes are UTF-8 bytes of the corpus text, tokens are those of text (no begin or end marks), speed is megabytes per
second of processor time. Every figure is over the same documents for all tokenizers.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import human_bytes
from zero2all.common.language import translate as t
from zero2all.common.progress import counted, progress
from zero2all.tokenizer.encoders import EncodedBatch
from zero2all.tokenizer.lab.candidates import EvalText, TokenizerCandidate
from zero2all.tokenizer.text import is_utf8

BATCH_DOCUMENTS = 128
LONGEST_PIECES = 24
JUNK_EXAMPLES = 12
SHOWN_PIECES, SHOWN_CHARACTERS = 6, 18
"""In tables."""
JUNK = {
    "broken": (
        "not valid UTF-8: begins or ends inside a character (includes beginnings of characters, which a "
        "byte-level vocabulary needs)"
    ),
    "repeated": "one character or two in turn, at least 6 times (----------, 哈哈哈哈哈哈); white space only beyond 16",
    "web": "part of an address or of markup: http, www., .com, .html, &nbsp;, </div, %E4 and the like",
    "clause": "a whole Chinese clause: at least 8 Han characters",
    "unused": "none of the above, and never used in the text",
}
"""Sorts of pieces that are not worth their id. A piece belongs to the first sort that fits. Single bytes are never
junk: they make every text encodable."""

_REPEATED = re.compile(r"(.)\1{5,}|(..)\2{5,}", re.DOTALL)
_WEB = re.compile(
    r"https?|www\.|\.(?:com|org|net|html?|php|aspx|cn|jpe?g|png)\b|&(?:nbsp|amp|quot|lt|gt|#\d+)|</?[a-z]+|%[0-9A-F]{2}",
    re.IGNORECASE,
)
_HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
LONGEST_USEFUL_BLANK = 16
CLAUSE_CHARACTERS = 8


def evaluate(candidates: Sequence[TokenizerCandidate], text: EvalText) -> dict[str, Any]:
    """The report: what the text is, then one entry for each tokenizer."""
    channels = {
        channel: {
            "documents": len(texts),
            "bytes": sum(len(document.encode()) for document in texts),
            "characters": sum(map(len, texts)),
        }
        for channel, texts in text.channels.items()
    }
    total_bytes = sum(facts["bytes"] for facts in channels.values())
    characters = _characters(text)
    with progress("eval", total=len(candidates) * total_bytes, unit="B") as bar:
        results = []
        for candidate in candidates:
            results.append(_judge(candidate, text, channels, characters))
            bar.advance(total_bytes, note=candidate.name)
    return {"text": {"split": text.split, "channels": channels}, "junk_definitions": JUNK, "tokenizers": results}


def _judge(
    candidate: TokenizerCandidate,
    text: EvalText,
    facts: Mapping[str, Mapping[str, int]],
    characters: tuple[np.ndarray, np.ndarray],
) -> dict[str, Any]:
    counts = np.zeros(candidate.vocab_size, np.int64)
    channels = {}
    changed: list[str] = []
    for channel, texts in text.channels.items():
        tokens = 0
        channel_counts = np.zeros_like(counts)
        seconds = 0.0
        for start in range(0, len(texts), BATCH_DOCUMENTS):
            part = texts[start : start + BATCH_DOCUMENTS]
            began = time.process_time()
            batch = candidate.encode(part)
            seconds += time.process_time() - began
            tokens += len(batch.ids)
            channel_counts += np.bincount(batch.ids, minlength=candidate.vocab_size)
            changed += _changed(candidate, part, batch)
        counts += channel_counts
        size = facts[channel]["bytes"]
        channels[channel] = {
            "tokens": tokens,
            "bytes_per_token": size / max(1, tokens),
            "tokens_per_character": tokens / max(1, facts[channel]["characters"]),
            "pieces_used": int(np.count_nonzero(channel_counts)),
            "megabytes_per_second": size / 1e6 / max(seconds, 1e-9),
        }
    total_bytes = sum(each["bytes"] for each in facts.values())
    return {
        "name": candidate.name,
        "kind": candidate.kind,
        "vocab_size": candidate.vocab_size,
        "pieces": len(candidate.pieces),
        "control_tokens": candidate.control,
        "channels": channels,
        "tokens": int(counts.sum()),
        "bytes_per_token": total_bytes / max(1, int(counts.sum())),
        "round_trip": {
            "documents": len(text.documents),
            "changed": len(changed),
            "example": changed[0][:80] if changed else "",
        },
        "vocabulary_use": _vocabulary_use(candidate, counts),
        "coverage": _coverage(candidate, counts, characters),
        "longest": _longest(candidate, counts),
        "junk": _junk(candidate.pieces, counts),
    }


def _changed(candidate: TokenizerCandidate, texts: Sequence[str], batch: EncodedBatch) -> list[str]:
    """The texts that do not come back from their ids as they were."""
    pieces, decode = candidate.pieces, candidate.decode
    try:
        rows = [ids.tolist() for ids in batch]
        if decode is not None:
            return [text for text, ids in zip(texts, rows, strict=True) if decode(ids) != text]
        joined = [b"".join([pieces[number] for number in ids]) for ids in rows]
    except KeyError as error:
        raise BadInputError(
            f"{candidate.name} gave the id {error} for a text, which is not one of its pieces. Its files do "
            "not belong together; download it again."
        ) from error
    return [text for text, data in zip(texts, joined, strict=True) if data != text.encode()]


def _characters(text: EvalText) -> tuple[np.ndarray, np.ndarray]:
    """The distinct characters of the text and how often each occurs."""
    counts = np.zeros(0x110000, np.int64)
    for document in text.documents:
        codes, times = np.unique(np.frombuffer(document.encode("utf-32-le"), "<u4"), return_counts=True)
        counts[codes] += times
    codes = np.flatnonzero(counts)
    return codes, counts[codes]


def _vocabulary_use(candidate: TokenizerCandidate, counts: np.ndarray) -> dict[str, Any]:
    numbers = np.fromiter(candidate.pieces, np.int64, len(candidate.pieces))
    used = np.sort(counts[numbers])[::-1]
    positive = used[used > 0]
    total = max(1, int(used.sum()))
    return {
        "used": len(positive),
        "share_used": len(positive) / max(1, len(numbers)),
        "pieces_for_half_of_tokens": int(np.searchsorted(np.cumsum(positive), total / 2) + 1) if len(positive) else 0,
    }


def _coverage(
    candidate: TokenizerCandidate, counts: np.ndarray, characters: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """How much of the text passes through whole characters.

    Single: share of all characters of the text that are pieces by themselves. Split: share of the text's bytes that
    ended up in pieces which are not valid UTF-8, that is, in characters taken apart.
    """
    known = set(candidate.pieces.values())
    codes, times = characters
    single = np.array([chr(code).encode() in known for code in codes.tolist()], bool)
    split_bytes = all_bytes = 0
    for number, piece in candidate.pieces.items():
        if counts[number]:
            all_bytes += int(counts[number]) * len(piece)
            split_bytes += int(counts[number]) * len(piece) * (not is_utf8(piece))
    return {
        "distinct_characters": len(codes),
        "distinct_single": int(single.sum()),
        "share_single": float(times[single].sum() / max(1, times.sum())) if len(codes) else 0.0,
        "share_bytes_split": split_bytes / max(1, all_bytes),
    }


def _longest(candidate: TokenizerCandidate, counts: np.ndarray) -> list[dict[str, Any]]:
    """The pieces with the most bytes, runs of one or two characters left out: those are counted as junk."""
    telling = [number for number, piece in candidate.pieces.items() if junk_sort(piece, 1) != "repeated"]
    order = sorted(telling, key=lambda number: (-len(candidate.pieces[number]), number))[:LONGEST_PIECES]
    return [
        {
            "id": number,
            "piece": candidate.pieces[number].decode("utf-8", "backslashreplace"),
            "bytes": len(candidate.pieces[number]),
            "used": int(counts[number]),
        }
        for number in order
    ]


def junk_sort(piece: bytes, used: int) -> str | None:
    """The sort of junk that a piece is, or None."""
    if len(piece) < 2:
        return None
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return "broken"
    if text.isspace():
        return "repeated" if len(text) > LONGEST_USEFUL_BLANK else None if used else "unused"
    if _REPEATED.search(text):
        return "repeated"
    if _WEB.search(text):
        return "web"
    if len(_HAN.findall(text)) >= CLAUSE_CHARACTERS:
        return "clause"
    return None if used else "unused"


def _junk(pieces: Mapping[int, bytes], counts: np.ndarray) -> dict[str, dict[str, Any]]:
    """Per sort: pieces, their share of the vocabulary, how many of them were never used, share of all tokens, examples.

    Examples are the pieces with the most bytes (of `unused`, the first by id: those were learned earliest).
    """
    found: dict[str, list[int]] = {sort: [] for sort in JUNK}
    for number, piece in pieces.items():
        sort = junk_sort(piece, int(counts[number]))
        if sort:
            found[sort].append(number)
    tokens = max(1, int(counts.sum()))
    report = {}
    for sort, numbers in found.items():
        shown = sorted(numbers, key=lambda number: (sort != "unused" and -len(pieces[number]), number))[:JUNK_EXAMPLES]
        report[sort] = {
            "pieces": len(numbers),
            "share_of_vocabulary": len(numbers) / max(1, len(pieces)),
            "never_used": int(sum(counts[number] == 0 for number in numbers)),
            "share_of_tokens": int(sum(int(counts[number]) for number in numbers)) / tokens,
            "examples": [
                {"id": number, "piece": pieces[number].decode("utf-8", "backslashreplace")} for number in shown
            ],
        }
    return report


@dataclass(frozen=True)
class TextTable:
    """Rows, the first of which is the heading."""

    title: str
    rows: Sequence[Sequence[str]]
    notes: list[str] = field(default_factory=list)


def evaluation_tables(report: Mapping[str, Any]) -> list[TextTable]:
    """What `z2a tokenizer eval` prints."""
    return [_compression_table(report), _speed_table(report), _vocabulary_table(report), _junk_table(report)]


def _compression_table(report: Mapping[str, Any]) -> TextTable:
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


def _speed_table(report: Mapping[str, Any]) -> TextTable:
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


def _vocabulary_table(report: Mapping[str, Any]) -> TextTable:
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


def _junk_table(report: Mapping[str, Any]) -> TextTable:
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
