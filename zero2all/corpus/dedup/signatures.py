"""A batch of texts to what dedup needs of them: a digest, a key, a length, and a minhash signature.

The digest, xxh3_128 of the text with its white space collapsed, decides exact duplicates. The signature has 256 bytes
(`text_kernels.sign_texts`), all zero for a text without any unit, which has no near duplicates. The key decides what is
held out: a hash of the folded letters and digits, so that texts that differ in width, punctuation or simplified and
traditional characters only are on one side of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from zero2all.corpus.dedup.config import ANCHORS, VALUES, DedupConfig

DIGEST_BYTES = 16


class Described(NamedTuple):
    """What is kept of a batch of n texts."""

    digests: np.ndarray
    """(n, 16) uint8."""
    text_bytes: np.ndarray
    """(n,) uint32: length in UTF-8."""
    signatures: np.ndarray | None
    """(n, 256) uint8; None when near duplicates stay."""
    keys: np.ndarray
    """(n,) uint64."""
    anchors: np.ndarray
    """uint32: those of all texts, one after the other; none when dedup is off."""
    anchor_counts: np.ndarray
    """(n,) int64."""


class Encoded(NamedTuple):
    """A batch of n texts as one buffer of UTF-8."""

    buffer: np.ndarray
    """(bytes,) uint8."""
    offsets: np.ndarray
    """(n + 1,) int64: where each text begins, and the end."""


def describe(texts: Sequence[str], channel: str, config: DedupConfig) -> Described:
    """Digests, lengths and signatures, with one encoding of the texts."""
    return describe_encoded(encode(texts), channel, config)


def describe_encoded(encoded: Encoded, channel: str, config: DedupConfig) -> Described:
    """`describe` for texts that are encoded already."""
    buffer, offsets = encoded
    signed = _sign(buffer, offsets, channel, config)
    digests = _digest(buffer, offsets)
    no_letters = signed.keys == 0
    signed.keys[no_letters] = digests[no_letters].view(">u8")[:, 0]
    lengths = np.diff(offsets).astype(np.uint32)
    signatures = signed.signatures if config.signs else None
    return Described(digests, lengths, signatures, signed.keys, signed.anchors, signed.anchor_counts)


def encode(texts: Sequence[str]) -> Encoded:
    """The texts as one buffer of UTF-8."""
    pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    return Encoded(np.frombuffer(b"".join(pieces), np.uint8), offsets)


class _Signed(NamedTuple):
    signatures: np.ndarray
    keys: np.ndarray
    anchors: np.ndarray
    anchor_counts: np.ndarray


def _sign(buffer: np.ndarray, offsets: np.ndarray, channel: str, config: DedupConfig) -> _Signed:
    from zero2all.corpus.dedup import text_kernels as kernels

    shingle = config.shingle(channel)
    texts = offsets.size - 1
    signatures = np.empty((texts if config.signs else 0, VALUES), np.uint8)
    anchors = np.empty(buffer.size if config.near != "off" else 0, np.uint32)
    out = _Signed(signatures, np.empty(texts, np.uint64), anchors, np.zeros(texts, np.int64))
    mode = kernels.UNIT_MODES[shingle.unit]
    tables = (kernels.UNIT_TABLES[shingle.unit], kernels.WALKS, kernels.STEPS)
    kernels.sign_texts(buffer, offsets, mode, shingle.length, *ANCHORS[shingle.unit], *out, *tables)
    return out._replace(anchors=anchors[: out.anchor_counts.sum()].copy())


def _digest(buffer: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    from zero2all.corpus.dedup import text_kernels as kernels

    collapsed = np.empty(buffer.size + 1, np.uint8)
    ends = np.empty(offsets.size - 1, np.int64)
    kernels.collapse_spaces(buffer, offsets, kernels.SPACES, collapsed, ends)
    view = collapsed.data
    digest = xxhash.xxh3_128_digest
    starts = [0, *ends.tolist()]
    pieces = [digest(view[start:end]) for start, end in pairwise(starts)]
    return np.frombuffer(b"".join(pieces), np.uint8).reshape(-1, DIGEST_BYTES)
