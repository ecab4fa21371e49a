"""From training text to a tokenizer folder, whichever kind learns it.

An interrupted training goes on: what the trainer has counted stands in `<folder>.training-<inputs>` beside the folder
until the folder is written. What other inputs left there is removed when a new training begins; while one is at work,
another one for the same folder is refused.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError, DiskError, UsageError, UserError
from zero2all.common.files import MANIFEST_NAME, human_bytes, read_json, sweep_partials
from zero2all.common.lock import folder_lock
from zero2all.common.manifest import is_current
from zero2all.tokenizer.config import TokenizerConfig
from zero2all.tokenizer.parts import ListPart, TextPart
from zero2all.tokenizer.save import SENTENCEPIECE_NAME, save_tokenizer, tokenizer_json_of
from zero2all.tokenizer.sizes import TooFewPiecesError
from zero2all.tokenizer.spool import parts_from_texts
from zero2all.tokenizer.text import CountedText

SCRATCH_MARK = ".training-"
NOT_PART_OF_THE_RESULT = ("threads", "max_memory")
"""Settings that change how fast and in how much memory the same tokenizer is made."""
REPEATABLE_FACTS = (
    *("unique_pieces", "dropped_pieces", "symbols", "characters", "learned", "pairs_of_characters"),
    "thresholds_tried",
)
"""What the manifest records of our trainer: the same for every machine. Seconds and memory are printed instead."""

CONSEQUENCES = {
    "none": "every text comes back byte for byte",
    "nfc": "text comes back in NFC: accents joined to their letters, so bytes may differ where a text was not in NFC",
    "nfkc": "NFKC loses distinctions: full-width letters, ligatures, superscripts and the like become plain ones, and "
    "text does not come back as it was; code and mathematics suffer",
}
"""What each normalisation means for decode(encode(text))."""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: Path, inputs: str, **settings: Any
) -> dict[str, Any]:
    """Learn a vocabulary of exactly `vocab_size` ids from any texts into `folder`; returns its manifest.

    `inputs` is the fingerprint of all that decides the result (text and options): when `folder` was already made
    from the same inputs, no text is read. `settings` are fields of `TokenizerConfig`. An iterator is written to disk
    first, since training reads the text more than once.
    """
    config = TokenizerConfig(vocab_size=vocab_size, **settings)
    require_sound(config)
    if not is_current(folder, "tokenizer", inputs):
        with scratch_folder(folder, inputs) as scratch:
            parts: Sequence[TextPart] = (
                [ListPart(texts)] if isinstance(texts, list | tuple) else parts_from_texts(texts, scratch)
            )
            _train(parts, config, folder, inputs, {}, scratch, ignore_memory=False)
    manifest: dict[str, Any] = read_json(folder / MANIFEST_NAME)
    return manifest


def train_on_parts(
    parts: Sequence[TextPart],
    config: TokenizerConfig,
    folder: Path,
    inputs: str,
    content: dict[str, Any],
    ignore_memory: bool = False,
) -> dict[str, Any]:
    """The same for text in parts; `content` is what the manifest should say about where they come from."""
    require_sound(config)
    if not is_current(folder, "tokenizer", inputs):
        with scratch_folder(folder, inputs) as scratch:
            _train(parts, config, folder, inputs, content, scratch, ignore_memory)
    manifest: dict[str, Any] = read_json(folder / MANIFEST_NAME)
    return manifest


def deciding(config: TokenizerConfig) -> dict[str, Any]:
    """The settings that decide the result."""
    values = dataclasses.asdict(config)
    unused = {"take", *NOT_PART_OF_THE_RESULT}  # what is taken shows in the parts
    if config.kind != "sentencepiece":
        unused.add("sentencepiece")
    if config.kind == "bpe" and not config.exact:
        unused.remove("max_memory")  # what does not fit may be left out
    for name in unused:
        del values[name]
    return values


def require_sound(config: TokenizerConfig) -> None:
    """Raise for settings that cannot be."""
    problems = config.problems("tokenizer")
    if problems:
        raise UsageError("No tokenizer was trained. " + " ".join(str(problem) for problem in problems))


@contextmanager
def scratch_folder(folder: Path, inputs: str) -> Iterator[Path]:
    """A folder for this training that outlives an interruption, and that nobody else uses meanwhile."""
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
    learn = {"bpe": _by_bpe, "hf-bbpe": _by_hf_bbpe, "sentencepiece": _by_sentencepiece}[config.kind]
    tokenizer_json, text, facts, files = learn(parts, config, scratch, ignore_memory)
    _check_size(len(tokenizer_json["model"]["vocab"]), text, config)
    described = {
        "tokenizer_kind": config.kind,
        "normalise": config.normalise,
        "text": text,
        **content,
        **({"training": facts} if facts else {}),
        "settings": deciding(config),
    }
    save_tokenizer(folder, tokenizer_json, config.specials, described, inputs, files)


_Learned = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, bytes]]
"""tokenizer.json, facts about the text, facts about the training, other files."""


def _by_bpe(parts: Sequence[TextPart], config: TokenizerConfig, scratch: Path, _: bool) -> _Learned:
    from zero2all.tokenizer.bpe import learn_bpe

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
        say=_say,
    )
    found = learned.facts
    facts = {"threshold": learned.threshold, "last_count": learned.last_count, "exact": learned.exact}
    facts |= {name: found[name] for name in REPEATABLE_FACTS if name in found}
    _say(
        f"bpe: {found['unique_pieces']:,} distinct pieces of text, cut at T = {learned.threshold:,}, last merge seen "
        f"{learned.last_count:,} times: {'exact' if learned.exact else 'APPROXIMATE'}; {found['seconds']['all']:.0f} s "
        f"on {found['threads']} threads, peak memory {human_bytes(found['peak_memory_bytes'])}"
    )
    tokenizer_json = tokenizer_json_of(learned.pieces, learned.merges, control, config.normalise)
    return tokenizer_json, found["text"], facts, {}


def _say(note: str) -> None:
    print(note, file=sys.stderr, flush=True)


def _by_hf_bbpe(parts: Sequence[TextPart], config: TokenizerConfig, _: Path, ignore_memory: bool) -> _Learned:
    from zero2all.tokenizer.hf_bbpe import learn_hf_bbpe
    from zero2all.tokenizer.memory import check_memory

    check_memory(parts, config, ignore_memory)
    text = CountedText(parts, config.specials.names(), config.normalise)
    tokenizer_json = learn_hf_bbpe(text, config, sum(part.size_bytes for part in parts))
    return tokenizer_json, text.facts(), {}, {}


def _by_sentencepiece(parts: Sequence[TextPart], config: TokenizerConfig, scratch: Path, ignore: bool) -> _Learned:
    from zero2all.tokenizer.memory import check_memory
    from zero2all.tokenizer.sentencepiece_kind import learn_sentencepiece, require_sentencepiece

    require_sentencepiece()
    check_memory(parts, config, ignore)
    text = CountedText(parts, config.specials.names(), config.normalise)
    total = sum(part.size_bytes for part in parts)
    tokenizer_json, model, facts = learn_sentencepiece(text, config, total, scratch)
    return tokenizer_json, text.facts(), facts, {SENTENCEPIECE_NAME: model}


def _check_size(largest: int, text: dict[str, Any], config: TokenizerConfig) -> None:
    if not text["bytes"]:
        raise BadInputError(
            f"There is no text to train a tokenizer on ({text['documents']} documents, 0 bytes). Build a corpus from "
            f"files with text first: `z2a corpus build NAME=PATH`, then `z2a corpus show`."
        )
    if largest < config.vocab_size:
        raise TooFewPiecesError(
            f"This text cannot support a vocabulary of {config.vocab_size:,} ids: {human_bytes(text['bytes'])} in "
            f"{text['documents']:,} documents have pieces (seen at least {config.min_piece_count} times) for "
            f"{largest:,} at most. Set --vocab-size to {largest} or less, or train on more text.",
            largest,
        )
