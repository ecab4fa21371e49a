"""One sample, as a person reads it: its documents, their borders, what counts in the loss, where each came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zero2all.common.errors import UsageError
from zero2all.packed.layout import PackedSplit
from zero2all.packed.mixture import TrainingData
from zero2all.packed.origin import Origin, Origins
from zero2all.packed.samples import NO_DOCUMENT, Borders, open_samples
from zero2all.tokenizer.load import Tokenizer

LARGEST_POSITION = 1 << 40
"""In samples: at 4,096 tokens each, 300 times the tokens of the longest runs there are."""


@dataclass(frozen=True)
class ShownDocument:
    """The part of a document that stands in a sample."""

    number: int | None
    """Of the document in its split; None for padding."""
    column: int
    """Where in the row it begins."""
    tokens: np.ndarray
    counted: np.ndarray
    """1 for each token that counts in the loss. Nothing predicts the first token of a row."""
    origin: Origin | None

    def text(self, tokenizer: Tokenizer) -> str:
        """Decoded, control tokens by name; ⟦ … ⟧ stands around what does not count in the loss."""
        changes = np.flatnonzero(np.diff(self.counted)) + 1
        parts = []
        for ids, counted in zip(np.split(self.tokens, changes), np.split(self.counted, changes), strict=True):
            text = tokenizer.decode(ids.tolist(), skip_control=False)
            parts.append(text if counted[0] else f"⟦{text}⟧")
        return "".join(parts)


@dataclass(frozen=True)
class ShownSample:
    """A sample and what is known about it."""

    split: PackedSplit
    index: int
    """Which sample of its split."""
    count: int
    """How many there are."""
    seq_len: int
    documents: list[ShownDocument]
    position: int | None = None
    """Place in the run."""
    epoch: int | None = None
    stage: str | None = None

    def heading(self) -> str:
        """In a line."""
        words = f"source {self.split.name}, channel {self.split.channel}, {self.split.split}"
        words += f"; sample {self.index:,} of {self.count:,} of {self.seq_len:,} + 1 tokens"
        if self.position is None:
            return words
        return f"position {self.position:,} (stage {self.stage}); {words}; epoch {self.epoch}"


def sample_at(data: TrainingData, position: int, corpus: Path) -> ShownSample:
    """The sample that stands at `position` of the run, counted in samples from its start."""
    if position >= LARGEST_POSITION:
        raise UsageError(f"There is no sample {position}: no run is that long. Give a number below {LARGEST_POSITION}.")
    before = 0
    for number, segment in enumerate(data.segments):
        following = data.segments[number + 1] if number + 1 < len(data.segments) else None
        count = None if following is None else segment.position_at(following.from_token)
        if count is None or position < before + count:
            break
        before += count
    within = position - before
    sources, indices = segment.order.lookup(np.array([within], dtype=np.int64))
    source, index = int(sources[0]), int(indices[0])
    taken = int(segment.order.taken(within)[source])
    split = data.splits[source]
    token = segment.from_token + within * segment.seq_len
    stage = [stage.name for stage in data.plan if stage.from_token <= token][-1]
    shown = split_sample(split, index, segment.seq_len, data.packing, corpus)
    return replace(shown, position=position, epoch=taken // segment.order.sources[source].samples, stage=stage)


def split_sample(split: PackedSplit, index: int, seq_len: int, packing: str, corpus: Path) -> ShownSample:
    """Sample `index` of a split, whatever run may read it."""
    samples = open_samples(split, seq_len, packing)
    if not 0 <= index < samples.count:
        raise UsageError(
            f"{split.folder} has {samples.count:,} samples of {seq_len:,} + 1 tokens, so there is no sample {index:,}. "
            f"Give a number below that, or another --data.seq_len."
        )
    tokens, weights = np.empty(seq_len + 1, np.int64), np.empty(seq_len, np.float32)
    borders = Borders()
    samples.read(index, tokens, weights, borders, 0)
    columns, numbers = borders.columns[0].tolist(), borders.numbers[0].tolist()
    counted = np.concatenate((weights[:1], weights)) != 0  # shown as its neighbour, which it may stand before
    origins = Origins(corpus)
    documents = []
    for number, start, end in zip(numbers, columns, [*columns[1:], seq_len + 1], strict=True):
        known = None if number == NO_DOCUMENT else int(number)
        gid = None if known is None else split.gid_of(known)
        origin = None if gid is None else origins.find(split.name, split.split, gid)
        documents.append(ShownDocument(known, start, tokens[start:end], counted[start:end].astype(np.int8), origin))
    return ShownSample(split, index, samples.count, seq_len, documents)
