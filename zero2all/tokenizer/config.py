"""What a person may choose about their tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zero2all.common.schema import PositiveInt, Range
from zero2all.tokenizer.specials import SMALLEST_VOCAB_SIZE


@dataclass(frozen=True)
class TokenizerConfig:
    """The `tokenizer` section of the config, and the flags of `z2a tokenizer train`."""

    vocab_size: Annotated[int, Range(minimum=SMALLEST_VOCAB_SIZE)] = 64_000
    """Number of token ids: control tokens, the 256 bytes and the learned pieces together."""

    kind: Literal["hf-bbpe"] = "hf-bbpe"
    """Which trainer: `hf-bbpe` is byte-level BPE by the `tokenizers` library."""

    train_bytes: PositiveInt | None = None
    """Train on the first this many bytes of text (the document on the border is cut); None trains on all of it."""

    min_piece_count: PositiveInt = 2
    """A piece is learned only if it occurs at least this many times in the training text."""

    max_piece_bytes: Annotated[int, Range(minimum=2)] | None = None
    """Longest piece in UTF-8 bytes (a Chinese character has 3). None sets no limit, so in text made from few
    templates, a whole Chinese clause (which has no spaces) may become one piece."""
