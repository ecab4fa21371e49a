"""Which sample stands at position i of a run: a pure function, with no stored shuffle.

Within a source, epoch e visits its n samples in the order of a keyed permutation of 0..n-1: a Feistel network over the
next power of four, walked until it lands below n, so that any place costs O(1) time and no memory. Between sources,
weights are rounded to n/65536 and one cycle of picks is laid out by Tijdeman's rule, which keeps every source within
one sample of its exact share at every prefix. A position is then (cycle, slot), and the pick's ordinal within its
source follows from a prefix count. So the data position of a run is one integer, right for any number of ranks and any
micro-batch. A stage changes the weights at a position; every source goes on where it stood.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from math import gcd

import numpy as np

WEIGHT_UNITS = 1 << 16
FEISTEL_ROUNDS = 6


def permuted(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of `indices` (each below `size`) under the permutation of range(size) that `key` names."""
    groups = np.zeros(len(indices), dtype=np.int64)
    return _walk(indices, groups, np.array([size], dtype=np.uint64), [key])


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
    """One period of picks among the sources, repeated without end."""

    def __init__(self, units: Sequence[int]) -> None:
        divisor = gcd(*units)
        self.counts = np.array([unit // divisor for unit in units], dtype=np.int64)
        self.length = int(self.counts.sum())
        self.picks = _tijdeman(self.counts)
        self.ordinals = np.empty(self.length, dtype=np.int64)
        """How often the pick of each slot was picked before within the cycle."""
        by_source = np.argsort(self.picks, kind="stable")
        self.ordinals[by_source] = np.arange(self.length) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each position, and how many samples of that source came before."""
        cycles, slots = np.divmod(positions, self.length)
        sources = self.picks[slots]
        return sources, cycles * self.counts[sources] + self.ordinals[slots]

    def taken(self, position: int) -> np.ndarray:
        """Samples of each source among the first `position` picks."""
        cycles, slot = divmod(position, self.length)
        return cycles * self.counts + np.bincount(self.picks[:slot], minlength=len(self.counts))

    def place_of(self, source: int, ordinal: int) -> int:
        """Where `source` is picked after `ordinal` earlier picks of it."""
        cycles, within = divmod(ordinal, int(self.counts[source]))
        return cycles * self.length + int(np.flatnonzero(self.picks == source)[within])


mixture_cycle = lru_cache(maxsize=256)(MixtureCycle)
"""The cycle of these weights, a tuple; planning a run asks for the same one again and again."""


@dataclass(frozen=True)
class OrderedSource:
    """What the order must know of a source."""

    name: str
    samples: int


class Order:
    """Position in a segment of the run -> (source, sample within the source).

    A segment is a stretch of the run with one sequence length: samples of another length are other samples, so each
    segment has permutations of its own. Within it, stages change the weights and nothing else.
    """

    def __init__(
        self, sources: list[OrderedSource], stages: Sequence[tuple[int, Sequence[int]]], seed: int, segment: int = 0
    ) -> None:
        """`stages`: (first position, weight units per source), the first at position 0, positions rising."""
        assert [start for start, _ in stages[:1]] == [0], "the first stage starts at position 0"
        self.sources, self.seed, self.segment = sources, seed, segment
        self.starts = np.array([start for start, _ in stages], dtype=np.int64)
        self.cycles = [mixture_cycle(tuple(units)) for _, units in stages]
        self.bases = [np.zeros(len(sources), dtype=np.int64)]
        """Samples of each source that were read before each stage."""
        for index in range(1, len(stages)):
            length = int(self.starts[index] - self.starts[index - 1])
            self.bases.append(self.bases[-1] + self.cycles[index - 1].taken(length))
        self._sizes = np.array([source.samples for source in sources], dtype=np.int64)

    def lookup(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source and the sample at each of `positions` (int64). A few hundred at once cost little more than one."""
        stage_of = np.searchsorted(self.starts, positions, side="right") - 1
        sources = np.empty(len(positions), dtype=np.int64)
        ordinals = np.empty(len(positions), dtype=np.int64)
        for stage in np.unique(stage_of):
            here = stage_of == stage
            sources[here], within = self.cycles[stage].lookup(positions[here] - self.starts[stage])
            ordinals[here] = within + self.bases[stage][sources[here]]
        epochs, indices = np.divmod(ordinals, self._sizes[sources])
        pairs, groups = np.unique(epochs * len(self.sources) + sources, return_inverse=True)
        keys = []
        for pair in pairs.tolist():
            epoch, source = divmod(pair, len(self.sources))
            keys.append(permutation_key(self.seed, self.sources[source].name, epoch, self.segment))
        return sources, _walk(indices, groups, self._sizes[pairs % len(self.sources)].astype(np.uint64), keys)

    def taken(self, position: int) -> np.ndarray:
        """Samples of each source read before `position`."""
        stage = int(np.searchsorted(self.starts, position, side="right")) - 1
        return self.bases[stage] + self.cycles[stage].taken(position - int(self.starts[stage]))

    def place_of(self, source: int, ordinal: int) -> int | None:
        """Where the last stage, which has no end, reads `source` after `ordinal` earlier reads of it; None if never."""
        before = ordinal - int(self.bases[-1][source])
        if before < 0 or not self.cycles[-1].counts[source]:
            return None
        return int(self.starts[-1]) + self.cycles[-1].place_of(source, before)


@lru_cache(maxsize=1 << 14)
def permutation_key(seed: int, source: str, epoch: int, segment: int = 0) -> int:
    """64 bits that name the permutation of one source in one epoch of one segment."""
    name = f"{seed}/{source}/{epoch}" if segment == 0 else f"{seed}/{source}/{epoch}/{segment}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 14)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest(), "little")
        for number in range(FEISTEL_ROUNDS)
    )


def _walk(indices: np.ndarray, groups: np.ndarray, sizes: np.ndarray, keys: list[int]) -> np.ndarray:
    """The image of each index under the permutation of its group; a group is a size and a key.

    All groups are walked together, because numpy's cost here is that of the calls: with a hundred sources a batch has
    two or three samples of each.
    """
    half_bits = np.array([max(1, (int(size - 1).bit_length() + 1) // 2) for size in sizes], dtype=np.uint64)
    masks = (np.uint64(1) << half_bits) - np.uint64(1)
    round_keys = np.array([_round_keys(key) for key in keys], dtype=np.uint64).T  # (rounds, groups)
    images = np.empty(len(indices), dtype=np.int64)
    places, values = np.arange(len(indices)), indices.astype(np.uint64)
    while len(places):
        # The domain is at most four times the size, so each walk ends after a few turns.
        values = _feistel(values, [keys_of[groups] for keys_of in round_keys], half_bits[groups], masks[groups])
        landed = values < sizes[groups]
        images[places[landed]] = values[landed].astype(np.int64)
        walking = ~landed
        places, values, groups = places[walking], values[walking], groups[walking]
    return images


def _feistel(values: np.ndarray, round_keys: list[np.ndarray], half_bits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_scramble(right ^ round_key) & mask)
    return (left << half_bits) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit. Multiplications wrap by intent."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _tijdeman(counts: np.ndarray) -> np.ndarray:
    """One cycle of picks: at each slot, of the sources that are due, the one with the earliest deadline.

    Source i of share c/L has been picked x times before slot k (from 1). It is due when k c/L - x >= 1/(2n - 2), and
    must be served before its surplus would pass 1 - 1/(2n - 2). Neither depends on what the others do, so pick x of
    source i is a job with a first slot and a deadline, both known beforehand: sort all L jobs by deadline once, then
    take at each slot the earliest of those that have become due. All in whole numbers, scaled by 2n - 2.
    """
    total, active = int(counts.sum()), np.flatnonzero(counts)
    if len(active) == 1:
        return np.full(total, active[0], dtype=np.int64)
    scale = 2 * len(active) - 2
    source = np.repeat(active, counts[active])
    count = counts[source]
    first_job = np.repeat(np.cumsum(counts[active]) - counts[active], counts[active])
    picked = np.arange(total) - first_job  # x of each job
    # Due from the first slot k with k c scale >= x L scale + L.
    due = -(-(picked * total * scale + total) // (count * scale))
    # The deadline is L (x scale + scale - 1) / (c scale). Without the common factor L / scale it is a fraction over c,
    # split into whole part and rest: rests over c <= 65536 differ by more than float64 can blur, so the sort is exact.
    whole, rest = np.divmod(picked * scale + scale - 1, count)
    by_deadline = np.lexsort((source, rest / count, whole))
    rank = np.empty(total, dtype=np.int64)
    rank[by_deadline] = np.arange(total)
    by_due = np.argsort(due, kind="stable")
    arrivals = rank[by_due].tolist()
    ends = np.searchsorted(due[by_due], np.arange(1, total + 1), side="right").tolist()
    waiting: list[int] = []
    chosen, arrived = [], 0
    for end in ends:
        for job in arrivals[arrived:end]:
            heappush(waiting, job)
        arrived = end
        chosen.append(heappop(waiting))  # Tijdeman's rule always finds a source that is due
    return source[by_deadline[chosen]]
