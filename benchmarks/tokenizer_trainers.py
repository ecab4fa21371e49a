"""One trainer, one text, one process: time, memory, and the tokenizer it made. `benchmarks/tokenizer.py` starts it.

    python -m benchmarks.tokenizer_trainers ours --text zh.txt --pieces 32000 --out zh.ours.json

Prints one line of JSON. Memory is resident memory: `peak_mb` of the whole process, `loaded_mb` before training starts,
with every library loaded (for ours: with the compiler's run-time too, which is most of it).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zero2all.tokenizer.bpe.learn import peak_resident

DOCUMENT_BYTES = 20_000
ISOLATED_HAN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{L}&&[^\p{Han}]]+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The published pattern with runs of Han by themselves, as some trainers have it: no punctuation attaches to them."""


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our trainer, with or without the cut."""
    import dataclasses

    from zero2all.tokenizer.bpe.learn import BpeResources, BpeRules, learn_bpe, return_freed_memory
    from zero2all.tokenizer.bpe.scan import pretokens
    from zero2all.tokenizer.parts import file_parts
    from zero2all.tokenizer.save import tokenizer_json_of

    return_freed_memory()
    pretokens("load the native code")
    scratch = Path(tempfile.mkdtemp(prefix="z2a-bpe-", dir=arguments.out.parent))
    try:
        with _measured() as measured:
            learned = learn_bpe(
                file_parts(arguments.text),
                arguments.pieces,
                BpeResources(scratch, arguments.max_memory, arguments.threads),
                BpeRules(cut=not arguments.uncut),
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    facts = dataclasses.asdict(learned)
    del facts["pieces"], facts["merges"]
    described = tokenizer_json_of(learned.pieces, learned.merges, [], "none")
    arguments.out.write_text(json.dumps(described, ensure_ascii=False))
    return {**measured.figures(), **facts}


def tokenizers(arguments: argparse.Namespace) -> dict[str, Any]:
    """The `tokenizers` library's own trainer, with the published pattern or with Han isolated."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from zero2all.tokenizer.config import PRETOKEN_PATTERN

    pattern = ISOLATED_HAN_PATTERN if arguments.isolated_han else PRETOKEN_PATTERN
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=arguments.pieces,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with _measured() as measured:
        tokenizer.train_from_iterator(_documents(arguments.text), trainer)
    tokenizer.save(str(arguments.out))
    return measured.figures()


def sentencepiece(arguments: argparse.Namespace) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback, text as it is."""
    import sentencepiece as library

    with _measured() as measured:
        library.SentencePieceTrainer.train(
            input=",".join(map(str, arguments.text)),
            model_prefix=str(arguments.out.with_suffix("")),
            vocab_size=arguments.pieces,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            max_sentence_length=1 << 24,
            num_threads=arguments.threads,
            minloglevel=2,
        )
    return measured.figures()


class _measured:  # noqa: N801 - reads as a verb where it is used
    """Seconds and memory from here to the end of the block."""

    def __enter__(self) -> _measured:
        self.loaded_mb = _resident_mb()
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self.started
        self.cpu_seconds = time.process_time() - self.cpu_started
        self.peak_mb = peak_resident() / 1e6

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "cpu_seconds": round(self.cpu_seconds, 2),
            "peak_mb": round(self.peak_mb, 1),
            "loaded_mb": round(self.loaded_mb, 1),
            "above_loaded_mb": round(self.peak_mb - self.loaded_mb, 1),
        }


def _resident_mb() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss / 1e6)


def _documents(paths: Sequence[Path]) -> Iterator[str]:
    """Texts of some kilobytes, as documents are; a trainer that keeps whole files would be at a disadvantage."""
    for path in paths:
        with open(path, encoding="utf-8") as file:
            lines: list[str] = []
            held = 0
            for line in file:
                lines.append(line)
                held += len(line)
                if held >= DOCUMENT_BYTES:
                    yield "".join(lines)
                    lines, held = [], 0
            if lines:
                yield "".join(lines)


TRAINERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "ours": ours,
    "tokenizers": tokenizers,
    "sentencepiece": sentencepiece,
}


def main() -> None:
    """Train once and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--pieces", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-memory", type=int, default=None)
    parser.add_argument("--uncut", action="store_true")
    parser.add_argument("--isolated-han", action="store_true")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)
    if arguments.threads == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(json.dumps(TRAINERS[arguments.trainer](arguments)), file=sys.stdout)


if __name__ == "__main__":
    main()
