"""What a sample is: which tokens of a split stand in its row, which of them are predicted, whose documents they are.

`concat`: sample i is the window of seq_len + 1 tokens from token i x seq_len on; nothing is padded.
`best_fit`: sample i is row i of an index (`packed.bestfit`): whole documents side by side, then padding. The first
token of a chunk is not predicted, for nothing in its row belongs to it.

Legend: B rows, T = seq_len. Inputs are tokens[:, :-1], targets tokens[:, 1:]; weights belong to targets.
"""

from dataclasses import dataclass, field

import numpy as np

from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.shard_format import PackedSplit

PADDING_ID = 0
"""Stands where a best-fit row has room left. It weighs nothing, and causal attention never looks at it."""
NO_DOCUMENT = -1
"""The document number of padding."""


@dataclass(frozen=True)
class Documents:
    """Where documents lie in the rows of a batch, for masking attention at their boundaries."""

    ids: np.ndarray
    """(B, T + 1) int32: which document of its row each token belongs to, from 0. Padding has an id of its own."""
    positions: np.ndarray
    """(B, T + 1) int32: place within the document, from 0."""
    numbers: np.ndarray
    """Number within its split of each document of each row, row after row; -1 for padding."""
    row_starts: np.ndarray
    """(B + 1,): where in `numbers` each row begins, and the total at the end."""


@dataclass
class Borders:
    """Collects the borders of the documents of each row while rows are read."""

    rows: list[int] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)
    numbers: list[np.ndarray] = field(default_factory=list)

    def add(self, row: int, columns: np.ndarray, numbers: np.ndarray) -> None:
        """Documents `numbers` begin at `columns` of `row`, the first at 0. Rows come in order."""
        self.rows.append(row)
        self.columns.append(columns)
        self.numbers.append(numbers)

    def documents(self, rows: int, width: int) -> Documents:
        """Everything collected, as arrays; a row of which nothing was said is padding throughout."""
        columns, numbers, row_of = list(self.columns), list(self.numbers), list(self.rows)
        for row in sorted(set(range(rows)).difference(self.rows)):  # rows of weight 0 come last
            columns.append(np.zeros(1, dtype=np.int64))
            numbers.append(np.full(1, NO_DOCUMENT))
            row_of.append(row)
        assert row_of == list(range(rows)), "rows come in order"
        counts = np.array([len(one) for one in columns], dtype=np.int64)
        firsts = np.concatenate(([0], np.cumsum(counts)))
        begins = np.concatenate(columns) + np.repeat(np.arange(rows) * width, counts)  # in all rows laid end to end
        lengths = np.diff(np.append(begins, rows * width))
        in_row = np.arange(len(begins)) - np.repeat(firsts[:-1], counts)
        at = np.arange(rows * width, dtype=np.int32)
        return Documents(
            ids=np.repeat(in_row.astype(np.int32), lengths).reshape(rows, width),
            positions=(at - np.repeat(begins.astype(np.int32), lengths)).reshape(rows, width),
            numbers=np.concatenate(numbers),
            row_starts=firsts,
        )


class Samples:
    """The samples of one split at one seq_len."""

    count: int
    weighted: bool
    """Whether some tokens may weigh nothing."""

    def __init__(self, split: PackedSplit, seq_len: int) -> None:
        self.split, self.seq_len = split, seq_len

    def read(
        self, index: int, tokens: np.ndarray, weights: np.ndarray | None, borders: Borders | None, row: int
    ) -> None:
        """Fill `tokens` (T + 1) and, where asked, `weights` (T) with sample `index`, and note its documents."""
        raise NotImplementedError


class ConcatSamples(Samples):
    """Windows over the tokens."""

    def __init__(self, split: PackedSplit, seq_len: int) -> None:
        super().__init__(split, seq_len)
        self.count = split.samples(seq_len)
        self.weighted = split.masks is not None

    def read(
        self, index: int, tokens: np.ndarray, weights: np.ndarray | None, borders: Borders | None, row: int
    ) -> None:
        """See `Samples`."""
        start = index * self.seq_len
        self.split.read_into(tokens, start)
        if weights is not None:
            weights[:] = self.split.read_mask(start + 1, self.seq_len) if self.weighted else 1
        if borders is not None:
            borders.add(row, *self.split.documents_in(start, self.seq_len + 1))


class BestFitSamples(Samples):
    """Rows of whole documents, padded."""

    weighted = True

    def __init__(self, split: PackedSplit, seq_len: int) -> None:
        super().__init__(split, seq_len)
        self.index = open_best_fit(split, seq_len)
        self.count = int(self.index.manifest["rows"])

    def read(
        self, index: int, tokens: np.ndarray, weights: np.ndarray | None, borders: Borders | None, row: int
    ) -> None:
        """See `Samples`."""
        first, end = (int(value) for value in self.index.rows[index : index + 2])
        lengths = self.index.lengths[first:end].tolist()
        columns, numbers, column = [], [], 0
        if weights is not None:
            weights[:] = 0
        for start, length in zip(self.index.starts[first:end].tolist(), lengths, strict=True):
            self.split.read_into(tokens[column : column + length], start)
            if weights is not None:  # targets are shifted by one: the first token of a chunk is no target
                counts = 1 if self.split.masks is None else self.split.read_mask(start + 1, length - 1)
                weights[column : column + length - 1] = counts
            if borders is not None:
                columns.append(column)
                numbers.append(self.split.document_at(start))
            column += length
        tokens[column:] = PADDING_ID
        if borders is not None:
            if column < len(tokens):
                columns.append(column)
                numbers.append(NO_DOCUMENT)
            borders.add(row, np.array(columns), np.array(numbers))


def open_samples(split: PackedSplit, seq_len: int, packing: str) -> Samples:
    """The samples of a split under `data.packing`."""
    return BestFitSamples(split, seq_len) if packing == "best_fit" else ConcatSamples(split, seq_len)
