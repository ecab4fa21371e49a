"""Which sample stands at position i of a run: a pure function, with no stored shuffle.

Two parts. Within a source, epoch e visits its n samples in the order of a keyed permutation of 0..n-1: a Feistel
network over the next power of four, walked until it lands below n, so that any single place costs O(1) time and no
memory. Between sources, weights are rounded to n/65536 and one cycle of picks is laid out by Tijdeman's rule, which
keeps every source within one sample of its exact share at every prefix. A position is then (cycle, slot), and the
pick's ordinal within its source follows from a prefix count.

So the data position of a run is one integer, right for any number of ranks and any micro-batch. A stage changes the
weights at a position; every source goes on where it stood.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

import numpy as np

WEIGHT_UNITS = 1 << 16
FEISTEL_ROUNDS = 6


def permuted(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of `indices` (each below `size`) under the permutation of range(size) that `key` names."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    round_keys = [np.uint64(_mix_key(key, number)) for number in range(FEISTEL_ROUNDS)]
    values = indices.astype(np.uint64)
    walking = np.ones(len(values), dtype=bool)
    while walking.any():
        # The domain is at most four times `size`, so each walk ends after a few turns.
        values[walking] = _feistel(values[walking], round_keys, np.uint64(half_bits), mask)
        walking = values >= np.uint64(size)
    return values.astype(np.int64)


def rounded_weights(weights: list[float]) -> list[int]:
    """Weights as whole parts of 65536 that sum to it; largest remainders are rounded up, none above 0 is lost."""
    total = sum(map(Fraction, weights))
    exact = [Fraction(weight) * WEIGHT_UNITS / total for weight in weights]
    units = [max(1, int(value)) if value else 0 for value in exact]
    missing = max(0, WEIGHT_UNITS - sum(units))
    for index in sorted(range(len(units)), key=lambda index: (units[index] - exact[index], index))[:missing]:
        units[index] += 1
    while sum(units) > WEIGHT_UNITS:
        units[units.index(max(units))] -= 1
    return units


class MixtureCycle:
    """One period of picks among the sources, repeated for ever."""

    def __init__(self, units: list[int]) -> None:
        divisor = gcd(*units)
        self.counts = np.array([unit // divisor for unit in units], dtype=np.int64)
        self.length = int(self.counts.sum())
        self.picks = _tijdeman([int(count) for count in self.counts])
        self.ordinals = np.empty(self.length, dtype=np.int64)
        """How often the pick of each slot was picked before within the cycle."""
        for source in range(len(units)):
            slots = self.picks == source
            self.ordinals[slots] = np.arange(int(slots.sum()))

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each position, and how many samples of that source came before."""
        cycles, slots = np.divmod(positions, self.length)
        sources = self.picks[slots]
        return sources, cycles * self.counts[sources] + self.ordinals[slots]

    def taken(self, position: int) -> np.ndarray:
        """Samples of each source among the first `position` picks."""
        cycles, slot = divmod(position, self.length)
        return cycles * self.counts + np.bincount(self.picks[:slot], minlength=len(self.counts))


@dataclass(frozen=True)
class Source:
    """What the order must know of a source."""

    name: str
    samples: int


class Order:
    """Position in the run -> (source, sample within the source)."""

    def __init__(self, sources: list[Source], stages: list[tuple[int, list[int]]], seed: int) -> None:
        """`stages`: (first position, weight units per source), the first at position 0, positions rising."""
        assert [start for start, _ in stages[:1]] == [0], "the first stage starts at position 0"
        self.sources, self.seed = sources, seed
        self.starts = np.array([start for start, _ in stages], dtype=np.int64)
        self.cycles = [MixtureCycle(units) for _, units in stages]
        self.bases = [np.zeros(len(sources), dtype=np.int64)]
        for index in range(1, len(stages)):
            length = int(self.starts[index] - self.starts[index - 1])
            self.bases.append(self.bases[-1] + self.cycles[index - 1].taken(length))

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source and the sample at each of `positions` (int64)."""
        stage_of = np.searchsorted(self.starts, positions, side="right") - 1
        sources = np.empty(len(positions), dtype=np.int64)
        ordinals = np.empty(len(positions), dtype=np.int64)
        for stage in np.unique(stage_of):
            here = stage_of == stage
            sources[here], within = self.cycles[stage].lookup(positions[here] - self.starts[stage])
            ordinals[here] = within + self.bases[stage][sources[here]]
        samples = np.empty(len(positions), dtype=np.int64)
        for number, source in enumerate(self.sources):
            mine = np.flatnonzero(sources == number)
            if len(mine) == 0:
                continue
            epochs, indices = np.divmod(ordinals[mine], source.samples)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                key = permutation_key(self.seed, source.name, int(epoch))
                samples[mine[now]] = permuted(indices[now], source.samples, key)
        return sources, samples

    def taken(self, position: int) -> np.ndarray:
        """Samples of each source read before `position`."""
        stage = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.bases[stage] + self.cycles[stage].taken(position - int(self.starts[stage]))


def permutation_key(seed: int, source: str, epoch: int) -> int:
    """64 bits that name the permutation of one source in one epoch."""
    digest = hashlib.blake2b(f"{seed}/{source}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix_key(key: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest(), "little")


def _feistel(values: np.ndarray, round_keys: list[np.uint64], half_bits: np.uint64, mask: np.uint64) -> np.ndarray:
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << half_bits) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit. Multiplications wrap by intent."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _tijdeman(counts: list[int]) -> np.ndarray:
    """One cycle of picks: at each slot, of the sources that are due, the one with the earliest deadline.

    Source i of share c/L has been picked x times before slot k (from 1). It is due when k c/L - x >= 1/(2n - 2), and
    must be served before its surplus would pass 1 - 1/(2n - 2). In whole numbers, scaled by L (2n - 2).
    """
    total, active = sum(counts), [index for index, count in enumerate(counts) if count]
    picks = np.empty(total, dtype=np.int64)
    if len(active) == 1:
        picks.fill(active[0])
        return picks
    scale = 2 * len(active) - 2
    surplus = dict.fromkeys(active, 0)
    for slot in range(total):
        best, best_deadline = -1, (0, 1)
        for index in active:
            surplus[index] += counts[index] * scale
            if surplus[index] >= total:
                # deadline = (limit - surplus) / share, compared by cross-multiplication to stay exact
                deadline = (total * (scale - 1) - surplus[index], counts[index])
                if best < 0 or deadline[0] * best_deadline[1] < best_deadline[0] * deadline[1]:
                    best, best_deadline = index, deadline
        assert best >= 0, "Tijdeman's rule always finds a source that is due"
        surplus[best] -= total * scale
        picks[slot] = best
    return picks
