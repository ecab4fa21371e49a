"""A LLaMA-like SentencePiece model, extended with Chinese from text of any size, in a bounded memory.

    python -m benchmarks.extend_sentencepiece --english en-docs.parquet --chinese zh-*.gz --megabytes 200 --work /tmp/x

The model is trained by the `sentencepiece` package with LLaMA's settings (BPE, byte fallback, a space before every
text, digits apart, 32,000 ids) on the English text. The Chinese is split by document: a fiftieth is held out, the rest
is repeated in other orders of its sentences until there are so many megabytes. `z2a tokenizer extend` runs as its own
process, whose peak memory is read from the system. Then: every old id means the same piece; held-out Chinese and
English come back exactly; the `sentencepiece` package gives the same ids for the extended `.model`; compression on
held-out text.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import save_result
from zero2all.tokenizer.extend_sentencepiece import compression
from zero2all.tokenizer.load import load_tokenizer

HELD_OUT = 50
"""One document of so many is held out."""
OLD_IDS, NEW_IDS = 32_000, 49_953
"""LLaMA's vocabulary, and that of the first Chinese extension of it."""


def chinese_documents(paths: list[Path]) -> list[str]:
    """The texts of gzipped JSON: one object a line, or one array."""
    found: list[str] = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            text = file.read()
        rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
        found += [row.get("text") or row.get("content") or "" for row in rows]
    return found


def varied(documents: list[str], size: int) -> Iterator[str]:
    """The documents again and again, their sentences in another order each time, until there are `size` bytes."""
    rng = random.Random(0)
    for turn in itertools.count():
        for document in documents:
            sentences = [part for part in re.split(r"(?<=[。！？\n])", document) if part.strip()]
            if turn:
                rng.shuffle(sentences)
            text = "".join(sentences).strip() + "\n"
            size -= len(text.encode())
            yield text
            if size <= 0:
                return


def train_llama_like(texts: list[str], work: Path) -> Path:
    """A BPE model with the settings of LLaMA's."""
    import sentencepiece

    prefix = work / "llama-like"
    lines = (line for text in texts for line in text.splitlines() if line.strip())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=OLD_IDS,
        byte_fallback=True,
        character_coverage=0.9999,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return prefix.with_suffix(".model")


def main() -> None:
    """Run it all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--english", type=Path, required=True)
    parser.add_argument("--chinese", type=Path, nargs="+", required=True)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--max-memory", default="1GB")
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    import pyarrow.parquet

    english = pyarrow.parquet.read_table(arguments.english, columns=["text"])["text"].to_pylist()
    chinese = chinese_documents(arguments.chinese)
    held_en, held_zh = english[::HELD_OUT], chinese[::HELD_OUT]
    taught = [text for number, text in enumerate(chinese) if number % HELD_OUT]
    model = arguments.work / "llama-like.model"
    if not model.is_file():
        train_llama_like([text for number, text in enumerate(english) if number % HELD_OUT], arguments.work)
    text_file = arguments.work / "chinese.txt"
    with open(text_file, "w", encoding="utf-8") as file:
        for text in varied(taught, arguments.megabytes * 1_000_000):
            file.write(text)
    target = arguments.work / "extended"
    command = [sys.executable, "-m", "zero2all", "tokenizer", "extend", "--tokenizer", str(model), "--from-text"]
    command += [
        str(text_file),
        "--vocab-size",
        str(NEW_IDS),
        "--max-memory",
        arguments.max_memory,
        "--out",
        str(target),
    ]
    started = time.monotonic()
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(said)
    save_result("extend_sentencepiece", {**_checked(model, target, held_en, held_zh), **_run(text_file, seconds, peak)})


def _run(text_file: Path, seconds: float, peak: int) -> dict[str, Any]:
    return {
        "text_bytes": text_file.stat().st_size,
        "seconds": round(seconds, 1),
        "peak_memory_bytes": peak,
    }


def _checked(model: Path, target: Path, english: list[str], chinese: list[str]) -> dict[str, Any]:
    import sentencepiece

    old, new = load_tokenizer(model), load_tokenizer(target)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(target / "sentencepiece.model"))
    moved = sum(old.token_bytes(number) != new.token_bytes(number) for number in range(old.vocab_size))
    texts = [*english, *chinese]
    ids = new.encode_batch(texts)
    other = sum(found != reference.encode(text) for found, text in zip(ids, texts, strict=True))
    return {
        "old_ids": old.vocab_size,
        "ids": new.vocab_size,
        "old_ids_moved": moved,
        "held_out_texts": len(texts),
        "texts_with_other_ids_than_sentencepiece": other,
        "english_texts_with_other_ids_than_before": sum(
            old.encode_text(text) != new.encode_text(text) for text in english
        ),
        "chinese": compression(old, new, chinese),
        "english": compression(old, new, english),
    }


if __name__ == "__main__":
    main()
