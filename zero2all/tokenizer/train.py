"""From training text to a tokenizer folder, for every kind of trainer.

An interrupted training continues: its counts stay in `<folder>.training-<inputs>` beside the folder until the folder is
written. A new training removes what other inputs left there. Two trainings of one folder at a time are refused.

Estimates how much memory the trainer of the `tokenizers` library will need, before it starts. Its memory follows the
*distinct* text: it keeps every distinct pretoken with 32 bytes a symbol and, for each pair of symbols, the set of words
it occurs in. Distinct text grows with a power of the text (Heaps' law: U = k · N^b), so a sample that is counted at
half and at full length gives both constants. The bytes per distinct byte are measured.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, DiskError, UsageError, UserError
from zero2all.common.files import MANIFEST_NAME, human_bytes, read_json, sweep_partials
from zero2all.common.language import translate as t
from zero2all.common.lock import folder_lock
from zero2all.common.manifest import is_current
from zero2all.common.memory import available_memory
from zero2all.common.progress import say
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.hf_bbpe import learn_hf_bbpe, pattern_of
from zero2all.tokenizer.parts import TextPart, parts_from_texts
from zero2all.tokenizer.save import save_tokenizer, tokenizer_json_of
from zero2all.tokenizer.text import CountedText, TooFewPiecesError, require_text, well_formed

SCRATCH_MARK = ".training-"
NOT_PART_OF_THE_RESULT = ("threads", "max_memory")
"""Settings that change how fast and in how much memory the same tokenizer is made."""
REPEATABLE_FACTS = (
    *("unique_pieces", "dropped_pieces", "symbols", "characters", "learned", "pairs_of_characters"),
    "thresholds_tried",
)
"""What the manifest records of our trainer: the same on every machine. Seconds and memory are only printed."""

CONSEQUENCES = {
    "none": "every text comes back byte for byte",
    "nfc": "text comes back in NFC: accents are joined to their letters, so bytes differ where a text was not in NFC",
    "nfkc": (
        "NFKC loses distinctions: full-width letters, ligatures, superscripts and the like become plain ones, "
        "and text does not come back as it was; this harms code and mathematics"
    ),
}
"""What each normalisation means for decode(encode(text))."""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: Path, inputs: str, **settings: Any
) -> dict[str, Any]:
    """Learn a vocabulary of exactly `vocab_size` ids from any texts into `folder`; returns its manifest.

    `inputs` is the fingerprint of all that decides the result (text and options): when `folder` was already made
    from the same inputs, no text is read. `settings` are fields of `TokenizerConfig`.
    """
    config = TokenizerConfig(vocab_size=vocab_size, **settings)
    return train_on_parts(lambda scratch: parts_from_texts(texts, scratch), config, folder, inputs, {})


def train_on_parts(
    parts: Callable[[Path], Sequence[TextPart]],
    config: TokenizerConfig,
    folder: Path,
    inputs: str,
    content: dict[str, Any],
    ignore_memory: bool = False,
) -> dict[str, Any]:
    """The same for text in parts, which may need the scratch folder; `content` goes into the manifest."""
    problems = config.problems("tokenizer")
    if problems:
        raise UsageError("No tokenizer was trained. " + " ".join(str(problem) for problem in problems))
    if not is_current(folder, "tokenizer", inputs):
        with scratch_folder(folder, inputs) as scratch:
            _train(parts(scratch), config, folder, inputs, content, scratch, ignore_memory)
    manifest: dict[str, Any] = read_json(folder / MANIFEST_NAME)
    return manifest


def deciding(config: TokenizerConfig) -> dict[str, Any]:
    """The settings that decide the result."""
    values = dataclasses.asdict(config)
    unused = {"take", *NOT_PART_OF_THE_RESULT}  # what is taken shows in the parts
    if config.kind == "bpe" and not config.exact:
        unused.remove("max_memory")  # what does not fit may be left out
    for name in unused:
        del values[name]
    return values


@contextmanager
def scratch_folder(folder: Path, inputs: str) -> Iterator[Path]:
    """A locked folder for this training, kept when it is interrupted."""
    sweep_partials(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f"{folder.name}{SCRATCH_MARK}{''.join(c for c in inputs if c.isalnum())[:16]}")
    in_use = (
        f"Another process is training a tokenizer in {folder.parent}. Wait for it, or train in another workspace "
        f"(--work)."
    )
    for other in folder.parent.glob(f"{folder.name}{SCRATCH_MARK}*"):
        if other != scratch:
            with folder_lock(other, in_use):
                shutil.rmtree(other, ignore_errors=True)
    scratch.mkdir(exist_ok=True)
    with folder_lock(scratch, in_use):
        try:
            yield scratch
        except UserError as error:
            if not isinstance(error, DiskError):  # what was counted cannot help the next attempt
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(scratch, ignore_errors=True)


def _train(
    parts: Sequence[TextPart],
    config: TokenizerConfig,
    folder: Path,
    inputs: str,
    content: dict[str, Any],
    scratch: Path,
    ignore_memory: bool,
) -> None:
    if config.kind != "bpe":  # which keeps to its limit
        check_memory(parts, config, ignore_memory)
    learn = {"bpe": _by_bpe, "hf-bbpe": _by_hf_bbpe}[config.kind]
    tokenizer_json, text, facts = learn(parts, config, scratch)
    require_text(text)
    largest = len(tokenizer_json["model"]["vocab"])
    if largest < config.vocab_size:
        raise TooFewPiecesError(config.vocab_size, largest, text, config.min_piece_count)
    described = {
        "tokenizer_kind": config.kind,
        "normalise": config.normalise,
        "text": text,
        **content,
        **({"training": facts} if facts else {}),
        "settings": deciding(config),
    }
    save_tokenizer(folder, tokenizer_json, config.specials, described, inputs)


_Learned = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""tokenizer.json, facts about the text, facts about the training."""


