"""Train a byte-level BPE vocabulary with the `tokenizers` library, and save it so that everybody can load it.

The folder holds `tokenizer.json`, `tokenizer_config.json` and, last, our `manifest.json`. Its layout keeps text from
ever producing a control id: the control tokens stand in the model vocabulary, but no merge leads to them, and
tokenizer.json declares no added tokens; only tokenizer_config.json does, together with `split_special_tokens`. So
`tokenizers.Tokenizer.from_file` sees `<|end_of_text|>` in a text as ordinary characters, and so does `AutoTokenizer`,
which still knows the special ids for decoding and for `eos_token_id`. (A folder that transformers saved again has them
as added tokens and loses the property for plain `tokenizers`.)

Cost: every distinct pre-token is held in memory. English needs little; Chinese, which has no spaces, needs about
80 bytes of memory per byte of text (4.2 GB for 50 MB), so give large Chinese corpora a `train_bytes` limit.
Same text, same options: same bytes on disk, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.files import human_bytes, read_json, staged_folder, write_json
from zero2all.common.manifest import MANIFEST_NAME, is_current, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.tokenizer.fingerprint import tokenizer_fingerprint
from zero2all.tokenizer.specials import (
    BEGIN_OF_TEXT,
    BYTE_COUNT,
    CONTROL_TOKENS,
    END_OF_TEXT,
    PAD,
    SMALLEST_VOCAB_SIZE,
    our_special_map,
)
from zero2all.tokenizer.text import well_formed

PRE_TOKEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern Qwen2 published. Fast encoders know it by heart and are 6 to 80 times slower on a home-made one."""

NO_LENGTH_LIMIT = int(1e30)
"""What transformers writes as `model_max_length` when the tokenizer itself sets no limit."""


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    folder: Path,
    inputs: str,
    *,
    min_piece_count: int = 2,
    max_piece_bytes: int | None = None,
    train_bytes: int | None = None,
    total_bytes: int | None = None,
) -> dict[str, Any]:
    """Learn a vocabulary of exactly `vocab_size` ids from `texts` into `folder`; returns its manifest.

    `inputs` is the fingerprint of all that decides the result (text and options): when `folder` was already made
    from the same inputs, no text is read. `total_bytes`, where known, gives the progress bar its length. The other
    options are those of `TokenizerConfig`. Nothing is written unless everything went well.
    """
    if vocab_size < SMALLEST_VOCAB_SIZE:
        raise UsageError(
            f"A vocabulary of {vocab_size:,} ids is too small: {len(CONTROL_TOKENS)} control tokens and "
            f"{BYTE_COUNT} bytes are always in it. Set --vocab-size to {SMALLEST_VOCAB_SIZE} or more."
        )
    if not is_current(folder, "tokenizer", inputs):
        text = _TrainingText(texts, train_bytes)
        learned = _learn(text, vocab_size, min_piece_count, max_piece_bytes, total_bytes)
        _check_size(learned, vocab_size, text, min_piece_count)
        _save(_with_control_tokens(learned), folder, inputs, text)
    manifest: dict[str, Any] = read_json(folder / MANIFEST_NAME)
    return manifest


@dataclass
class _TrainingText:
    """The training text as a stream, up to a limit, counting what goes by."""

    texts: Iterable[str]
    limit_bytes: int | None
    documents: int = 0
    text_bytes: int = 0
    repaired_documents: int = 0
    limit_reached: bool = False

    def stream(self, bar: Bar) -> Iterator[str]:
        for given in self.texts:
            text = well_formed(given)
            self.repaired_documents += text is not given
            size = len(text.encode())
            if self.limit_bytes is not None and self.text_bytes + size >= self.limit_bytes:
                self.limit_reached = True
                text = text.encode()[: self.limit_bytes - self.text_bytes].decode("utf-8", "ignore")
                size = len(text.encode())
            self.documents += 1
            self.text_bytes += size
            yield text
            bar.advance(size)
            if self.limit_reached:
                break
        bar.advance(0, note="learning merges")


def _learn(
    text: _TrainingText,
    vocab_size: int,
    min_piece_count: int,
    max_piece_bytes: int | None,
    total_bytes: int | None,
) -> dict[str, Any]:
    """The trained tokenizer as tokenizer.json describes it, ids from 0 and without control tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # The trainer would make control tokens ordinary added tokens, which text can spell: it must not know them.
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        min_frequency=min_piece_count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        # The library learns pieces shorter than its limit, not up to it. One byte is one character in its alphabet.
        max_token_length=None if max_piece_bytes is None else max_piece_bytes + 1,
        show_progress=False,
    )
    if text.limit_bytes is not None:
        total_bytes = text.limit_bytes if total_bytes is None else min(total_bytes, text.limit_bytes)
    with progress("tokenizer", total=total_bytes, unit="B") as bar:
        tokenizer.train_from_iterator(text.stream(bar), trainer)
    learned: dict[str, Any] = jsonio.loads(tokenizer.to_str())
    return learned


def _check_size(learned: dict[str, Any], vocab_size: int, text: _TrainingText, min_piece_count: int) -> None:
    if text.text_bytes == 0:
        raise BadInputError(
            f"There is no text to train a tokenizer on ({text.documents} documents, 0 bytes). Build a corpus from "
            f"files with text first: `z2a corpus build NAME=PATH`, then `z2a corpus show`."
        )
    largest = len(learned["model"]["vocab"]) + len(CONTROL_TOKENS)
    if largest < vocab_size:
        raise BadInputError(
            f"This text cannot support a vocabulary of {vocab_size:,} ids: {human_bytes(text.text_bytes)} in "
            f"{text.documents:,} documents have pieces (seen at least {min_piece_count} times) for {largest:,} at "
            f"most. Set --vocab-size to {largest} or less, or build the corpus from more text."
        )


def _with_control_tokens(learned: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with the control tokens put in front: in the vocabulary, but in no merge."""
    pieces = sorted(learned["model"]["vocab"].items(), key=lambda piece_and_id: piece_and_id[1])
    vocab = {name: number for number, name in enumerate([*CONTROL_TOKENS, *(piece for piece, _ in pieces)])}
    assert len(vocab) == len(CONTROL_TOKENS) + len(pieces), "a learned piece spells a control token"
    return {**learned, "added_tokens": [], "model": {**learned["model"], "vocab": vocab}}


def _save(tokenizer_json: dict[str, Any], folder: Path, inputs: str, text: _TrainingText) -> None:
    content = {
        "tokenizer_kind": "hf-bbpe",
        "vocab_size": len(tokenizer_json["model"]["vocab"]),
        "fingerprint": tokenizer_fingerprint(tokenizer_json, our_special_map()),
        "text": {
            "bytes": text.text_bytes,
            "documents": text.documents,
            "documents_with_repaired_surrogates": text.repaired_documents,
            "stopped_at_train_bytes": text.limit_reached,
        },
    }
    with staged_folder(folder) as partial:
        write_json(partial / "tokenizer.json", tokenizer_json)
        write_json(partial / "tokenizer_config.json", _hugging_face_config())
        write_manifest(partial, "tokenizer", inputs, content)


def _hugging_face_config() -> dict[str, Any]:
    """Makes `AutoTokenizer` use tokenizer.json as it is and split control strings that occur in text."""
    roles = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD}
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(number): {"content": name, **plain} for number, name in enumerate(CONTROL_TOKENS)},
        **roles,
        "additional_special_tokens": [name for name in CONTROL_TOKENS if name not in roles.values()],
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": NO_LENGTH_LIMIT,
    }
