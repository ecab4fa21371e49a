"""What the corpus benchmark reads: real text as plain JSON lines, and as much generated text as is asked for.

    real       the texts of a data folder by language, one `{"id", "title", "text"}` a line, not compressed
    generated  slices of 500 MB (45 % zh, 35 % en, 20 % code) from `text_model`, fitted on the real texts and, for code,
               on the Python standard library; no slice repeats another. Documents as long as the real ones, or short
               ones of about 2 KB as on the web. Made once, then reused

A megabyte of raw text is 1e6 bytes of UTF-8 of the texts themselves: no titles, no field names, no escapes. Unique
n-grams are counted by a sample, those whose hash is divisible by 1024; repeated text would show as a flat line.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.planted import stdlib_sources
from benchmarks.text_model import TextModel
from zero2all.common.files import read_json, write_json
from zero2all.common.jsonio import dumps_line

SLICE_BYTES = 500_000_000
SHARES = {"zh": 0.45, "en": 0.35, "code": 0.20}
MEAN_CHARACTERS = {
    "long": {"zh": 3500, "en": 4300, "code": 17000},
    "short": {"zh": 700, "en": 2000, "code": 2000},
}
"""Of a generated document; `long` ones are as long as the real ones. Lengths are log-normal, as those of web text."""
SPREAD = 0.8
"""Standard deviation of the logarithm of the length."""
LEAST_CHARACTERS = 80
STREAMS, STREAM_CHARACTERS = 32, 250_000
"""Texts written at a time, and how long each is before it is cut into documents."""
NGRAM_LENGTHS = (5, 10)
SAMPLED_SHARE = 1024


@dataclass(frozen=True)
class Input:
    """A file to build from."""

    path: Path
    language: str
    documents: int
    text_bytes: int

    @property
    def megabytes(self) -> float:
        """Raw text, in MB."""
        return self.text_bytes / 1e6


# ---- real text ------------------------------------------------------------------------------------------------


def real_texts(data: Path, language: str) -> Iterator[tuple[str, str]]:
    """(title, text) of all real documents of a language."""
    if language == "zh":
        with gzip.open(data / "zh-modern.jsonl.gz", "rt", encoding="utf-8") as file:
            yield from ((row["title"], row["text"]) for row in map(json.loads, file))
        with gzip.open(data / "zh-tech.json.gz", "rt", encoding="utf-8") as file:
            yield from ((row["title"], row["content"]) for row in json.load(file))
    elif language == "en":
        import pyarrow.parquet as parquet

        table = parquet.read_table(data / "en-docs.parquet", columns=["title", "text"])
        yield from zip(table["title"].to_pylist(), table["text"].to_pylist(), strict=True)
    else:
        yield from (("", text) for text in stdlib_sources())


def real_input(data: Path, language: str, folder: Path, most_bytes: int | None = None) -> Input:
    """The real texts of a language as JSON lines; with `most_bytes` every so-manieth of them, to about that size."""
    size = "all" if most_bytes is None else f"{most_bytes // 1_000_000}mb"
    path = folder / f"{language}-{size}.jsonl"
    rows = list(real_texts(data, language))
    if most_bytes is not None:
        step = max(1, sum(len(text.encode()) for _, text in rows) // most_bytes)
        rows = rows[::step]
    return write_input(path, language, rows)


def write_input(path: Path, language: str, rows: Sequence[tuple[str, str]]) -> Input:
    """Write (title, text) pairs as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text_bytes = 0
    with open(path, "wb") as file:
        for number, (title, text) in enumerate(rows):
            file.write(dumps_line({"id": number, "title": title, "text": text}))
            text_bytes += len(text.encode())
    return Input(path, language, len(rows), text_bytes)


# ---- generated text -------------------------------------------------------------------------------------------


def generated_inputs(data: Path, folder: Path, length: str, slices: int) -> list[list[Input]]:
    """The inputs of each slice, in a folder of their length; those that are not there yet are made, on two cores."""
    folder = folder / length
    folder.mkdir(parents=True, exist_ok=True)
    missing = {
        language: [number for number in range(slices) if not _facts_path(folder, language, number).exists()]
        for language in SHARES
    }
    jobs = [(data, folder, length, language, numbers) for language, numbers in missing.items() if numbers]
    if jobs:
        print(f"generating {sum(len(numbers) for *_, numbers in jobs)} files in {folder}", flush=True)
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            pool.starmap(_generate, jobs, chunksize=1)
    return [[_read_input(folder, language, number) for language in SHARES] for number in range(slices)]


