"""All figures about each tokenizer, as plain JSON.

Bytes are UTF-8 bytes of the text as it stands in the corpus, tokens are those of text (no begin or end marks), speed is
megabytes per second of processor time. Every figure is over the same documents for all tokenizers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.progress import progress
from zero2all.tokenizer.encoders import EncodedBatch
from zero2all.tokenizer.lab.junk import DEFINITIONS, junk_report, sort_of
from zero2all.tokenizer.lab.subjects import Subject
from zero2all.tokenizer.lab.text import CODE, FIXED_TEXTS, INDENTATION, NUMBERS, EvalText

BATCH_DOCUMENTS = 128
LONGEST_PIECES = 24
RANK_POINTS = 120
USE_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 15), (16, 63), (64, 255), (256, 1023), (1024, None))
"""Pieces by how often they were used: (from, to), None is no upper limit."""


def evaluate(subjects: Sequence[Subject], text: EvalText) -> dict[str, Any]:
    """The report: what the text is, then one entry for each tokenizer."""
    sizes = {channel: sum(len(document.encode()) for document in texts) for channel, texts in text.channels.items()}
    letters = {channel: sum(map(len, texts)) for channel, texts in text.channels.items()}
    characters = _characters(text)
    excerpts = [{"title": title, "text": excerpt} for title, excerpt in text.excerpts()]
    with progress("eval", total=len(subjects) * sum(sizes.values()), unit="B") as bar:
        results = []
        for subject in subjects:
            results.append(_judge(subject, text, characters, excerpts))
            bar.advance(sum(sizes.values()), note=subject.name)
    return {
        "text": {
            "split": text.split,
            "channels": {
                channel: {"documents": len(texts), "bytes": sizes[channel], "characters": letters[channel]}
                for channel, texts in text.channels.items()
            },
        },
        "junk_definitions": DEFINITIONS,
        "excerpts": excerpts,
        "tokenizers": results,
    }


def _judge(
    subject: Subject, text: EvalText, characters: tuple[np.ndarray, np.ndarray], excerpts: Sequence[dict[str, str]]
) -> dict[str, Any]:
    counts = np.zeros(subject.vocab_size, np.int64)
    channels = {}
    round_trip = _RoundTrip(subject)
    for channel, texts in text.channels.items():
        tokens = 0
        size = sum(len(document.encode()) for document in texts)
        channel_counts = np.zeros_like(counts)
        seconds = 0.0
        for start in range(0, len(texts), BATCH_DOCUMENTS):
            part = texts[start : start + BATCH_DOCUMENTS]
            began = time.process_time()
            batch = subject.encode(part)
            seconds += time.process_time() - began
            tokens += len(batch.ids)
            channel_counts += np.bincount(batch.ids, minlength=subject.vocab_size)
            round_trip.check(part, batch)
        counts += channel_counts
        letters = sum(map(len, texts))
        channels[channel] = {
            "tokens": tokens,
            "bytes_per_token": size / max(1, tokens),
            "tokens_per_character": tokens / max(1, letters),
            "pieces_used": int(np.count_nonzero(channel_counts)),
            "megabytes_per_second": size / 1e6 / max(seconds, 1e-9),
        }
    total_bytes = sum(len(document.encode()) for document in text.documents)
    return {
        "name": subject.name,
        "kind": subject.kind,
        "vocab_size": subject.vocab_size,
        "pieces": len(subject.pieces),
        "control_tokens": subject.control,
        "channels": channels,
        "tokens": int(counts.sum()),
        "bytes_per_token": total_bytes / max(1, int(counts.sum())),
        "round_trip": round_trip.report(),
        "vocabulary_use": _vocabulary_use(subject, counts),
        "coverage": _coverage(subject, counts, characters),
        "fertility": _fertility(subject),
        "longest": _longest(subject, counts),
        "junk": junk_report(subject.pieces, counts),
        "segments": _segments(subject, excerpts),
    }


class _RoundTrip:
    """Counts documents that do not come back as they were."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.documents = self.changed = 0
        self.example = ""

    def check(self, texts: Sequence[str], batch: EncodedBatch) -> None:
        pieces, decode = self.subject.pieces, self.subject.decode
        for text, ids in zip(texts, batch, strict=True):
            numbers = ids.tolist()
            if decode is None:
                try:
                    same = b"".join([pieces[number] for number in numbers]) == text.encode()
                except KeyError as error:
                    raise BadInputError(
                        f"{self.subject.name} gave the id {error} for a text, which is none of its pieces. Its files "
                        f"do not belong together; fetch it again."
                    ) from error
            else:
                same = decode(numbers) == text
            self.documents += 1
            if not same:
                self.changed += 1
                self.example = self.example or text[:80]

    def report(self) -> dict[str, Any]:
        return {"documents": self.documents, "changed": self.changed, "example": self.example}


