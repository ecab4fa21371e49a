"""Slow and plain versions of BPE training and encoding, to test the fast ones against.

Both take their pretokens from the `tokenizers` library's regex engine, not from our scanner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from zero2all.tokenizer.config import PRETOKEN_PATTERN

BYTE_COUNT = 256


def pretokens(text: str) -> list[str]:
    """The published pattern, by the library that everybody encodes with."""
    return [piece for piece, _ in _splitter().pre_tokenize_str(text)]


@cache
def _splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(PRETOKEN_PATTERN), "isolated")


class ReferenceEncoder:
    """Byte-level BPE as it is defined: start from bytes, always apply the merge of lowest rank."""

    def __init__(self, merges: Sequence[tuple[int, int]]) -> None:
        self.rank_of = {pair: rank for rank, pair in enumerate(merges)}
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Places in the vocabulary (ids without the control tokens)."""
        places: list[int] = []
        for pretoken in pretokens(text):
            if pretoken not in self.known:
                self.known[pretoken] = self._encode_pretoken(pretoken)
            places += self.known[pretoken]
        return places

    def _encode_pretoken(self, pretoken: str) -> list[int]:
        symbols = list(pretoken.encode())
        while len(symbols) > 1:
            rank, pair = min((self.rank_of.get(pair, len(self.rank_of)), pair) for pair in pairwise(symbols))
            if rank == len(self.rank_of):
                break
            symbols = _merged(symbols, pair, BYTE_COUNT + rank)
        return symbols


def reference_train(
    texts: Iterable[str], pieces_wanted: int, min_piece_count: int = 2, max_piece_bytes: int | None = None
) -> tuple[list[bytes], list[tuple[int, int]], int]:
    """What `learn_bpe` must return: pieces, merges, and how many pieces it is short of. Nothing is cut.

    All pairs are counted anew for every merge.
    """
    words = Counter(pretoken for text in texts for pretoken in pretokens(text))
    occurrences: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            occurrences[character] += count
    characters = sorted((c for c in occurrences if ord(c) >= 128), key=lambda c: (-occurrences[c], ord(c)))
    place_in_order = {**{chr(byte): byte for byte in range(128)}}
    place_in_order |= {character: BYTE_COUNT + place for place, character in enumerate(characters)}
    symbols = {word: tuple(word) for word in words}
    admitted: list[str] = []
    prefixes: set[bytes] = set()
    learned: list[tuple[str, str]] = []
    left = pieces_wanted - BYTE_COUNT
    closed = False
    while left:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(symbols[word]):
                pairs[pair] += count
        allowed = {
            pair: count
            for pair, count in pairs.items()
            if count >= min_piece_count
            and (max_piece_bytes is None or len("".join(pair).encode()) <= max_piece_bytes)
            and not (closed and any(len(s) == 1 and ord(s) >= 128 and s not in admitted for s in pair))
        }
        best = min(
            allowed,
            key=lambda pair: (-allowed[pair], place_in_order[pair[0]], place_in_order[pair[1]]),
            default=None,
        )
        needed = allowed[best] if best else min_piece_count
        if not closed and len(admitted) < len(characters) and occurrences[characters[len(admitted)]] >= needed:
            character = characters[len(admitted)]
            new = {character.encode()[:size] for size in range(2, len(character.encode()))} - prefixes
            closed = 1 + len(new) > left
            if not closed:
                admitted.append(character)
                prefixes |= new
                left -= 1 + len(new)
            continue
        if best is None:
            break
        joined = "".join(best)
        place_in_order[joined] = BYTE_COUNT + len(characters) + len(learned)
        learned.append(best)
        symbols = {word: tuple(_merged(list(parts), best, joined)) for word, parts in symbols.items()}
        left -= 1
    made = [
        *sorted(prefixes, key=lambda prefix: (len(prefix), prefix)),
        *(character.encode() for character in admitted),
    ]
    pieces = [bytes([byte]) for byte in range(BYTE_COUNT)] + made
    place = {piece: number for number, piece in enumerate(pieces)}
    merges = [(place[piece[:-1]], piece[-1]) for piece in made]
    for first, second in learned:
        merges.append((place[first.encode()], place[second.encode()]))
        place[(first + second).encode()] = len(pieces)
        pieces.append((first + second).encode())
    return pieces, merges, left


def _merged(symbols: list[Any], pair: tuple[Any, Any], new: Any) -> list[Any]:
    """Every occurrence of `pair` replaced, from the left."""
    merged: list[Any] = []
    at = 0
    while at < len(symbols):
        if tuple(symbols[at : at + 2]) == pair:
            merged.append(new)
            at += 2
        else:
            merged.append(symbols[at])
            at += 1
    return merged
