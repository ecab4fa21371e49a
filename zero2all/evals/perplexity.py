"""Bits per byte on held-out text: comparable over tokenizers, channels and models.

`held_out_rows`: the held-out loss of a checkpoint (`train.validate` says what it is). Training records it in the
checkpoint and in the metrics of the run, so that every display has the same figure.

`held_out_bits_per_byte` by channel, `file_bits_per_byte` by file: every document is scored whole from its beginning, in
windows of data.seq_len tokens; bits are summed over all tokens including the end of the document, bytes are those of
its UTF-8 text. Windows do not overlap, or, with a stride, each begins `stride` tokens after the last and only what is
new in it is scored. The baseline is what gzip -9 needs for the same text.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.progress import progress
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.evals.options import read_text
from zero2all.infer.boundary import opening_id
from zero2all.infer.engine import Engine
from zero2all.infer.load import LoadedModel, load_model
from zero2all.packed.shard_format import PackedSplit
from zero2all.train.checkpoints.layout import checkpoint_folder
from zero2all.train.checkpoints.manifest import HELD_OUT, read_manifest
from zero2all.train.validate import Scores, held_out_scores

DOCUMENTS_AT_ONCE = 32


@dataclass(frozen=True)
class Windows:
    """How a text longer than the window is cut."""

    length: int
    """Tokens that are predicted in one window at most."""
    stride: int = 0
    """Tokens between the beginnings of windows: all but those of the first window have at least length - stride tokens
    before them. 0: windows do not overlap."""

    def __post_init__(self) -> None:
        if not 0 <= self.stride <= self.length:
            raise UsageError(
                f"A stride of {self.stride} does not fit windows of {self.length} tokens (data.seq_len): give --stride "
                f"a number from 1 to {self.length}, or 0 for windows without overlap."
            )

    def cut(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(first, start, end) of the windows of a text of so many tokens: ids first to end, scored from start on."""
        end = 0
        while end < tokens - 1:
            before, end = end, min(end + (self.stride if end and self.stride else self.length), tokens - 1)
            yield (max(0, end - self.length) if self.stride else before), before + 1, end + 1


@dataclass
class TextScore:
    """What a model needs for some text."""

    nats: float = 0.0
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    gzip_bytes: int = 0
    position_nats: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By n: of the tokens with 2^n to 2^(n+1) - 1 tokens before them in their window."""
    position_tokens: Counter[int] = field(default_factory=Counter)
    unknown_tokens: int = 0
    """Tokens that stand for text the tokenizer cannot spell: their text costs almost nothing."""
    most_before: int = 0
    """Tokens before the one that had most."""

    def count(self, logprobs: Sequence[float], context: int) -> None:
        """Add tokens that follow each other, the first with so many tokens before it."""
        self.nats -= math.fsum(logprobs)
        self.tokens += len(logprobs)
        self.most_before = max(self.most_before, context + len(logprobs) - 1)
        for place, logprob in enumerate(logprobs, context):
            bucket = place.bit_length() - 1
            self.position_nats[bucket] -= logprob
            self.position_tokens[bucket] += 1

    def add(self, other: Self) -> None:
        """Add another text."""
        for name in ("nats", "tokens", "documents", "bytes", "gzip_bytes", "unknown_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.most_before = max(self.most_before, other.most_before)
        self.position_tokens.update(other.position_tokens)
        for bucket, nats in other.position_nats.items():
            self.position_nats[bucket] += nats

    def summary(self) -> dict[str, Any]:
        """The figures of a report."""
        return {
            "bits_per_byte": self.nats / math.log(2) / self.bytes,
            "gzip_bits_per_byte": self.gzip_bytes * 8 / self.bytes,
            "loss": self.nats / self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "unknown_tokens": self.unknown_tokens,
            "nats": self.nats,
            "by_position": [
                {
                    "from": 1 << bucket,
                    "to": min((2 << bucket) - 1, self.most_before),
                    "loss": self.position_nats[bucket] / tokens,
                    "tokens": tokens,
                }
                for bucket, tokens in sorted(self.position_tokens.items())
            ],
        }


def held_out_bits_per_byte(
    engine: Engine, windows: Windows, corpus: Path, max_bytes_per_source: int
) -> dict[str, dict[str, Any]]:
    """Per channel: bits per byte, those of gzip, loss also by position, documents, bytes and tokens."""
    totals: dict[str, TextScore] = {}
    packers: dict[str, Any] = {}
    sources = corpus_sources(corpus)
    with progress("eval", total=None, unit="B") as bar:
        for name, manifest in sources.items():
            total = totals.setdefault(manifest["channel"], TextScore())
            packer = packers.setdefault(manifest["channel"], _packer())
            for texts in _batches(corpus, name, text_template(manifest), max_bytes_per_source):
                for text, score in zip(texts, score_documents(engine, texts, windows), strict=True):
                    total.add(score)
                    total.gzip_bytes += len(packer.compress(text.encode()))
                    bar.advance(score.bytes, note=name)
    for channel, packer in packers.items():
        totals[channel].gzip_bytes += len(packer.flush())
    return {channel: total.summary() for channel, total in sorted(totals.items()) if total.bytes}


def file_bits_per_byte(
    engine: Engine, windows: Windows, files: dict[str, Path], max_bytes: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The same of each file, and of files that cannot be scored, in words, why."""
    found: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    with progress("text files", total=None, unit="B") as bar:
        for name, path in files.items():
            text = read_text(path, max_bytes)
            if isinstance(text, str):
                skipped[name] = text
                continue
            (score,) = score_documents(engine, [text[0]], windows, are_whole=text[1])
            packer = _packer()
            score.gzip_bytes = len(packer.compress(text[0].encode()) + packer.flush())
            found[name] = {**score.summary(), "is_whole": text[1]}
            bar.advance(score.bytes, note=name)
    return found, skipped


