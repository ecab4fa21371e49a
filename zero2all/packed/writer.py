"""Corpus shards and a tokenizer in, token shards out.

Each document becomes <|begin_of_text|>, its tokens, <|end_of_text|>; documents follow one another without padding.
A split is written to a temporary folder and appears when it is whole; packing again does nothing where neither the
corpus nor the tokenizer has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zero2all.common.errors import BadInputError
from zero2all.common.files import require_free_space, staged_folder
from zero2all.common.manifest import fingerprint, is_current, read_manifest, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.common.records import SPLITS, corpus_sources, iter_records, training_text
from zero2all.packed.layout import PACK_COMMAND, docs_name, token_dtype, tokens_name
from zero2all.tokenizer.load import Tokenizer, load_tokenizer

SHARD_TOKENS = 1 << 28
"""A shard is closed after the document that takes it past this many tokens (512 MB as uint16)."""
BATCH_DOCUMENTS = 256


def pack_corpus(corpus: Path, tokenizer_folder: Path, packed: Path) -> dict[str, dict[str, Any]]:
    """Pack every split of every source; returns the manifests by 'source/split'."""
    sources = corpus_sources(corpus)
    tokenizer = load_tokenizer(tokenizer_folder)
    text_bytes = sum(int(manifest["report"]["bytes_kept"]) for manifest in sources.values())
    require_free_space(packed, text_bytes + (16 << 20), "the packed tokens")
    results = {}
    with progress("pack", total=text_bytes, unit="B") as bar:
        for name, manifest in sources.items():
            for split in SPLITS:
                results[f"{name}/{split}"] = _pack_split(corpus, packed, name, split, manifest, tokenizer, bar)
    if not any(result["tokens"] for result in results.values()):
        raise BadInputError(f"The corpus in {corpus} holds no text to pack. Build it again from other sources.")
    return results


def _pack_split(
    corpus: Path, packed: Path, source: str, split: str, manifest: dict[str, Any], tokenizer: Tokenizer, bar: Bar
) -> dict[str, Any]:
    folder = packed / source / split
    dtype = token_dtype(tokenizer.vocab_size)
    inputs = fingerprint(
        {
            "files": {name: file for name, file in manifest["files"].items() if name.startswith(f"{split}/")},
            "tokenizer": tokenizer.fingerprint,
            "shard_tokens": SHARD_TOKENS,
        }
    )
    if is_current(folder, "packed", inputs):
        found = read_manifest(folder, "packed", PACK_COMMAND)
        bar.advance(found["text_bytes"])
        return found
    with staged_folder(folder) as partial:
        shards = _ShardWriter(partial, dtype)
        opening = [] if tokenizer.begin_id is None else [tokenizer.begin_id]  # imported tokenizers may have none
        text_bytes = 0
        for texts in _batches(map(training_text, iter_records(corpus, source, split))):
            batch_bytes = 0
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                shards.add([*opening, *ids, tokenizer.end_id])
                batch_bytes += len(text.encode("utf-8", "replace"))
            text_bytes += batch_bytes
            bar.advance(batch_bytes, note=f"{source}/{split}")
        shards.close()
        content = {
            "source": source,
            "split": split,
            "channel": manifest["channel"],
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.str,
            "shards": shards.number,
            "documents": shards.documents,
            "tokens": shards.tokens,
            "text_bytes": text_bytes,
        }
        write_manifest(partial, "packed", inputs, content)
    return read_manifest(folder, "packed", PACK_COMMAND)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(itertools.islice(texts, BATCH_DOCUMENTS)):
        yield batch


class _ShardWriter:
    """Appends documents to token shards and their starts to the index beside each."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.number = self.documents = self.tokens = 0
        self.in_shard = 0
        self.tokens_file: BinaryIO | None = None
        self.docs_file: BinaryIO | None = None

    def add(self, ids: list[int]) -> None:
        if self.tokens_file is None or self.docs_file is None:
            self.tokens_file = (self.folder / tokens_name(self.number)).open("wb")
            self.docs_file = (self.folder / docs_name(self.number)).open("wb")
            self.number += 1
            self.in_shard = 0
        self.docs_file.write(np.uint64(self.in_shard).astype("<u8").tobytes())
        self.tokens_file.write(np.asarray(ids, dtype=self.dtype).tobytes())
        self.in_shard += len(ids)
        self.tokens += len(ids)
        self.documents += 1
        if self.in_shard >= SHARD_TOKENS:
            self.close()

    def close(self) -> None:
        for file in (self.tokens_file, self.docs_file):
            if file is not None:
                file.close()
        self.tokens_file = self.docs_file = None
