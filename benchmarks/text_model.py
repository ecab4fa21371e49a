"""Unlimited text that does not repeat: an order-3 character model fitted on real text.

The next character is that of a random place in the real text where the last three characters stand too, so pairs and
triples of characters, and with them pre-tokens, n-grams and words, come up as often as they do in the real text, while
longer stretches are new. Repeating a small text to reach gigabytes would flatter every table of unique things.

    model = TextModel(text)              about 12 bytes of memory per character
    model.write(1_000_000, seed=1)       a string of a million characters, at some megabytes a second
    model.write_many(1_000_000, seeds)   one for each seed, at two to four times that speed: the model lies in memory,
                                         not in the cache, and while one text waits for it the others go on
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

ORDER = 3


class TextModel:
    """Samples text like `text`."""

    def __init__(self, text: str) -> None:
        self.codes = np.frombuffer(text.encode("utf-32-le", "replace"), dtype=np.uint32)
        contexts = len(self.codes) - ORDER
        if contexts < 1:
            raise ValueError(f"at least {ORDER + 1} characters are needed to fit a model of order {ORDER}")
        alphabet, ids = np.unique(self.codes, return_inverse=True)
        keys = np.zeros(contexts, dtype=np.uint64)
        for offset in range(ORDER):
            keys = keys * np.uint64(len(alphabet)) + ids[offset : offset + contexts].astype(np.uint64)
        _, context_of = np.unique(keys, return_inverse=True)
        self.context_of = context_of.astype(np.int32)
        self.places = np.argsort(self.context_of, kind="stable").astype(np.int32)
        counts = np.bincount(self.context_of)
        self.first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def write(self, characters: int, seed: int) -> str:
        """`characters` characters; the same for the same seed."""
        return self.write_many(characters, [seed])[0]

    def write_many(self, characters: int, seeds: Sequence[int]) -> list[str]:
        """What `write` gives for each of the seeds."""
        states = np.array(seeds, dtype=np.uint64)
        codes = _sample(self.codes, self.context_of, self.places, self.first, characters, states)
        return [row.tobytes().decode("utf-32-le", "replace") for row in codes]


@njit(cache=True, nogil=True)
def _sample(
    codes: np.ndarray, context_of: np.ndarray, places: np.ndarray, first: np.ndarray, count: int, seeds: np.ndarray
) -> np.ndarray:
    out = np.empty((seeds.size, count), dtype=np.uint32)
    states = seeds * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)
    contexts = context_of.size
    at = np.empty(seeds.size, dtype=np.int64)
    for row in range(seeds.size):
        at[row] = np.int64(states[row] >> np.uint64(33)) % contexts
    for index in range(count):
        for row in range(seeds.size):
            state, place = states[row], at[row]
            context = context_of[place]
            low, high = first[context], first[context + 1]
            state ^= state << np.uint64(13)  # xorshift64: fast, and good enough to choose places
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            place = np.int64(places[low + np.int64(state >> np.uint64(11)) % (high - low)])
            out[row, index] = codes[place + ORDER]
            place += 1
            if place >= contexts:  # the end of the real text has no successor: go on anywhere
                place = np.int64(state >> np.uint64(13)) % contexts
            states[row], at[row] = state, place
    return out