def _characters(text: EvalText) -> tuple[np.ndarray, np.ndarray]:
    """The distinct characters of the text and how often each occurs."""
    counts = np.zeros(0x110000, np.int64)
    for document in text.documents:
        codes, times = np.unique(np.frombuffer(document.encode("utf-32-le"), "<u4"), return_counts=True)
        counts[codes] += times
    codes = np.flatnonzero(counts)
    return codes, counts[codes]


def _vocabulary_use(subject: Subject, counts: np.ndarray) -> dict[str, Any]:
    numbers = np.fromiter(subject.pieces, np.int64, len(subject.pieces))
    used = np.sort(counts[numbers])[::-1]
    buckets = []
    for low, high in USE_BUCKETS:
        inside = (used >= low) & (used <= (high if high is not None else np.iinfo(np.int64).max))
        buckets.append({"from": low, "to": high, "pieces": int(inside.sum())})
    positive = used[used > 0]
    ranks = np.unique(np.rint(np.geomspace(1, max(1, len(positive)), RANK_POINTS)).astype(np.int64))
    total = max(1, int(used.sum()))
    return {
        "used": len(positive),
        "share_used": len(positive) / max(1, len(numbers)),
        "histogram": buckets,
        "by_rank": [[int(rank), int(positive[rank - 1])] for rank in ranks if len(positive)],
        "pieces_for_half_of_tokens": int(np.searchsorted(np.cumsum(positive), total / 2) + 1) if len(positive) else 0,
    }


def _coverage(subject: Subject, counts: np.ndarray, characters: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """How much of the text passes through whole characters.

    Single: share of all characters of the text that are pieces by themselves. Split: share of the text's bytes that
    ended up in pieces which are not valid UTF-8, that is, in characters taken apart.
    """
    known = set(subject.pieces.values())
    codes, times = characters
    single = np.array([chr(code).encode() in known for code in codes.tolist()], bool)
    split_bytes = all_bytes = 0
    for number, piece in subject.pieces.items():
        if counts[number]:
            all_bytes += int(counts[number]) * len(piece)
            split_bytes += int(counts[number]) * len(piece) * (not _is_text(piece))
    return {
        "distinct_characters": len(codes),
        "distinct_single": int(single.sum()),
        "share_single": float(times[single].sum() / max(1, times.sum())) if len(codes) else 0.0,
        "share_bytes_split": split_bytes / max(1, all_bytes),
    }


def _fertility(subject: Subject) -> dict[str, Any]:
    """Tokens per digit of whole numbers, per line of code, per line of indentation, and of each fixed text."""
    batch = subject.encode(list(FIXED_TEXTS.values()))
    tokens = dict(zip(FIXED_TEXTS, map(len, batch), strict=True))
    plain = [number for number in NUMBERS.split() if number.isascii() and number.isdigit()]
    bare = subject.encode([INDENTATION.replace(" ", "").replace("\t", "")])
    return {
        "tokens_per_digit": len(subject.encode(plain).ids) / sum(map(len, plain)),
        "code_tokens_per_line": tokens["code"] / CODE.count("\n"),
        "code_bytes_per_token": len(CODE.encode()) / max(1, tokens["code"]),
        "indentation_tokens_per_line": (tokens["indentation"] - len(bare[0])) / INDENTATION.count("\n"),
        "fixed_texts": tokens,
    }


def _longest(subject: Subject, counts: np.ndarray) -> list[dict[str, Any]]:
    """The pieces with the most bytes, runs of one or two characters left out: those are counted as junk."""
    telling = [number for number, piece in subject.pieces.items() if sort_of(piece, 1) != "repeated"]
    order = sorted(telling, key=lambda number: (-len(subject.pieces[number]), number))[:LONGEST_PIECES]
    return [
        {
            "id": number,
            "piece": subject.pieces[number].decode("utf-8", "backslashreplace"),
            "bytes": len(subject.pieces[number]),
            "used": int(counts[number]),
        }
        for number in order
    ]


def _segments(subject: Subject, excerpts: Sequence[dict[str, str]]) -> list[list[list[Any]]]:
    """For each excerpt its tokens: id, and bytes as hexadecimal digits."""
    batch = subject.encode([excerpt["text"] for excerpt in excerpts])
    return [[[number, subject.pieces.get(number, b"").hex()] for number in ids.tolist()] for ids in batch]


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
