"""A byte-level BPE from tokenizer.json as the arrays that our own encoder works on.

Only what the encoder reproduces exactly is accepted; everything else is refused with the reason in words.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from zero2all.tokenizer.config import PRETOKEN_PATTERN, byte_alphabet

CODE_POINTS = 0x110000
LARGEST_ID = (1 << 28) - 1


class NotSupported(Exception):  # noqa: N818 (an answer, not a failure)
    """The encoder cannot reproduce this tokenizer; the message says why."""


@dataclass(frozen=True)
class BpeTables:
    """The vocabulary and the merges of a byte-level BPE."""

    byte_ids: np.ndarray
    """The id of each byte."""
    characters: np.ndarray
    """By code point: the id to start a character from, or -1 to start from its bytes."""
    lefts: np.ndarray
    rights: np.ndarray
    results: np.ndarray
    """By rank: the two ids that are merged, and the id that they become."""
    piece_starts: np.ndarray
    piece_bytes: np.ndarray
    """The bytes of piece i are piece_bytes[piece_starts[i] : piece_starts[i + 1]]."""


def bpe_tables(tokenizer_json: dict[str, Any]) -> BpeTables:
    """The arrays of this tokenizer; raises NotSupported for one that is not a plain BPE of our pattern."""
    model = _plain_model(tokenizer_json)
    vocab: dict[str, int] = model["vocab"]
    alphabet = byte_alphabet()
    if missing := [name for name in alphabet if name not in vocab]:
        raise NotSupported(f"{len(missing)} of the 256 bytes are not in its vocabulary")
    pieces = _pieces(vocab, alphabet)
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    try:
        lefts = np.array([vocab[left] for left, _ in pairs], np.int64)
        rights = np.array([vocab[right] for _, right in pairs], np.int64)
        results = np.array([vocab[left + right] for left, right in pairs], np.int32)
    except KeyError as error:
        raise NotSupported(f"a merge names the piece {error}, which is not in its vocabulary") from None
    made_at = np.full(len(pieces), -1, np.int64)
    made_at[results[::-1]] = np.arange(len(pairs))[::-1]  # the first rank that makes a piece
    ranks = np.arange(len(pairs))
    if np.any(made_at[lefts] >= ranks) or np.any(made_at[rights] >= ranks):
        raise NotSupported("a merge comes before the merges that make its parts")
    byte_ids = np.zeros(256, np.int64)
    for name, byte in alphabet.items():
        byte_ids[byte] = vocab[name]
    characters = np.full(CODE_POINTS, -1, np.int32)
    characters[:128] = byte_ids[:128]
    for code, piece in whole_characters(pieces, results).items():
        characters[code] = piece
    return BpeTables(
        byte_ids,
        characters,
        lefts,
        rights,
        results,
        np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        np.frombuffer(b"".join(pieces), np.uint8),
    )


def whole_characters(pieces: list[bytes], results: np.ndarray) -> dict[int, int]:
    """Code point and id of every character of several bytes that encoding may start from as a whole.

    It may if the merges inside the character come before every merge that joins a part of it to something outside:
    then nothing can touch its bytes until they are one. Such a merge makes a piece in which the first bytes of the
    character end it behind something else, or its last bytes begin it before something else. Our own trainer never
    makes any; others make some.
    """
    never = len(results)
    ends_with: dict[bytes, int] = {}
    begins_with: dict[bytes, int] = {}
    single: dict[bytes, int] = {}
    for rank, piece_id in enumerate(results.tolist()):
        piece = pieces[piece_id]
        head = _continuation_bytes(piece)
        if head and head < len(piece):
            begins_with.setdefault(piece[:head], rank)
        tail = _open_bytes(piece)
        if tail and tail < len(piece):
            ends_with.setdefault(piece[-tail:], rank)
        if head == 0 and tail == 0 and _is_one_character(piece):
            single.setdefault(piece, rank)
    found = {}
    for piece, rank in single.items():
        borders = [ends_with.get(piece[:size], never) for size in range(1, len(piece))]
        borders += [begins_with.get(piece[size:], never) for size in range(1, len(piece))]
        if rank < min(borders):
            found[ord(piece.decode())] = int(results[rank])
    return found


def _plain_model(tokenizer_json: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = tokenizer_json["model"]
    if model.get("type") != "BPE":
        raise NotSupported(f"its model is {model.get('type')}, not BPE")
    unsupported = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    for name in (*unsupported, "ignore_merges"):
        if model.get(name):
            raise NotSupported(f"its model sets {name}")
    if tokenizer_json.get("added_tokens"):
        raise NotSupported("it has added tokens that text can spell")
    if pattern_of(tokenizer_json) != PRETOKEN_PATTERN:
        raise NotSupported("its pretoken pattern is not one that our scanner supports")
    if max(model["vocab"].values()) > LARGEST_ID:
        raise NotSupported(f"it has ids above {LARGEST_ID:,}")
    return model


def pattern_of(tokenizer_json: dict[str, Any]) -> str | None:
    """The pretoken pattern of a byte-level BPE that splits by one pattern only; None for any other."""
    steps = (tokenizer_json.get("pre_tokenizer") or {}).get("pretokenizers", [])
    match steps:
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return str(pattern)
    return None


def _pieces(vocab: dict[str, int], alphabet: dict[str, int]) -> list[bytes]:
    pieces = [b""] * (max(vocab.values()) + 1)
    for name, piece_id in vocab.items():
        # The name of a control token spells no bytes; no merge makes it, so its entry does not matter.
        pieces[piece_id] = bytes(alphabet[character] for character in name if character in alphabet)
    return pieces


def _continuation_bytes(piece: bytes) -> int:
    """How many bytes at the beginning belong to a character that began before."""
    for place, byte in enumerate(piece):
        if byte & 0xC0 != 0x80:
            return place
    return len(piece)


def _open_bytes(piece: bytes) -> int:
    """How many bytes at the end are the beginning of a character that is not finished."""
    for size in range(1, min(4, len(piece) + 1)):
        lead = piece[-size]
        if lead & 0xC0 != 0x80:
            length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return size if size < length else 0
    return 0


def _is_one_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False