def _by_bpe(parts: Sequence[TextPart], config: TokenizerConfig, scratch: Path) -> _Learned:
    from zero2all.tokenizer.bpe.learn import learn_bpe

    control = config.specials.names()
    learned = learn_bpe(
        parts,
        config.vocab_size - len(control),
        scratch=scratch,
        max_memory=config.memory_bytes,
        threads=config.threads,
        normalisation=config.normalise,
        min_piece_count=config.min_piece_count,
        max_piece_bytes=config.max_piece_bytes,
        forbidden=control,
        exact=config.exact,
    )
    found = learned.facts
    facts = {"threshold": learned.threshold, "last_count": learned.last_count, "exact": learned.exact}
    facts |= {name: found[name] for name in REPEATABLE_FACTS if name in found}
    result = t("exact" if learned.exact else "APPROXIMATE")
    say(
        f"bpe: {found['unique_pieces']:,} distinct fragments, cut at T = {learned.threshold:,}, last merge seen "
        f"{learned.last_count:,} times: {result}; {found['seconds']['all']:.0f} s "
        f"on {found['threads']} threads, peak memory {human_bytes(found['peak_memory_bytes'])}"
    )
    tokenizer_json = tokenizer_json_of(learned.pieces, learned.merges, control, config.normalise)
    return tokenizer_json, found["text"], facts


def _by_hf_bbpe(parts: Sequence[TextPart], config: TokenizerConfig, _: Path) -> _Learned:
    text = CountedText(parts, config.specials.names(), config.normalise)
    return learn_hf_bbpe(text, config), text.facts(), {}


SAMPLE_BYTES = 3_000_000
# Fitted to runs of 5 to 20 MB of Chinese and English, vocabulary 32,000, one thread: the estimates came out
# between 0 and 40 % above what was measured.
BASE_BYTES, BYTES_PER_DISTINCT_BYTE = 210_000_000, 105
FREE_SHARE = 0.9
"""Without --max-memory it may use this share of what is available."""


@dataclass(frozen=True)
class Estimate:
    """What the trainer is expected to need."""

    text_bytes: int
    distinct_bytes: int
    """Bytes of all distinct pretokens, expected over the whole text."""
    memory_bytes: int
    sampled_bytes: int
    """How much text the expectation rests on; 0: the text is so small that the worst case fits."""


def check_memory(parts: Sequence[TextPart], config: TokenizerConfig, ignore: bool = False) -> Estimate:
    """The estimate for `hf-bbpe`; refuses, with advice, when it does not fit and is not to be ignored."""
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
    worst = _memory(total)
    if worst <= limit:
        return Estimate(total, total, worst, 0)
    sampled, half, whole = _distinct_in_sample(parts, config)
    growth = min(1.0, max(0.3, math.log2(whole / half))) if half else 1.0
    distinct = int(whole * max(1.0, total / max(1, sampled)) ** growth)
    return Estimate(total, distinct, _memory(distinct), sampled)


def _memory(distinct_bytes: int) -> int:
    """Memory of the trainer for distinct pretokens of this size."""
    return BASE_BYTES + distinct_bytes * BYTES_PER_DISTINCT_BYTE


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