def _packer() -> Any:
    return zlib.compressobj(9, wbits=-15)  # without gzip's header


def _batches(corpus: Path, source: str, template: str, max_bytes: int) -> Iterator[list[str]]:
    """Held-out documents of a source, some at a time, until the next would exceed max_bytes."""
    texts: list[str] = []
    taken = 0
    for record in iter_records(corpus, source, "valid"):
        text = training_text(record, template)
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


def score_documents(engine: Engine, texts: list[str], windows: Windows, are_whole: bool = True) -> list[TextScore]:
    """Each document from its beginning, with its end where it is whole."""
    tokenizer = engine.tokenizer
    closing = [tokenizer.end_id] if are_whole else []
    documents = [[opening_id(tokenizer), *ids, *closing] for ids in tokenizer.encode_batch([*texts])]
    found = [TextScore(documents=1, bytes=len(text.encode())) for text in texts]
    for score, ids in zip(found, documents, strict=True):
        score.unknown_tokens = 0 if tokenizer.unknown_id is None else ids.count(tokenizer.unknown_id)
    cuts = [(number, *window) for number, ids in enumerate(documents) for window in windows.cut(len(ids))]
    rows = [documents[number][first:end] for number, first, _, end in cuts]
    starts = [start - first for _, first, start, _ in cuts]
    for (number, *_), start, scores in zip(cuts, starts, engine.score(rows, starts), strict=True):
        found[number].count(scores.logprobs, start)
    return found


def held_out_rows(loaded: LoadedModel, splits: Sequence[PackedSplit], run: Path) -> Scores:
    """The held-out loss of a checkpoint by channel: what training recorded in it, or else the same computation now, in
    the precision of training."""
    assert loaded.config is not None, "only a run has rows that it validates on"
    with suppress(BadInputError, OSError, KeyError):
        kept: Scores = read_manifest(checkpoint_folder(run, loaded.step))[HELD_OUT]["channels"]
        return dict(sorted(kept.items()))
    if loaded.config.train.precision in ("bfloat16", "float16"):
        loaded = load_model(str(run), None, loaded.step, loaded.device, loaded.config.train.precision)
    assert loaded.config is not None, "it is that of the run"
    return dict(sorted(held_out_scores(loaded.model, [*splits], loaded.config).items()))
