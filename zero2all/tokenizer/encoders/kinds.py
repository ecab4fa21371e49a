"""The encoders, one class each: whether it can run this tokenizer here, and how it encodes.

`open` returns an encoder or raises NotSupported with the reason in words. No encoder ever sees control tokens: they are
removed from the tokenizer.json that it gets, so that it cannot recognise them in text.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, get_args

import numpy as np

from zero2all.common import jsonio
from zero2all.common.cores import usable_cores
from zero2all.common.errors import UsageError
from zero2all.common.schema import PositiveInt
from zero2all.tokenizer.encoders.tables import NotSupported, bpe_tables
from zero2all.tokenizer.load import Tokenizer
from zero2all.tokenizer.text import BREAK_CHARACTER

EncoderName = Literal["auto", "fastokens", "numba", "tokenizers"]
ENCODER_NAMES: tuple[EncoderName, ...] = get_args(EncoderName)
NO_LONGER = ("gigatoken", "tiktoken")
"""Encoders of earlier versions: tiktoken was slower than ours and merges by another rule, gigatoken was three times
slower than ours on Chinese and hardly faster than fastokens on English."""

CACHE_ROWS = 1 << 17
"""Pretokens that our encoder remembers: 4 MB for each thread."""
TEXT_OF_THREAD = 1 << 16
"""Characters below which a batch is not worth another thread."""


@dataclass(frozen=True)
class EncoderConfig:
    """Which encoder turns text into ids. The ids do not depend on it."""

    name: EncoderName = "auto"
    """auto takes the one expected to be fastest on this text among those that run here and agree with the reference;
    `numba` is ours and needs nothing beyond zero2all, `tokenizers` is the reference."""
    strict: bool = False
    """One asked for by name that cannot run, or that differs from the reference, is an error and not replaced."""
    threads: PositiveInt | None = None
    """Threads of numba; None: one per core. fastokens and tokenizers read RAYON_NUM_THREADS."""

    def __post_init__(self) -> None:
        if self.name in NO_LONGER:
            raise UsageError(f"The encoder {self.name} is no longer used; numba and fastokens are faster.")
        if self.name not in ENCODER_NAMES:
            raise UsageError(f"There is no encoder {self.name!r}. Available: {', '.join(ENCODER_NAMES)}.")


@dataclass(frozen=True)
class EncodedBatch:
    """The ids of several texts; `batch[i]` are those of text i, without a copy."""

    ids: np.ndarray
    """uint32, all texts one after the other."""
    offsets: np.ndarray
    """int64: text i has ids[offsets[i] : offsets[i + 1]]."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, text: int) -> np.ndarray:
        if not 0 <= text < len(self):
            raise IndexError(f"text {text} of a batch of {len(self)}")
        return self.ids[self.offsets[text] : self.offsets[text + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[text] for text in range(len(self)))


def batch_of(rows: Sequence[Sequence[int] | np.ndarray]) -> EncodedBatch:
    """A batch from the ids of each text."""
    arrays = [np.asarray(row, dtype=np.uint32) for row in rows]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    return EncodedBatch(np.concatenate(arrays) if arrays else np.empty(0, np.uint32), offsets)


def joined(batches: Sequence[EncodedBatch]) -> EncodedBatch:
    """Several batches as one."""
    starts = np.cumsum([0, *(len(batch.ids) for batch in batches)], dtype=np.int64)
    offsets = [batch.offsets[:-1] + start for batch, start in zip(batches, starts, strict=False)]
    return EncodedBatch(np.concatenate([batch.ids for batch in batches]), np.concatenate([*offsets, starts[-1:]]))


class RawEncoder(Protocol):
    """Texts (well-formed, no lone surrogates) to ids."""

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        """The ids of every text."""


@dataclass(frozen=True)
class EncoderKind:
    """One encoder."""

    name: EncoderName
    open: Callable[[Tokenizer, int | None], RawEncoder]
    """(tokenizer, threads) -> encoder; raises NotSupported."""
    ascii_speed: float
    other_speed: float
    """About how many MB/s one core encodes of ASCII and of other text: what `auto` ranks encoders by. Measured by
    benchmarks/tokenizer_encoding.py on two cores of a Neoverse N1, a vocabulary of ours with 32k pieces."""
    long_texts: bool = False
    """Memory and time are proportional to the length, also for a long text without spaces."""


def json_without_control(tokenizer: Tokenizer) -> dict[str, Any]:
    """tokenizer.json as the encoders may see it: nothing in it is special, and nothing is added around a text."""
    content: dict[str, Any] = jsonio.loads(tokenizer.backend.to_str())
    kept = [token for token in content.get("added_tokens", []) if not token["special"]]
    return {**content, "added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotSupported(f"{module} is not installed (pip install {module})")


class _Tokenizers:
    """The reference."""

    def __init__(self, tokenizer: Tokenizer, _: int | None) -> None:
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        return batch_of(self.tokenizer.encode_batch(texts))


class _Fastokens:
    def __init__(self, tokenizer: Tokenizer, _: int | None) -> None:
        _require("fastokens")
        import fastokens

        try:
            content = jsonio.dumps_line(json_without_control(tokenizer)).decode()
            self.backend = fastokens.Tokenizer.from_json_str(content)
        except Exception as error:  # the library says with a ValueError or RuntimeError what it does not know
            raise NotSupported(f"fastokens does not support this tokenizer ({error})") from error

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        ids, offsets = self.backend.encode_batch_flat(list(texts))
        return EncodedBatch(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64))


class _Numba:
    """Ours."""

    def __init__(self, tokenizer: Tokenizer, threads: int | None) -> None:
        _require("numba")
        content = json_without_control(tokenizer)
        self.tables = bpe_tables(content)
        self.normalise = tokenizer.backend.normalizer.normalize_str if content.get("normalizer") else None
        # Imported behind the checks above: compiling takes seconds where numba's cache is empty.
        from zero2all.tokenizer.bpe.scan import character_kinds
        from zero2all.tokenizer.encoders import kernels

        self.kernels = kernels
        self.kinds = character_kinds()
        rows = 1 << (2 * len(self.tables.results) + 1).bit_length()
        self.ranks = np.zeros((rows, 2), np.int64)
        twice = kernels.fill_ranks(self.tables.lefts, self.tables.rights, self.ranks)
        if twice >= 0:
            raise NotSupported(f"its merge {twice:,} is listed twice")
        self.threads = threads or usable_cores()
        self.caches = [np.zeros((CACHE_ROWS, 4), np.uint64) for _ in range(self.threads)]

    def encode(self, texts: Sequence[str]) -> EncodedBatch:
        if self.normalise:
            texts = [self.normalise(text) for text in texts]
        parts = _even_parts(texts, self.threads)
        if len(parts) == 1:
            return self._encode(parts[0], self.caches[0])
        with ThreadPoolExecutor(len(parts)) as pool:
            return joined(list(pool.map(self._encode, parts, self.caches)))

    def _encode(self, texts: Sequence[str], cache: np.ndarray) -> EncodedBatch:
        tables = self.tables
        spread = BREAK_CHARACTER.join([*texts, ""]).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(spread, "<u4")
        # Room for four bytes of every character; memory that is not written to costs nothing.
        ids = np.empty(4 * len(codes) + self.kernels.ROOM, np.uint32)
        offsets = np.empty(len(texts) + 1, np.int64)
        written = self.kernels.encode_documents(
            *(codes, self.kinds, tables.characters, tables.byte_ids, self.ranks, tables.results),
            *(tables.piece_starts, tables.piece_bytes, cache, ids, offsets),
        )
        return EncodedBatch(ids[:written].copy(), offsets)


def _even_parts(texts: Sequence[str], threads: int) -> list[Sequence[str]]:
    """The texts in at most `threads` lists of about the same number of characters."""
    totals = list(accumulate(map(len, texts), initial=0))
    parts = max(1, min(threads, totals[-1] // TEXT_OF_THREAD))
    borders = np.searchsorted(totals, [totals[-1] * part // parts for part in range(1, parts)]).tolist()
    edges = [0, *borders, len(texts)]
    return [texts[start:end] for start, end in pairwise(edges)]


REFERENCE: EncoderName = "tokenizers"
KINDS: dict[str, EncoderKind] = {
    kind.name: kind
    for kind in (
        EncoderKind("fastokens", _Fastokens, ascii_speed=69, other_speed=20),
        EncoderKind("numba", _Numba, ascii_speed=35, other_speed=33, long_texts=True),
        EncoderKind(REFERENCE, _Tokenizers, ascii_speed=1, other_speed=2),
    )
}
