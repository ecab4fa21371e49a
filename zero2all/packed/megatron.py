"""The two files of Megatron-LM's indexed dataset, written and read by its published layout.

    PREFIX.bin   all tokens, one sequence after the other
    PREFIX.idx   "MMIDIDX\\0\\0", version (uint64, 1), type of the tokens (uint8), sequences (uint64), entries of the
                 document list (uint64); then the length of each sequence (int32), the byte of the .bin at which it
                 begins (int64), and the document list: the first sequence of each document, and the number of sequences
                 at the end (int64)

What we write has one sequence per document. Megatron-LM takes uint16 for vocabularies below 65,500 and int32 above.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from zero2all.common.errors import BadInputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes of the types that can hold ids."""
UINT16_BELOW = 65_500


def megatron_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron-LM takes for a vocabulary."""
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The .idx of documents of these lengths."""
    code = next(code for code, name in TYPES.items() if np.dtype(name) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    return b"".join(
        (
            MAGIC,
            HEADER.pack(VERSION, code, len(lengths), len(lengths) + 1),
            lengths.astype("<i4").tobytes(),
            ((ends - lengths) * dtype.itemsize).astype("<i8").tobytes(),
            np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
        )
    )


def read_index(path: Path, bin_bytes: int) -> tuple[np.dtype, np.ndarray]:
    """The type of the tokens in the .bin beside `path`, and the length of each document in tokens."""
    data = path.read_bytes()
    start = len(MAGIC) + HEADER.size
    if not data.startswith(MAGIC) or len(data) < start:
        raise BadInputError(f"{path} is no Megatron index: it does not begin with {MAGIC!r}. Check the path.")
    version, code, sequences, entries = HEADER.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise BadInputError(f"{path} is a Megatron index of version {version}; expected {VERSION}.")
    if code not in TYPES:
        raise BadInputError(f"{path} says its tokens are of type {code}; expected one of {', '.join(map(str, TYPES))}.")
    if len(data) < start + 12 * sequences + 8 * entries:
        raise BadInputError(
            f"{path} has {len(data)} bytes, too few for {sequences} sequences and {entries} documents. Copy it again."
        )
    dtype = np.dtype(TYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, start).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, start + 4 * sequences)
    documents = np.frombuffer(data, "<i8", entries, start + 12 * sequences)
    ends = np.cumsum(lengths)
    if (pointers != (ends - lengths) * dtype.itemsize).any():
        raise BadInputError(f"{path}: its sequences do not follow one another in the .bin, which is not supported.")
    expected = int(ends[-1]) * dtype.itemsize if sequences else 0
    if bin_bytes != expected:
        raise BadInputError(
            f"{path.with_suffix('.bin')} has {bin_bytes} bytes, its index says {expected}. Copy it again."
        )
    firsts = documents if entries and documents[-1] == sequences else np.append(documents, sequences)
    if len(firsts) == 1 or firsts[0] != 0 or (np.diff(firsts) < 0).any() or firsts[-1] != sequences:
        raise BadInputError(f"{path}: its document list is not a rising list of sequences from 0 to {sequences}.")
    borders = np.concatenate(([0], ends))[firsts]
    return dtype, np.diff(borders)
