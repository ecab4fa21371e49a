"""Bits per byte on held-out text: comparable over tokenizers, channels and models.

`held_out_bits_per_byte`: every document is scored whole from its beginning, in windows of data.seq_len tokens without
overlap; bits are summed over all tokens including the end of the document, bytes are those of its UTF-8 text. The
baseline is what gzip -9 needs for the same text.

`validation_bits_per_byte`: the rows that training itself scores, so the figures are those of its own metrics.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zero2all.common.progress import progress
from zero2all.common.records import corpus_sources, iter_records, training_text
from zero2all.config.training import EvalConfig
from zero2all.infer.boundary import opening_id
from zero2all.infer.engine import Engine
from zero2all.packed.config import DataConfig
from zero2all.packed.layout import PackedSplit
from zero2all.train.validate import valid_batches

DOCUMENTS_AT_ONCE = 32
COUNTS = ("documents", "bytes", "tokens", "gzip_bytes")


def held_out_bits_per_byte(
    engine: Engine, window: int, corpus: Path, max_bytes_per_source: int
) -> dict[str, dict[str, float]]:
    """Per channel: bits per byte, those of gzip, documents, bytes and tokens (of max_bytes_per_source bytes)."""
    totals: dict[str, dict[str, float]] = {}
    packers: dict[str, Any] = {}
    sources = corpus_sources(corpus)
    with progress("eval", total=None, unit="B") as bar:
        for name, manifest in sources.items():
            total = totals.setdefault(manifest["channel"], {**dict.fromkeys(COUNTS, 0), "nats": 0.0})
            packer = packers.setdefault(manifest["channel"], zlib.compressobj(9, wbits=-15))  # without gzip's header
            for texts in _batches(corpus, name, max_bytes_per_source):
                scored = document_nats(engine, texts, window)
                for text, (nats, tokens) in zip(texts, scored, strict=True):
                    data = text.encode()
                    total["nats"] += nats
                    total["tokens"] += tokens
                    total["documents"] += 1
                    total["bytes"] += len(data)
                    total["gzip_bytes"] += len(packer.compress(data))
                    bar.advance(len(data), note=name)
    for channel, packer in packers.items():
        totals[channel]["gzip_bytes"] += len(packer.flush())
    return {
        channel: {
            "bits_per_byte": total["nats"] / math.log(2) / total["bytes"],
            "gzip_bits_per_byte": total["gzip_bytes"] * 8 / total["bytes"],
            **total,
        }
        for channel, total in sorted(totals.items())
        if total["bytes"]
    }


def _batches(corpus: Path, source: str, max_bytes: int) -> Iterator[list[str]]:
    """Held-out documents of a source, some at a time, until the next would exceed max_bytes."""
    texts: list[str] = []
    taken = 0
    for record in iter_records(corpus, source, "valid"):
        text = training_text(record)
        size = len(text.encode())
        if taken and taken + size > max_bytes:
            break
        taken += size
        texts.append(text)
        if len(texts) == DOCUMENTS_AT_ONCE:
            yield texts
            texts = []
    if texts:
        yield texts


def document_nats(engine: Engine, texts: list[str], window: int) -> list[tuple[float, int]]:
    """Of each document: its summed nats, and the number of tokens they were summed over."""
    tokenizer = engine.tokenizer
    documents = [[opening_id(tokenizer), *ids, tokenizer.end_id] for ids in tokenizer.encode_batch([*texts])]
    cuts = [(number, first) for number, ids in enumerate(documents) for first in range(0, len(ids) - 1, window)]
    rows = [documents[number][first : first + window + 1] for number, first in cuts]
    nats = [0.0] * len(documents)
    for (number, _), scores in zip(cuts, engine.score(rows, [1] * len(rows)), strict=True):
        nats[number] -= math.fsum(scores.logprobs)
    return [(total, len(ids) - 1) for total, ids in zip(nats, documents, strict=True)]


def validation_bits_per_byte(
    engine: Engine, splits: list[PackedSplit], data: DataConfig, config: EvalConfig
) -> dict[str, dict[str, float]]:
    """Per channel, `loss` (nats per token) and `bits_per_byte` of the rows that training scores after some steps."""
    totals: dict[str, np.ndarray] = {}
    for batch in valid_batches(splits, data.seq_len, config):
        tokens, weights, documents = batch.read(data)
        numbers, length = range(len(tokens)), data.seq_len
        pieces = [(row, first, end) for row in numbers for first, end in _document_spans(documents, row, length)]
        # The last token of a document predicts the first of the next, as it does in training.
        scores = engine.score([tokens[row, first : end + 1].tolist() for row, first, end in pieces], [1] * len(pieces))
        nats = -sum(
            float(np.dot(weights[row, first:end], found.logprobs))
            for (row, first, end), found in zip(pieces, scores, strict=True)
        )
        counted = float(weights.sum(dtype=np.float64))
        found = np.array([nats, counted, counted * batch.split.bytes_per_token])
        totals[batch.split.channel] = totals.get(batch.split.channel, 0) + found
    return {
        channel: {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / size}
        for channel, (nats, tokens, size) in sorted(totals.items())
        if tokens
    }


def _document_spans(documents: np.ndarray | None, row: int, length: int) -> list[tuple[int, int]]:
    """The inputs of a row, as (first, end) of each document; all of it where documents are not masked."""
    if documents is None:
        return [(0, length)]
    begins = [0, *(np.flatnonzero(np.diff(documents[row, :length])) + 1).tolist()]
    return list(zip(begins, [*begins[1:], length], strict=True))
