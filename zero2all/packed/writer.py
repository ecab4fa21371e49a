"""Corpus shards and a tokenizer in, token shards out.

Each document becomes <|begin_of_text|>, its tokens, <|end_of_text|>; documents follow one another without padding.
A split is written to a temporary folder and appears when it is whole; packing again does nothing where neither the
corpus nor the tokenizer has changed. `report.json` is written last (see `packed.layout`).

Which engine encodes (`tokenizer.engines`) changes the speed and not one byte of the tokens; each manifest records what
was asked, what was taken and why, and what it was compared with the reference on.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError
from zero2all.common.files import require_free_space, staged_folder, sweep_partials, write_json
from zero2all.common.manifest import fingerprint, is_current, read_manifest, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.common.records import SPLITS, corpus_sources, iter_records, training_text
from zero2all.packed.layout import PACK_COMMAND, REPORT_NAME, docs_name, token_dtype, tokens_name
from zero2all.tokenizer.engines import Engine, EngineConfig, open_engine
from zero2all.tokenizer.load import Tokenizer, load_tokenizer

SHARD_TOKENS = 1 << 28
"""A shard is closed after the document that takes it past this many tokens (512 MB as uint16)."""
BATCH_DOCUMENTS = 256
BATCH_CHARACTERS = 4 << 20
"""A batch is closed after the document that takes it past either of these."""
SAMPLE_DOCUMENTS = 64
SAMPLE_CHARACTERS = 100_000
"""The first documents of each source, up to these limits, on which an engine has to agree with the reference."""
DISK_MARGIN_BYTES = 16 << 20


@dataclass(frozen=True)
class _Plan:
    """One split of one source, and what its packed form is made from."""

    source: str
    split: str
    channel: str
    folder: Path
    inputs: str
    corpus_bytes: int


def pack_corpus(
    corpus: Path, tokenizer_folder: Path, packed: Path, engine_config: EngineConfig | None = None
) -> dict[str, dict[str, Any]]:
    """Pack every split of every source; returns the manifests by 'source/split'."""
    sources = corpus_sources(corpus)
    tokenizer = load_tokenizer(tokenizer_folder)
    plans = _make_plans(sources, packed, tokenizer)
    done = {plan.folder for plan in plans if is_current(plan.folder, "packed", plan.inputs)}
    if len(done) < len(plans):
        needed = sum(plan.corpus_bytes for plan in plans if plan.folder not in done)
        require_free_space(packed, needed + DISK_MARGIN_BYTES, "the packed tokens")
        (packed / REPORT_NAME).unlink(missing_ok=True)
    results = {}
    text_bytes = sum(int(manifest["report"]["bytes_kept"]) for manifest in sources.values())
    engine = None if len(done) == len(plans) else _open_engine(corpus, sources, tokenizer, engine_config, text_bytes)
    with progress("pack", total=text_bytes, unit="B") as bar:
        for plan in plans:
            sweep_partials(plan.folder)
            if engine is not None and plan.folder not in done:
                _pack_split(corpus, plan, tokenizer, engine, bar)
            found = read_manifest(plan.folder, "packed", PACK_COMMAND)
            if plan.folder in done:
                bar.advance(found["text_bytes"])
            results[f"{plan.source}/{plan.split}"] = found
    if not any(result["tokens"] for result in results.values()):
        raise BadInputError(f"The corpus in {corpus} holds no text to pack. Build it again from other sources.")
    _write_report(packed, tokenizer, results)
    return results


def _make_plans(sources: dict[str, dict[str, Any]], packed: Path, tokenizer: Tokenizer) -> list[_Plan]:
    plans = []
    for name, manifest in sources.items():
        for split in SPLITS:
            files = {part: file for part, file in manifest["files"].items() if part.startswith(f"{split}/")}
            decisive = {
                "files": files,
                "channel": manifest["channel"],
                "tokenizer": tokenizer.fingerprint,
                "shard_tokens": SHARD_TOKENS,
            }
            corpus_bytes = sum(file["bytes"] for file in files.values())
            folder = packed / name / split
            plans.append(_Plan(name, split, manifest["channel"], folder, fingerprint(decisive), corpus_bytes))
    return plans


def _write_report(packed: Path, tokenizer: Tokenizer, results: dict[str, dict[str, Any]]) -> None:
    sources: dict[str, dict[str, Any]] = {}
    for manifest in results.values():
        counts = {name: manifest[name] for name in ("documents", "tokens", "text_bytes")}
        sources.setdefault(manifest["source"], {"channel": manifest["channel"]})[manifest["split"]] = counts
    report = {"tokenizer": tokenizer.fingerprint, "sources": sources}
    path = packed / REPORT_NAME
    sweep_partials(path)
    if not path.is_file() or path.read_bytes() != jsonio.dumps_pretty(report):
        write_json(path, report)


def _open_engine(
    corpus: Path,
    sources: dict[str, dict[str, Any]],
    tokenizer: Tokenizer,
    config: EngineConfig | None,
    text_bytes: int,
) -> Engine:
    sample = [text for name in sources for text in _first_texts(corpus, name)]
    engine = open_engine(tokenizer, config, sample, text_bytes)
    if engine.choice.fell_back:
        print(
            f"pack: asked for the engine {engine.choice.asked}, got {engine.name}: {engine.reason}",
            file=sys.stderr,
            flush=True,
        )
    return engine


def _first_texts(corpus: Path, source: str) -> Iterator[str]:
    characters = 0
    records = itertools.chain.from_iterable(iter_records(corpus, source, split) for split in SPLITS)
    for text in map(training_text, itertools.islice(records, SAMPLE_DOCUMENTS)):
        yield text[: SAMPLE_CHARACTERS - characters]
        characters += len(text)
        if characters >= SAMPLE_CHARACTERS:
            return


def _pack_split(corpus: Path, plan: _Plan, tokenizer: Tokenizer, engine: Engine, bar: Bar) -> None:
    dtype = token_dtype(tokenizer.vocab_size)
    with staged_folder(plan.folder) as partial:
        shards = _ShardWriter(partial, dtype)
        opening = [] if tokenizer.begin_id is None else [tokenizer.begin_id]  # imported tokenizers may have none
        before, after = np.array(opening, dtype), np.array([tokenizer.end_id], dtype)
        text_bytes = 0
        for texts in _batches(map(training_text, iter_records(corpus, plan.source, plan.split))):
            for ids in engine.encode_batch(texts):
                shards.add(np.concatenate((before, ids.astype(dtype), after)))
            batch_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
            text_bytes += batch_bytes
            bar.advance(batch_bytes, note=f"{plan.source}/{plan.split}")
        shards.close()
        content = {
            "source": plan.source,
            "split": plan.split,
            "channel": plan.channel,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.str,
            "shards": shards.number,
            "documents": shards.documents,
            "tokens": shards.tokens,
            "text_bytes": text_bytes,
            "engine": engine.choice.as_json(),
        }
        write_manifest(partial, "packed", plan.inputs, content)


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _ShardWriter:
    """Appends documents to token shards and their starts to the index beside each."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.number = self.documents = self.tokens = 0
        self.in_shard = 0
        self.tokens_file: BinaryIO | None = None
        self.docs_file: BinaryIO | None = None

    def add(self, ids: np.ndarray) -> None:
        if self.tokens_file is None or self.docs_file is None:
            self.tokens_file = (self.folder / tokens_name(self.number)).open("wb")
            self.docs_file = (self.folder / docs_name(self.number)).open("wb")
            self.number += 1
            self.in_shard = 0
        self.docs_file.write(np.uint64(self.in_shard).astype("<u8").tobytes())
        self.tokens_file.write(ids.tobytes())
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
