"""Byte-level BPE by the trainer of the `tokenizers` library: the common way, kept for comparison.

It holds every distinct pretoken in memory. English needs little; Chinese, which has no spaces, needs about 80 bytes of
memory per byte of text (4.2 GB for 50 MB), which `train.py` checks before anything starts. The number of
threads does not change the result.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zero2all.common import jsonio
from zero2all.common.errors import UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import progress
from zero2all.tokenizer.config import PATTERNS, PRETOKEN_PATTERN, TokenizerConfig
from zero2all.tokenizer.save import NORMALIZERS, assembled_json, bpe_model, vocabulary_of
from zero2all.tokenizer.text import CountedText


def learn_hf_bbpe(text: CountedText, config: TokenizerConfig) -> dict[str, Any]:
    """tokenizer.json with at most `config.vocab_size` ids, control tokens first; fewer when the text gives no more."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    control = config.specials.names()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern_of(config.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # The trainer would make control tokens ordinary added tokens, which text can spell: it must not know them.
        vocab_size=config.vocab_size - len(control),
        min_frequency=config.min_piece_count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        # The library learns pieces shorter than its limit, not up to it. One byte is one character in its alphabet.
        max_token_length=None if config.max_piece_bytes is None else config.max_piece_bytes + 1,
        show_progress=False,
    )
    with _threads(config.threads), progress("tokenizer", total=text.expected_bytes, unit="B") as bar:
        tokenizer.train_from_iterator(text.stream(bar), trainer)
    learned: dict[str, Any] = jsonio.loads(tokenizer.to_str())
    pieces = sorted(learned["model"]["vocab"], key=learned["model"]["vocab"].__getitem__)
    vocab = vocabulary_of(control, pieces)
    normalizer = NORMALIZERS[config.normalise]  # the stream was normalised already
    return {**learned, "normalizer": normalizer, "added_tokens": [], "model": {**learned["model"], "vocab": vocab}}


def pattern_of(asked: str | None, known: Mapping[str, str] = PATTERNS) -> Any:
    """The pretoken pattern as the library takes it: one of ours by name, or a regular expression."""
    from tokenizers import Regex

    text = PRETOKEN_PATTERN if asked is None else known.get(asked, asked)
    try:
        if re.fullmatch(r"[\w-]*", text):  # as an expression it would match itself: a name that is not known
            raise ValueError(t("a plain word"))
        return Regex(text)
    except Exception as error:  # the library raises plain Exception
        raise UsageError(
            f"--pattern {asked!r} is neither a name ({', '.join(known)}) nor a regular expression ({error})."
        ) from error


def pretokens(pre_tokenizer: Any, text: str) -> list[str]:
    """What the `pre_tokenizer` of a tokenizer.json cuts a text into."""
    from tokenizers import Tokenizer

    whole = assembled_json(None, pre_tokenizer, None, bpe_model({}, []))
    backend = Tokenizer.from_str(jsonio.dumps_line(whole).decode())
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """The library takes its thread count from the environment when it first works; later calls keep it."""
    before = os.environ.get("RAYON_NUM_THREADS")
    if count is not None:
        os.environ["RAYON_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        if count is not None:
            if before is None:
                del os.environ["RAYON_NUM_THREADS"]
            else:
                os.environ["RAYON_NUM_THREADS"] = before
