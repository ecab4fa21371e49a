"""The one place where packing turns texts into ids.

    encoder = open_encoder(tokenizer, EncoderChoice("auto"), sample=texts_of_the_corpus)
    encoder.encode(texts)                       # .ids and .offsets; text i has ids[offsets[i] : offsets[i + 1]]
    encoder.chosen                              # what was asked, what was taken and why, for the manifest

Which encoder works changes the speed and not one byte of what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from zero2all.common.errors import UsageError
from zero2all.tokenizer.load import Tokenizer

REFERENCE = "tokenizers"


class Encoded(Protocol):
    """The ids of several texts."""

    @property
    def ids(self) -> np.ndarray:
        """uint32, all texts one after the other."""

    @property
    def offsets(self) -> np.ndarray:
        """int64: text i has ids[offsets[i] : offsets[i + 1]]."""


@dataclass(frozen=True)
class EncoderChoice:
    """What a person may choose."""

    name: str = "auto"
    strict: bool = False
    """An encoder asked for by name that cannot be used is an error and not replaced."""
    threads: int | None = None
    """None: what the encoder takes by itself."""


@dataclass(frozen=True)
class Encoder:
    """An encoder that was chosen."""

    encode: Callable[[Sequence[str]], Encoded]
    chosen: dict[str, Any]
    """asked, got, reason, parity."""

    @property
    def name(self) -> str:
        """The encoder that works."""
        return str(self.chosen["got"])


def open_encoder(
    tokenizer: Tokenizer, choice: EncoderChoice, sample: Sequence[str] = (), text_bytes: int | None = None
) -> Encoder:
    """The encoder for this tokenizer, compared with the reference on `sample` before it may work."""
    try:
        from zero2all.tokenizer.engines import EngineConfig, open_engine
    except ImportError:
        return _reference(tokenizer, choice)
    engine = open_engine(tokenizer, EngineConfig(choice.name, choice.strict, choice.threads), sample, text_bytes)
    return Encoder(engine.encode_batch, engine.choice.as_json())


@dataclass(frozen=True)
class _Batch:
    ids: np.ndarray
    offsets: np.ndarray


def _reference(tokenizer: Tokenizer, choice: EncoderChoice) -> Encoder:
    if choice.name not in ("auto", REFERENCE):
        raise UsageError(f"There is no encoder {choice.name!r}. There are: auto, {REFERENCE}.")

    def encode(texts: Sequence[str]) -> _Batch:
        rows = [np.asarray(row, dtype=np.uint32) for row in tokenizer.encode_batch(texts)]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return _Batch(np.concatenate(rows) if rows else np.empty(0, np.uint32), offsets)

    return Encoder(encode, {"asked": choice.name, "got": REFERENCE, "reason": "the reference", "parity": None})
