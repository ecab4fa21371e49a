"""The tokenizer stage of a workspace: train on the corpus that stands there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero2all.common.manifest import fingerprint
from zero2all.common.records import corpus_sources, iter_records, training_text
from zero2all.tokenizer.bpe import train_tokenizer
from zero2all.tokenizer.config import TokenizerConfig


def train_on_corpus(corpus: Path, folder: Path, config: TokenizerConfig) -> dict[str, Any]:
    """Train on the training split of every source; does nothing when corpus and settings are those of last time."""
    sources = corpus_sources(corpus)
    inputs = fingerprint(
        {
            "sources": {name: manifest["files"] for name, manifest in sources.items()},
            "config": dataclasses.asdict(config),
        }
    )
    return train_tokenizer(
        _texts(corpus, list(sources)),
        config.vocab_size,
        folder,
        inputs,
        min_piece_count=config.min_piece_count,
        max_piece_bytes=config.max_piece_bytes,
        train_bytes=config.train_bytes,
        total_bytes=sum(_train_bytes(manifest["report"]) for manifest in sources.values()),
    )


def _train_bytes(report: dict[str, Any]) -> int:
    """About how much of a source is in its training split, for the progress bar."""
    return int(report["bytes_kept"] * report["train_records"] / max(1, report["records_kept"]))


def _texts(corpus: Path, sources: list[str]) -> Iterator[str]:
    """Documents of all sources in turn, so that a byte limit takes from each of them."""
    streams = [map(training_text, iter_records(corpus, name, "train")) for name in sources]
    while streams:
        alive = []
        for stream in streams:
            text = next(stream, None)
            if text is not None:
                yield text
                alive.append(stream)
        streams = alive
