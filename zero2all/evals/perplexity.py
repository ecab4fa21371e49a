"""Bits per byte on held-out documents: comparable over tokenizers, channels and models.

Every document is scored whole from its beginning, in windows of data.seq_len tokens without overlap; bits are summed
over all tokens including the end of the document, bytes are those of its UTF-8 text.

The baseline is what gzip -9 needs for the same text.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch

from zero2all.common.progress import progress
from zero2all.common.records import corpus_sources, iter_records, training_text
from zero2all.infer.boundary import opening_id
from zero2all.infer.load import LoadedModel

COUNTS = ("documents", "bytes", "tokens", "gzip_bytes")


def held_out_bits_per_byte(loaded: LoadedModel, corpus: Path, max_bytes_per_source: int) -> dict[str, dict[str, float]]:
    """Per channel: bits per byte, those of gzip, documents, bytes and tokens (of max_bytes_per_source bytes)."""
    totals: dict[str, dict[str, float]] = {}
    packers: dict[str, Any] = {}
    sources = corpus_sources(corpus)
    with progress("eval", total=None, unit="B") as bar:
        for name, manifest in sources.items():
            total = totals.setdefault(manifest["channel"], {**dict.fromkeys(COUNTS, 0), "nats": 0.0})
            packer = packers.setdefault(manifest["channel"], zlib.compressobj(9, wbits=-15))  # without gzip's header
            taken = 0
            for record in iter_records(corpus, name, "valid"):
                text = training_text(record)
                data = text.encode()
                size = len(data)
                if taken and taken + size > max_bytes_per_source:
                    break
                taken += size
                nats, tokens = document_nats(loaded, text)
                total["nats"] += nats
                total["tokens"] += tokens
                total["documents"] += 1
                total["bytes"] += size
                total["gzip_bytes"] += len(packer.compress(data))
                bar.advance(size, note=name)
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


@torch.no_grad()
def document_nats(loaded: LoadedModel, text: str) -> tuple[float, int]:
    """Summed nats of a document and the number of tokens they were summed over."""
    tokenizer, window = loaded.tokenizer, loaded.window
    ids = torch.tensor([opening_id(tokenizer), *tokenizer.encode_text(text), tokenizer.end_id], device=loaded.device)
    nats = 0.0
    for first in range(0, len(ids) - 1, window):
        piece = ids[first : first + window + 1].unsqueeze(0)
        nats += float(loaded.model.loss(piece[:, :-1], piece[:, 1:])[1].double().sum())
    return nats, len(ids) - 1
