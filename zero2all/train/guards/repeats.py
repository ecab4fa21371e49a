"""Shards that repeat another one, found from the lengths of their documents before training starts.

The loss of a repeated text may hardly differ, but the index beside each shard is certain: a shard that repeats another
has the same series of document lengths, wherever it was cut. Each shard is reduced to the 64 smallest hashes of four
lengths in a row (a bottom-k sketch); two sketches that share half of their hashes are compared by content, some
documents in full. Reads the document index (8 bytes for each document), not all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero2all.packed.shard_format import PackedSplit
from zero2all.train.guards.detector import Finding

SERIES = 4
SKETCH = 64
MIN_SHARE = 0.5
"""Of the smaller sketch."""
MIN_DOCUMENTS = 16
"""With fewer, equal lengths may be a coincidence."""
COMPARED = 8


@dataclass(frozen=True)
class Repeat:
    """A shard, and the earlier one that it repeats."""

    source: str
    shard: int
    of_source: str
    of_shard: int
    share: float  # of the series of document lengths that both have, estimated
    documents: Sequence[Sequence[int]]
    """Some documents that were compared and are equal: number in its split here, and there."""

    def finding(self, step: int, tokens: tuple[int, int]) -> Finding:
        """For the log and the page."""
        text = (
            f"shard {self.shard} of {self.source} repeats shard {self.of_shard} of {self.of_source}: "
            f"{self.share:.0%} of its series of documents are the same"
        )
        details = {
            "source": self.source,
            "shard": self.shard,
            "of_source": self.of_source,
            "of_shard": self.of_shard,
            "documents": [list(pair) for pair in self.documents],
        }
        return Finding("repeated_shard", step, tokens, text, value=self.share, details=details)


@dataclass(frozen=True)
class _Sketch:
    split: PackedSplit
    shard: int
    hashes: np.ndarray
    documents: np.ndarray  # of the shard: where the series behind each hash begins


def repeated_shards(splits: Sequence[PackedSplit]) -> list[Repeat]:
    """Every shard that repeats an earlier one, in the order of `splits` and their shards."""
    by_hash: dict[int, list[int]] = {}
    sketches: list[_Sketch] = []
    repeats = []
    for split in splits:
        for shard in range(len(split.shards)):
            sketch = _sketch(split, shard)
            if sketch is None:
                continue
            shared: dict[int, int] = {}
            for value in sketch.hashes.tolist():
                for other in by_hash.get(value, ()):
                    shared[other] = shared.get(other, 0) + 1
            repeat = _confirmed(sketch, sketches, shared)
            if repeat is not None:
                repeats.append(repeat)
            for value in sketch.hashes.tolist():
                by_hash.setdefault(value, []).append(len(sketches))
            sketches.append(sketch)
    return repeats


def _sketch(split: PackedSplit, shard: int) -> _Sketch | None:
    starts = np.asarray(split.docs[shard][:], dtype=np.uint64)
    if len(starts) < MIN_DOCUMENTS:
        return None
    ends = np.append(starts[1:], np.uint64(split.shards.lengths[shard]))
    lengths = (ends - starts).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = np.zeros(len(lengths) - SERIES + 1, dtype=np.uint64)
        for place in range(SERIES):
            mixed = _mix(np.bitwise_xor(mixed, lengths[place : place + len(mixed)]))
    hashes, first = np.unique(mixed, return_index=True)  # sorted, so the smallest come first
    return _Sketch(split, shard, hashes[:SKETCH], first[:SKETCH])


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _confirmed(sketch: _Sketch, sketches: list[_Sketch], shared: dict[int, int]) -> Repeat | None:
    """The earlier shard that shares most, if it shares enough and documents behind shared series are equal."""
    for other, count in sorted(shared.items(), key=lambda item: (-item[1], item[0])):
        earlier = sketches[other]
        share = count / min(len(sketch.hashes), len(earlier.hashes))
        if share < MIN_SHARE:
            return None
        _, ours, theirs = np.intersect1d(sketch.hashes, earlier.hashes, assume_unique=True, return_indices=True)
        pairs = list(zip(sketch.documents[ours].tolist(), earlier.documents[theirs].tolist(), strict=True))[:COMPARED]
        equal = [
            (number, before)
            for number, before in pairs
            if np.array_equal(_document(sketch, number), _document(earlier, before))
        ]
        if len(equal) * 2 >= len(pairs):
            ours_before, theirs_before = (sum(one.split.docs.lengths[: one.shard]) for one in (sketch, earlier))
            documents = tuple((number + ours_before, before + theirs_before) for number, before in equal)
            return Repeat(sketch.split.name, sketch.shard, earlier.split.name, earlier.shard, share, documents)
    return None


def _document(sketch: _Sketch, number: int) -> np.ndarray:
    starts, tokens = sketch.split.docs[sketch.shard], sketch.split.shards[sketch.shard]
    end = int(starts[number + 1]) if number + 1 < len(starts) else sketch.split.shards.lengths[sketch.shard]
    return np.asarray(tokens[int(starts[number]) : end])
