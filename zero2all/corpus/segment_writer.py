"""One segment of a task: documents in; cleaned records, their index and samples of what was dropped out.

Documents wait for a batch of about 1 MB, so that cleaning and signatures run over many at once.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.records import ORIGINS_NAME
from zero2all.corpus.channels import channels_of, scripts_of_encoded
from zero2all.corpus.clean.cleaner import Cleaned, Cleaner
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter
from zero2all.corpus.dedup.signatures import describe_encoded, encode
from zero2all.corpus.quality import SCORE_KEY, Quality
from zero2all.corpus.readers import EXCERPT_CHARS, Damaged, RawRow
from zero2all.corpus.record import Document, encode_record, plain
from zero2all.corpus.report import Tally
from zero2all.corpus.segments import (
    CHANNELS_KEY,
    DROPPED_NAME,
    LAYOUT,
    LAYOUT_NAME,
    QUARANTINED_NAME,
    RECORDS_NAME,
    SAMPLE_CHARS,
    SAMPLES_PER_RULE,
    encodable,
    quarantine_line,
)
from zero2all.corpus.sources import part_name

BATCH_CHARS = 1 << 19
BATCH_RECORDS = 4096
SEGMENT_BYTES = 64_000_000
SEGMENT_ITEMS = 100_000
"""A segment is closed when this much text or this many items have been read, so that memory stays small."""
CUT_WORD = re.compile(r"^[\w.@+/=-]+|[\w.@+/=-]+$")


class SegmentWriter:
    """Fills the staging folder of one segment.

    The documents of an `auto` source go to a folder for each channel met in the segment, and to `channel` when they
    belong to none; any other source has one channel, whose files lie in the staging folder itself.
    """

    def __init__(
        self,
        source: str,
        channel: str,
        is_auto: bool,
        dedup: DedupConfig,
        quality: Quality,
        cleaners: Mapping[str, Cleaner],
        staging: Path,
        stack: ExitStack,
    ) -> None:
        self.source, self.channel, self.is_auto, self._how = source, channel, is_auto, (dedup, quality)
        self.staging, self.cleaners, self._stack = staging, cleaners, stack
        self._writers: dict[str, _ChannelWriter] = {}
        if not is_auto:
            self._writers[channel] = _ChannelWriter(source, *self._how, staging, cleaners[channel], stack)
        self._batch: list[tuple[RawRow | Damaged, Document | Damaged, int]] = []
        self._batch_chars = 0

    @property
    def is_full(self) -> bool:
        """Whether the segment should end here."""
        writers = self._writers.values()
        return (
            sum(writer.tally.bytes_in for writer in writers) >= SEGMENT_BYTES
            or sum(writer.items for writer in writers) >= SEGMENT_ITEMS
        )

    @property
    def batch_is_full(self) -> bool:
        """Whether the documents waiting should be cleaned now."""
        return self._batch_chars >= BATCH_CHARS or len(self._batch) >= BATCH_RECORDS

    def add(self, item: RawRow | Damaged, document: Document | Damaged, unread_bytes: int = 0) -> None:
        """Take an item into the batch, as a document or as damaged, with how much of its file is lost behind it."""
        self._batch.append((item, document, unread_bytes))
        if isinstance(document, Document):
            self._batch_chars += len(document.content)

    def clean_batch(self) -> None:
        """Find the channel of each document waiting, and clean it as that."""
        batch, self._batch, self._batch_chars = self._batch, [], 0
        documents = [document for _, document, _ in batch if isinstance(document, Document)]
        channels: Iterator[str | None] = itertools.repeat(self.channel)
        if self.is_auto:
            channels = iter(channels_of([one.title for one in documents], [one.content for one in documents]))
        for item, document, unread_bytes in batch:
            if isinstance(document, Damaged):
                self._writer(self.channel).add_damaged(item, document, unread_bytes)
            else:
                self._writer(next(channels) or self.channel).add(item, document)
        for writer in self._writers.values():
            writer.clean_batch()

    def finish(self, notes: dict[str, Any]) -> dict[str, Any]:
        """Write what is left; returns the counts, those of an `auto` source by channel, and `notes`."""
        counts = {channel: self._writers[channel].finish() for channel in sorted(self._writers)}
        return {CHANNELS_KEY: counts, **notes} if self.is_auto else {**counts[self.channel], **notes}

    def _writer(self, channel: str) -> _ChannelWriter:
        if channel not in self._writers:
            folder = self.staging / channel
            folder.mkdir()
            name = part_name(self.source, channel)
            self._writers[channel] = _ChannelWriter(name, *self._how, folder, self.cleaners[channel], self._stack)
        return self._writers[channel]


class _PendingDocument(NamedTuple):
    """A document of the current batch."""

    number: int
    item: RawRow | Damaged
    document: Document


class _ChannelWriter:
    """Writes what a segment has of one channel."""

    def __init__(
        self, source: str, dedup: DedupConfig, quality: Quality, folder: Path, cleaner: Cleaner, stack: ExitStack
    ) -> None:
        self.source, self.dedup, self.quality, self.folder, self.cleaner = source, dedup, quality, folder, cleaner
        self.tally = Tally()
        self.unread_bytes = 0
        self.items = 0
        self._batch: list[_PendingDocument] = []
        self._samples: Counter[str] = Counter()
        self._layout: list[np.ndarray] = []
        self._records = stack.enter_context((folder / RECORDS_NAME).open("wb", buffering=1 << 20))
        self._quarantined = stack.enter_context((folder / QUARANTINED_NAME).open("wb"))
        self._dropped = stack.enter_context((folder / DROPPED_NAME).open("wb"))
        self._origins = stack.enter_context((folder / ORIGINS_NAME).open("wb"))
        self._origin: Any = None
        """That of the last item."""
        self._index = stack.enter_context(IndexWriter(folder, near=dedup.signs))

    def add(self, item: RawRow | Damaged, document: Document) -> None:
        """Take a document into the batch."""
        self._note_origin(item)
        self._batch.append(_PendingDocument(self.items, item, document))
        self.items += 1
        if isinstance(item, RawRow) and item.replaced:
            self.tally.replaced.update({"records": 1, "characters": item.replaced})

    def add_damaged(self, item: RawRow | Damaged, damaged: Damaged, unread_bytes: int) -> None:
        """Count and list an item that could not be read."""
        self._note_origin(item)
        self.tally.bytes_in += damaged.raw_bytes
        self.unread_bytes += unread_bytes
        self._quarantine(self.items, item, damaged)
        self.items += 1

    def _note_origin(self, item: RawRow | Damaged) -> None:
        """Write down where the items of another file begin."""
        if item.origin is not self._origin:
            self._origin = item.origin
            self._origins.write(jsonio.dumps_line(encodable({"first": self.items, "file": origin_name(item)})))

    def clean_batch(self) -> None:
        """Clean the documents waiting, and write those that are kept."""
        batch, self._batch = self._batch, []
        texts: list[str] = []
        lines: list[bytes] = []
        numbers: list[int] = []
        bytes_kept = bytes_repaired = bytes_in = 0
        done = self.cleaner.clean([one.document.content for one in batch])
        scores = self.quality.judge([self._as_record(one) for one in batch] if self.quality.filter else [], done)
        for waiting, cleaned, score in zip(batch, done, scores, strict=True):
            bytes_in += cleaned.text_bytes + cleaned.repaired_bytes
            if cleaned.reason is not None:
                self._drop(waiting, cleaned)
                continue
            line = self._encode(waiting, cleaned, score)
            if line is None:
                continue
            bytes_kept += cleaned.text_bytes
            bytes_repaired += cleaned.repaired_bytes
            if cleaned.masked:
                self.tally.masked.update(cleaned.masked)
            if cleaned.private_use:
                self.tally.private_use.update({"records": 1, **cleaned.private_use})
            lines.append(line)
            texts.append(cleaned.text)
            numbers.append(waiting.number)
        self.tally.bytes_in += bytes_in
        if texts:
            self.tally.records_kept += len(texts)
            self.tally.bytes_kept += bytes_kept
            self.tally.bytes_repaired += bytes_repaired
            self._write(texts, lines, numbers)

    def finish(self) -> dict[str, Any]:
        """Write what is left; returns the counts."""
        self.tally.records_in = self.items
        np.save(self.folder / LAYOUT_NAME, np.concatenate(self._layout) if self._layout else np.zeros(0, LAYOUT))
        return {"items": self.items, "tally": self.tally.as_report(), "unread_bytes": self.unread_bytes}

    def _as_record(self, waiting: _PendingDocument) -> dict[str, Any]:
        """What a filter of the user is given."""
        place = {"source": self.source, "file": origin_name(waiting.item), "place": waiting.item.place}
        return {**waiting.document._asdict(), "others": dict(waiting.document.others), **place}

    def _encode(self, waiting: _PendingDocument, cleaned: Cleaned, score: float | None) -> bytes | None:
        document, tidy, masked = waiting.document, self.cleaner.tidy, self.tally.masked
        title = document.title and tidy(document.title, masked)
        category = document.category and tidy(document.category, masked)
        desc = document.desc and tidy(document.desc, masked)
        try:
            others = document.others if score is None else {**document.others, SCORE_KEY: score}
            if self.cleaner.masks:
                others = self.cleaner.mask(plain(others), masked)
            return encode_record(self.source, category, title, cleaned.text, desc, others)
        except (ValueError, RecursionError) as error:
            bytes_in = cleaned.text_bytes + cleaned.repaired_bytes
            damaged = Damaged(waiting.item.place, "not_json", str(error), bytes_in, cleaned.text[:EXCERPT_CHARS])
            self._quarantine(waiting.number, waiting.item, damaged)
            return None

    def _write(self, texts: list[str], lines: list[bytes], numbers: list[int]) -> None:
        self._records.writelines(lines)
        layout = np.empty(len(lines), LAYOUT)
        layout["line_bytes"] = [len(line) for line in lines]
        encoded = encode(texts)
        layout["script"] = scripts_of_encoded(encoded)
        self._layout.append(layout)
        described = describe_encoded(encoded, self.cleaner.channel, self.dedup)
        self._index.add(described, np.array(numbers, np.uint64))

    def _drop(self, waiting: _PendingDocument, cleaned: Cleaned) -> None:
        rule = cleaned.reason or ""
        self.tally.dropped[rule] += 1
        self.tally.bytes_dropped[rule] += cleaned.text_bytes + cleaned.repaired_bytes
        if self._samples[rule] < SAMPLES_PER_RULE:
            self._samples[rule] += 1
            sample = {
                "rule": rule,
                "item": waiting.number,
                "file": origin_name(waiting.item),
                "place": waiting.item.place,
                "title": self.cleaner.tidy(waiting.document.title)[:SAMPLE_CHARS],
                "chars": len(cleaned.text),
                "excerpt": cleaned.text[:SAMPLE_CHARS],
                "measures": {name: round(value, 4) for name, value in (cleaned.measures or {}).items() if value},
            }
            self._dropped.write(jsonio.dumps_line(encodable(sample)))

    def _quarantine(self, number: int, item: RawRow | Damaged, damaged: Damaged) -> None:
        self.tally.quarantined_by_reason[damaged.reason] += 1
        self.tally.bytes_quarantined += damaged.raw_bytes
        if self.cleaner.masks:
            excerpt = self.cleaner.mask(_without_cut_words(damaged.excerpt))
            damaged = replace(damaged, detail=self.cleaner.mask(damaged.detail), excerpt=excerpt)
        self._quarantined.write(quarantine_line(number, origin_name(item), damaged))


def _without_cut_words(excerpt: str) -> str:
    """Without what an excerpt may have cut in two, which no mask would know."""
    return CUT_WORD.sub("…", excerpt) if len(excerpt) >= EXCERPT_CHARS else excerpt


def origin_name(item: RawRow | Damaged) -> str:
    """The file an item came from, in words."""
    return item.origin.name if item.origin is not None else ""
