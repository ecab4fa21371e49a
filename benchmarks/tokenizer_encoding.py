"""Encoding: how fast each encoder is on Chinese and English, and that all of them give the ids of the plain encoder.

    python -m benchmarks.tokenizer_encoding TOKENIZER_FOLDER zh=FILE en=FILE [--documents 10000] [--only speed]

FILE is JSON lines (also .gz), a JSON array (.json, .json.gz) or parquet, with the text under `text` or `content`.
`encoding` is a section of `benchmarks/tokenizer.py`; it trains a vocabulary on that program's text and measures:

- `encoding_speed`: MB per second of processor time with one thread, each encoder from a cold start (its caches are
  empty, its code is compiled), in batches as packing makes them;
- `encoding_parity`: ids of every encoder against `benchmarks.bpe_reference`, document by document;
- `same_ids_everywhere`: ids of the saved folder in transformers, in plain tokenizers and in our package.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SPEED_BYTES = 16_000_000
"""Text of each language that is timed."""
SLOW_BYTES = 1_500_000
"""`tokenizers` gets this much: it is tens of times slower."""
BATCH_DOCUMENTS = 256
PARITY_DOCUMENTS = 10_000
FOLDER_DOCUMENTS = 2_000
DOCUMENT_CHARACTERS = 600
"""Documents for the plain encoder are cut to this: it encodes some 70 KB of Chinese a second."""
TARGETS = {"zh": 15.0, "en": 40.0}
"""MB/s of one core through the encoder that `auto` takes."""


def encoding(work: Path, texts: dict[str, list[str]], vocab_size: int = 32_000) -> dict[str, Any]:
    """All three on Chinese and English, with a vocabulary of ours learned from every other document."""
    from zero2all.tokenizer import train_tokenizer

    given = {language: texts[language] for language in TARGETS}
    folder = work / "encoding"
    train_tokenizer((text for each in given.values() for text in each[::2]), vocab_size, folder, "for encoding")
    timed = {language: each[1::2] for language, each in given.items()}
    documents = [text for each in timed.values() for text in cut_to_documents(each, PARITY_DOCUMENTS // len(timed))]
    return {
        "vocab_size": vocab_size,
        "speed": encoding_speed(folder, timed),
        "parity": encoding_parity(folder, documents),
        "folder": same_ids_everywhere(folder, documents[:: max(1, len(documents) // FOLDER_DOCUMENTS)]),
    }


def encoding_speed(folder: Path, texts: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """MB/s of one core by language and encoder, and which encoder `auto` takes for that language.

    Runs in a process of its own, so that the encoders written in Rust see RAYON_NUM_THREADS=1 before they start.
    """
    program = [sys.executable, "-m", "benchmarks.tokenizer_encoding", str(folder), "--speed-of-stdin"]
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    answer = subprocess.run(
        program, input=json.dumps(texts), capture_output=True, text=True, env=environment, check=False
    )
    if answer.returncode:
        raise RuntimeError(f"the measuring process failed:\n{answer.stderr[-2000:]}")
    speeds: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    for language, speed in speeds.items():
        target = f" (target {TARGETS[language]:g})" if language in TARGETS else ""
        figures = ", ".join(f"{name} {value:.1f}" for name, value in speed["megabytes_per_second"].items())
        chosen = speed["megabytes_per_second"][speed["auto"]]
        print(f"encoding {language}: {figures} MB/s per core; auto takes {speed['auto']}: {chosen:.1f}{target}")
    return speeds


def _measure(folder: Path, texts: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    from zero2all.tokenizer import load_tokenizer
    from zero2all.tokenizer.encoders import ENCODER_NAMES, EncoderConfig, open_encoder

    tokenizer = load_tokenizer(folder)
    speeds = {}
    for language, documents in texts.items():
        found = {}
        for name in ENCODER_NAMES[1:]:
            given = _first(documents, SLOW_BYTES if name == "tokenizers" else SPEED_BYTES)
            size = sum(len(text.encode()) for text in given)
            encoder = open_encoder(
                tokenizer, EncoderConfig(name, threads=1)
            )  # fresh: the hard strings are all it has seen
            if encoder.name != name:
                print(f"{name}: {encoder.reason}", file=sys.stderr)
                continue
            seconds = 0.0
            for start in range(0, len(given), BATCH_DOCUMENTS):
                batch = given[start : start + BATCH_DOCUMENTS]
                began = time.process_time()
                encoder.encode_batch(batch)
                seconds += time.process_time() - began
            found[name] = round(size / seconds / 1e6, 2)
        auto = open_encoder(tokenizer, EncoderConfig("auto", threads=1), _first(documents, 200_000)).name
        speeds[language] = {"megabytes_per_second": found, "auto": auto}
    return speeds


def encoding_parity(folder: Path, documents: Sequence[str]) -> dict[str, Any]:
    """Every encoder that is installed against the plain encoder, on all of the documents."""
    from benchmarks.bpe_reference import ReferenceEncoder
    from zero2all.common.progress import progress
    from zero2all.tokenizer import load_tokenizer
    from zero2all.tokenizer.encoders import ENCODER_NAMES, EncoderConfig, open_encoder

    tokenizer = load_tokenizer(folder)
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    first = len(tokenizer.control)
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    plain = ReferenceEncoder([(model["vocab"][left] - first, model["vocab"][right] - first) for left, right in pairs])
    encoders = {name: open_encoder(tokenizer, EncoderConfig(name)) for name in ENCODER_NAMES[1:]}
    encoders = {name: encoder for name, encoder in encoders.items() if encoder.name == name}
    different = dict.fromkeys(encoders, 0)
    tokens = 0
    with progress("parity", total=len(documents), unit="documents") as bar:
        for start in range(0, len(documents), BATCH_DOCUMENTS):
            batch = list(documents[start : start + BATCH_DOCUMENTS])
            expected = [[place + first for place in plain.encode(text)] for text in batch]
            tokens += sum(map(len, expected))
            for name, encoder in encoders.items():
                found = encoder.encode_batch(batch)
                different[name] += sum(ids.tolist() != right for ids, right in zip(found, expected, strict=True))
            bar.advance(len(batch))
    result = {"documents": len(documents), "tokens": tokens, "different_documents": different}
    print(f"parity with the plain encoder on {len(documents):,} documents ({tokens:,} tokens): {different} differ")
    return result


def same_ids_everywhere(folder: Path, documents: Sequence[str]) -> dict[str, Any]:
    """The saved folder in transformers, in plain tokenizers and in our package."""
    import tokenizers
    from transformers import AutoTokenizer

    from zero2all.tokenizer import load_tokenizer

    ours = load_tokenizer(folder)
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(str(folder))
    different = {"tokenizers": 0, "transformers": 0}
    for start in range(0, len(documents), BATCH_DOCUMENTS):
        batch = list(documents[start : start + BATCH_DOCUMENTS])
        expected = ours.encode_batch(batch)
        found = [encoding.ids for encoding in plain.encode_batch_fast(batch, add_special_tokens=False)]
        different["tokenizers"] += sum(ids != right for ids, right in zip(found, expected, strict=True))
        found = auto(batch, add_special_tokens=False)["input_ids"]
        different["transformers"] += sum(ids != right for ids, right in zip(found, expected, strict=True))
    print(f"same folder elsewhere, {len(documents):,} documents: {different} differ")
    return {"documents": len(documents), "different_documents": different}


def _first(texts: Sequence[str], limit_bytes: int) -> list[str]:
    kept = []
    for text in texts:
        kept.append(text)
        limit_bytes -= len(text.encode())
        if limit_bytes <= 0:
            break
    return kept


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a file of records."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows: Iterator[Any] = (
            row for batch in pyarrow.parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist()
        )
    else:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        whole = path.name.removesuffix(".gz").endswith(".json")
        rows = iter(json.loads(data) if whole else [json.loads(line) for line in data.splitlines()])
    for row in rows:
        yield row.get("text") or row.get("content") or ""


def cut_to_documents(texts: Sequence[str], wanted: int, characters: int = DOCUMENT_CHARACTERS) -> list[str]:
    """`wanted` documents of at most `characters` each, taken from all texts in turn: their beginnings first."""
    found: list[str] = []
    start = 0
    while len(found) < wanted and any(len(text) > start for text in texts):
        found += [text[start : start + characters] for text in texts if len(text) > start]
        start += characters
    return found[:wanted]


def main() -> None:
    """All sections, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", nargs="*", metavar="LANGUAGE=FILE")
    parser.add_argument("--documents", type=int, default=PARITY_DOCUMENTS)
    parser.add_argument("--only", choices=("speed", "parity", "folder"))
    parser.add_argument("--speed-of-stdin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.speed_of_stdin:
        print(json.dumps(_measure(arguments.folder, json.load(sys.stdin))))
        return
    texts: dict[str, list[str]] = {}
    for given in arguments.texts:
        language, _, path = given.partition("=")
        texts.setdefault(language, []).extend(read_texts(Path(path)))
    result: dict[str, Any] = {}
    if arguments.only in (None, "speed"):
        result["speed"] = encoding_speed(arguments.folder, texts)
    share = -(-arguments.documents // max(1, len(texts)))
    documents = [text for each in texts.values() for text in cut_to_documents(each, share)]
    if arguments.only in (None, "parity"):
        result["parity"] = encoding_parity(arguments.folder, documents)
    if arguments.only in (None, "folder"):
        result["folder"] = same_ids_everywhere(
            arguments.folder, documents[:: max(1, len(documents) // FOLDER_DOCUMENTS)]
        )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
