"""What a person may choose about encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from zero2all.common.schema import PositiveInt

EncoderName = Literal["auto", "fastokens", "numba", "gigatoken", "tiktoken", "tokenizers"]
ENCODER_NAMES: tuple[EncoderName, ...] = get_args(EncoderName)


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder turns text into ids. The ids do not depend on it."""

    name: EncoderName = "auto"
    """auto takes the one expected to be fastest on this text among those that run here and agree with the reference;
    `numba` is ours and needs nothing beyond zero2all, `tokenizers` is the reference."""
    strict: bool = False
    """One asked for by name that cannot run, or that differs from the reference, is an error and not replaced."""
    threads: PositiveInt | None = None
    """Threads of numba, gigatoken and tiktoken; None: one per core. fastokens and tokenizers read RAYON_NUM_THREADS."""
