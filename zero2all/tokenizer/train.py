"""From training text to a tokenizer folder, for every kind of trainer.

An interrupted training continues: its counts stay in `<folder>.training-<inputs>` beside the folder until the folder is
written. A new training removes what other inputs left there. Two trainings of one folder at a time are refused.

The trainer of the `tokenizers` library keeps every distinct pretoken in memory. Where the most that a text can need
does not fit, it is refused before it starts.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from zero2all.tokenizer.hf_bbpe import learn_hf_bbpe
from zero2all.tokenizer.parts import TextPart, parts_from_texts
from zero2all.tokenizer.save import save_tokenizer, tokenizer_json_of
from zero2all.tokenizer.text import CountedText, TooFewPiecesError, require_text

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
            text = parts(scratch)
            if config.kind != "bpe" and not ignore_memory:  # bpe keeps to its limit
                check_memory(text, config)
            _train(text, config, folder, inputs, content, scratch)
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
) -> None:
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
    from zero2all.tokenizer.bpe.learn import BpeResources, BpeRules, learn_bpe

    control = config.specials.names()
    learned = learn_bpe(
        parts,
        config.vocab_size - len(control),
        BpeResources(scratch, config.memory_bytes, config.threads),
        BpeRules(config.normalise, config.min_piece_count, config.max_piece_bytes, control, config.exact),
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


BASE_BYTES, BYTES_PER_DISTINCT_BYTE = 210_000_000, 105
"""Fitted to runs of 5 to 20 MB of Chinese and English, 32,000 ids, one thread: 0 to 40 % above what they took."""
FREE_SHARE = 0.9
"""Without --max-memory it may use this share of what is available."""


def check_memory(parts: Sequence[TextPart], config: TokenizerConfig) -> None:
    """Refuse `hf-bbpe`, with advice, where a text of this size could need more memory than there is."""
    limit = config.memory_bytes or int(available_memory() * FREE_SHARE)
    text_bytes = sum(part.size_bytes for part in parts)
    most = BASE_BYTES + text_bytes * BYTES_PER_DISTINCT_BYTE
    if most > limit:
        share = max(1, 100 * max(0, limit - BASE_BYTES) // (most - BASE_BYTES))
        have = f"--max-memory allows {human_bytes(limit)}."
        if not config.memory_bytes:
            have = f"This machine has {human_bytes(limit)} free."
        raise BadInputError(
            f"--kind {config.kind} may need up to {human_bytes(most)} of memory for {human_bytes(text_bytes)} of text, "
            f"Chinese nearly that much and English a tenth or less. {have} Use --kind bpe, which learns from all text "
            f"in little memory; or train on less text (--take {share}/100); or add --ignore-memory to try anyway."
        )
