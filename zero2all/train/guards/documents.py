"""The documents of a step, as text: what a person looks at when a step went wrong.

Rows are a function of the data and the position, so they can be shown at any time, for any step, also of a stage that
is over. Decoding needs a tokenizer, which training does without: callers that have one pass its `decode`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zero2all.packed.bestfit import open_best_fit
from zero2all.packed.mixture import TrainingData
from zero2all.packed.shard_format import PackedSplit
from zero2all.packed.show import ShownDocument, sample_at

Decode = Callable[[list[int]], str]
"""Ids to text, control tokens by name."""

EXCERPT_CHARS = 300


@dataclass(frozen=True)
class DocumentText:
    """The part of a document in a row."""

    number: int  # of the document in its split
    gid: int | None  # of its corpus record, where the corpus is known
    title: str
    origin: str  # raw file and place, in words; empty where it is not known
    first_column: int
    tokens: int
    text: str
    is_cut: bool  # whether `text` is only its beginning


@dataclass(frozen=True)
class SampleText:
    """One row of a step's global batch."""

    source: str
    channel: str
    shard: int
    split_tokens: tuple[int, int] | None
    """Its tokens within the source; None for best-fit rows, whose documents lie apart."""
    documents: list[DocumentText]
    row: int | None = None
    sample: int | None = None  # which sample of its source
    stage: str = ""
    epoch: int = 0
    first_token: int | None = None  # of the row in the run's order
    loss: float | None = None


@dataclass(frozen=True)
class Texts:
    """Where the text of documents comes from, and how much of it is shown."""

    corpus: Path
    decode: Decode | None = None
    """None: text is a list of ids."""
    chars: int | None = EXCERPT_CHARS
    """Of each document; None: all of them."""


class StepRows(NamedTuple):
    """The rows of a step over all ranks, in the order of the global batch: (B,) each."""

    sources: np.ndarray  # index into the sources of the run
    samples: np.ndarray  # which sample of its source
    shards: np.ndarray  # the shard of its source that it comes from


def rows_of_step(data: TrainingData, first_token: int, samples: int) -> StepRows:
    """Which samples the global batch that begins at `first_token` has. A sample that crosses a shard border belongs to
    the shard that holds its middle; a best-fit row lies in one shard by construction."""
    segment = data.segment_at(first_token)
    position = segment.position_at(first_token)
    sources, indices = segment.order.lookup(np.arange(position, position + samples, dtype=np.int64))
    shards = np.empty(len(sources), dtype=np.int64)
    for source in np.unique(sources).tolist():
        split, here = data.splits[source], sources == source
        if data.packing == "best_fit":
            rows = open_best_fit(split, segment.seq_len)
            inside = rows.starts[rows.rows[indices[here]].astype(np.int64)].astype(np.int64)
        else:
            inside = indices[here] * segment.seq_len + segment.seq_len // 2
        shards[here] = np.searchsorted(split.shard_starts, inside, side="right") - 1
    return StepRows(sources, indices, shards)


def samples_of_step(
    data: TrainingData,
    first_token: int,
    samples: int,
    texts: Texts,
    only_rows: Sequence[int] | None = None,
    losses: Mapping[int, float] | None = None,
) -> list[SampleText]:
    """The rows of the global batch that begins at `first_token`. `losses`: mean loss of a row, where it was
    recorded."""
    rows = rows_of_step(data, first_token, samples)
    segment = data.segment_at(first_token)
    before = sum(
        earlier.position_at(later.from_token)
        for earlier, later in zip(data.segments[: segment.number], data.segments[1:], strict=False)
    )
    position = before + segment.position_at(first_token)
    shown = []
    for row in range(samples) if only_rows is None else only_rows:
        sample = sample_at(data, position + row, texts.corpus)
        index = int(rows.samples[row])
        start = index * segment.seq_len
        shown.append(
            SampleText(
                row=row,
                source=sample.split.name,
                channel=sample.split.channel,
                shard=int(rows.shards[row]),
                sample=index,
                stage=sample.stage or "",
                epoch=sample.epoch or 0,
                first_token=first_token + row * segment.seq_len,
                split_tokens=None if data.packing == "best_fit" else (start, start + segment.seq_len + 1),
                loss=None if losses is None else losses.get(row),
                documents=[
                    _document_text(sample.split, document, document.number, texts)
                    for document in sample.documents
                    if document.number is not None  # padding has none
                ],
            )
        )
    return shown


def _document_text(split: PackedSplit, document: ShownDocument, number: int, texts: Texts) -> DocumentText:
    origin = document.origin
    text, is_cut = _text(document, texts.decode, texts.chars)
    return DocumentText(
        number=number,
        gid=split.gid_of(number) if origin is None else origin.gid,
        title="" if origin is None else origin.title,
        origin="" if origin is None else origin.in_words(),
        first_column=document.column,
        tokens=len(document.tokens),
        text=text,
        is_cut=is_cut,
    )


def _text(document: ShownDocument, decode: Decode | None, chars: int | None) -> tuple[str, bool]:
    ids = document.tokens.tolist()
    enough = ids if chars is None else ids[: 4 * chars + 4]  # a character has at most four bytes, a token at least one
    text = " ".join(map(str, enough)) if decode is None else decode(enough)
    if chars is None or (len(text) <= chars and len(enough) == len(ids)):
        return text, False
    return text[:chars], True