def unique_ngrams(inputs: Sequence[Input]) -> dict[str, int]:
    """About how many different character n-grams generated inputs have together, by n."""
    found = {}
    for length in NGRAM_LENGTHS:
        hashes = [np.load(_ngrams_path(source.path, length)) for source in inputs]
        found[str(length)] = int(np.unique(np.concatenate(hashes)).size) * SAMPLED_SHARE
    return found


def _generate(data: Path, folder: Path, length: str, language: str, numbers: list[int]) -> None:
    texts = [text for _, text in real_texts(data, language)]
    random.Random(1).shuffle(texts)
    model = TextModel("\n".join(texts))
    for number in numbers:
        _write_slice(model, MEAN_CHARACTERS[length][language], folder, language, number)


def _write_slice(model: TextModel, mean_characters: int, folder: Path, language: str, number: int) -> None:
    """One file of a slice, with its counts and its sample of n-grams."""
    path = _slice_path(folder, language, number)
    target = int(SLICE_BYTES * SHARES[language])
    rng = random.Random(f"{language} {number}")
    sampled: dict[int, list[np.ndarray]] = {length: [] for length in NGRAM_LENGTHS}
    documents = text_bytes = 0
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        while text_bytes < target:
            for stream in model.write_many(STREAM_CHARACTERS, [rng.getrandbits(63) for _ in range(STREAMS)]):
                for length, found in sampled.items():
                    found.append(_sampled_ngrams(stream, length))
                for text in _documents(stream, mean_characters, rng):
                    file.write(dumps_line({"id": documents, "title": "", "text": text}))
                    documents += 1
                    text_bytes += len(text.encode())
    for length, found in sampled.items():
        np.save(_ngrams_path(path, length), np.unique(np.concatenate(found)))
    partial.rename(path)
    write_json(_facts_path(folder, language, number), {"documents": documents, "text_bytes": text_bytes})
    print(f"  {path.name}: {documents:,} documents, {text_bytes / 1e6:.0f} MB", flush=True)


def _documents(stream: str, mean_characters: int, rng: random.Random) -> Iterator[str]:
    """Cut a text into documents of log-normal length."""
    middle = mean_characters / float(np.exp(SPREAD**2 / 2))
    at = 0
    while len(stream) - at >= LEAST_CHARACTERS:
        size = max(LEAST_CHARACTERS, round(rng.lognormvariate(0, SPREAD) * middle))
        yield stream[at : at + size]
        at += size


def _sampled_ngrams(text: str, length: int) -> np.ndarray:
    """Hashes of the n-grams in the sample."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32).astype(np.uint64)
    count = codes.size - length + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(length):
        hashes = (hashes ^ codes[offset : offset + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return np.unique(hashes[hashes % np.uint64(SAMPLED_SHARE) == 0])


def link_inputs(inputs: Sequence[Input], folder: Path) -> dict[str, Path]:
    """A folder for each language with hard links to its inputs: the sources of one build."""
    sources: dict[str, Path] = {}
    for source in inputs:
        sources[source.language] = folder / source.language
        sources[source.language].mkdir(parents=True, exist_ok=True)
        os.link(source.path, sources[source.language] / source.path.name)
    return sources


def _read_input(folder: Path, language: str, number: int) -> Input:
    facts = read_json(_facts_path(folder, language, number))
    return Input(_slice_path(folder, language, number), language, facts["documents"], facts["text_bytes"])


def _slice_path(folder: Path, language: str, number: int) -> Path:
    return folder / f"{language}-{number:03d}.jsonl"


def _facts_path(folder: Path, language: str, number: int) -> Path:
    return folder / f"{language}-{number:03d}.facts.json"


def _ngrams_path(path: Path, length: int) -> Path:
    return path.with_suffix(f".{length}grams.npy")
