"""Estimates how much memory the trainers of the libraries will need, before they start.

Their memory follows the *distinct* text they hold: `tokenizers` keeps every distinct pretoken with 32 bytes a symbol
and, for each pair of symbols, the set of words it occurs in; SentencePiece keeps every line and a pointer for each
character. Distinct text grows with a power of the text (Heaps' law: U = k · N^b), so a sample that is counted at half
and at full length gives both constants. The bytes per distinct byte are measured ones (see the constants).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero2all.common.errors import BadInputError
from zero2all.common.files import human_bytes
from zero2all.common.memory import available_memory
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.hf_bbpe import pattern_of
from zero2all.tokenizer.parts import TextPart
from zero2all.tokenizer.text import well_formed

SAMPLE_BYTES = 3_000_000
# Fitted to runs of 5 to 20 MB of Chinese and English, vocabulary 32,000, one thread: the estimates came out
# between 0 and 40 % above what was measured.
HF_BASE_BYTES, HF_BYTES_PER_DISTINCT_BYTE = 210_000_000, 105
SENTENCEPIECE_BASE_BYTES, SENTENCEPIECE_BYTES_PER_DISTINCT_BYTE = 120_000_000, 32
SENTENCEPIECE_BYTES_PER_TEXT_BYTE = 4
BYTES_PER_LINE = 150
"""About, where input_sentence_size bounds the number of lines that are kept."""
FREE_SHARE = 0.9
"""Without --max-memory a trainer may use this share of what is available."""


@dataclass(frozen=True)
class Estimate:
    """What a trainer is expected to need."""

    text_bytes: int
    distinct_bytes: int
    """Bytes of all distinct pretokens, expected over the whole text."""
    memory_bytes: int
    sampled_bytes: int
    """How much text the expectation rests on; 0: the text is so small that the worst case fits."""


def check_memory(parts: Sequence[TextPart], config: TokenizerConfig, ignore: bool = False) -> Estimate:
    """The estimate for `config.kind`; refuses, with advice, when it does not fit and is not to be ignored."""
    limit = config.memory_bytes or int(available_memory() * FREE_SHARE)
    estimate = estimate_memory(parts, config, limit)
    if estimate.memory_bytes > limit and not ignore:
        share = max(1, int(100 * (limit / estimate.memory_bytes) ** 1.3))
        have = f"--max-memory allows {human_bytes(limit)}."
        if not config.memory_bytes:
            have = f"This machine has {human_bytes(limit)} free."
        raise BadInputError(
            f"--kind {config.kind} would need about {human_bytes(estimate.memory_bytes)} of memory for "
            f"{human_bytes(estimate.text_bytes)} of this text ({human_bytes(estimate.distinct_bytes)} of distinct "
            f"pretokens, estimated from a sample of {human_bytes(estimate.sampled_bytes)}). {have} Use --kind bpe, "
            f"which learns from all text in little memory; or train on less text (--take {share}/100); or add "
            f"--ignore-memory to try anyway."
        )
    return estimate


def estimate_memory(parts: Sequence[TextPart], config: TokenizerConfig, limit: int) -> Estimate:
    """Count distinct pretokens in a sample and extrapolate to the whole text."""
    total = sum(part.size_bytes for part in parts)
    worst = _memory(config, total, total)
    if worst <= limit:
        return Estimate(total, total, worst, 0)
    sampled, half, whole = _distinct_in_sample(parts, config)
    growth = min(1.0, max(0.3, math.log2(whole / half))) if half else 1.0
    distinct = int(whole * max(1.0, total / max(1, sampled)) ** growth)
    return Estimate(total, distinct, _memory(config, total, distinct), sampled)


def _memory(config: TokenizerConfig, text_bytes: int, distinct_bytes: int) -> int:
    """Memory of the trainer for a text of this size with distinct pretokens of that size."""
    if config.kind != "sentencepiece":
        return HF_BASE_BYTES + distinct_bytes * HF_BYTES_PER_DISTINCT_BYTE
    lines = config.sentencepiece.input_sentence_size
    kept = text_bytes if lines is None else min(text_bytes, lines * BYTES_PER_LINE)
    distinct = min(distinct_bytes, kept)
    return (
        SENTENCEPIECE_BASE_BYTES
        + kept * SENTENCEPIECE_BYTES_PER_TEXT_BYTE
        + distinct * SENTENCEPIECE_BYTES_PER_DISTINCT_BYTE
    )


def _distinct_in_sample(parts: Sequence[TextPart], config: TokenizerConfig) -> tuple[int, int, int]:
    """Bytes sampled, and bytes of distinct pretokens in half of them and in all."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.Split(pattern_of(config.pattern), "isolated")
    seen: set[str] = set()
    sampled, distinct = 0, 0
    course = [(0, 0)]
    for text in _sample(parts):
        sampled += len(text.encode())
        for piece, _ in split.pre_tokenize_str(text):
            if piece not in seen:
                seen.add(piece)
                distinct += len(piece.encode())
        course.append((sampled, distinct))
    at_half = max(found for read, found in course if read <= sampled / 2)
    return sampled, at_half, distinct


def _sample(parts: Sequence[TextPart]) -> Iterator[str]:
    """The beginnings of all parts, in turn, so that both halves of the sample are a mix of everything."""
    streams = [part.texts() for part in parts]
    left = SAMPLE_BYTES
    while streams and left > 0:
        alive = []
        for stream in streams:
            taken = 0
            while left > 0 and taken < 20_000 and (text := next(stream, None)) is not None:
                text = well_formed(text[:200_000])
                taken += len(text.encode())
                left -= len(text.encode())
                yield text
            if taken >= 20_000:
                alive.append(stream)
        streams = alive
