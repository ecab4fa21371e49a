"""Ingest: one task's raw files -> segments of cleaned records, ready for dedup and finish.

A task is some files read whole, or one piece of a large file. Rows are put into documents, cleaned in batches of
about 1 MB, and written without their final numbers: how many items come before them in their source is known only
when every task is done. What a segment holds depends on the task alone, never on who ran it or how often it was
interrupted.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero2all.common import jsonio
from zero2all.common.engine import advance
from zero2all.common.files import staged_folder, write_json
from zero2all.corpus.clean.cleaner import Cleaned, Cleaner
from zero2all.corpus.clean.config import CleanConfig
from zero2all.corpus.clean.repair import repair
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.dedup.index import IndexWriter
from zero2all.corpus.dedup.lines import LineCounter, uses_lines
from zero2all.corpus.dedup.signatures import describe
from zero2all.corpus.listing import InputFile
from zero2all.corpus.quarantine import encodable, quarantine_line
from zero2all.corpus.readers import EXCERPT_CHARS, NOT_READ, Damaged, Format, Limits, Row, Unit, plan_units, read_unit
from zero2all.corpus.record import Document, encode_record
from zero2all.corpus.report import Tally
from zero2all.corpus.scripts import scripts_of
from zero2all.corpus.segments import (
    DONE_NAME,
    DROPPED_NAME,
    LAYOUT,
    LAYOUT_NAME,
    QUARANTINED_NAME,
    RECORDS_NAME,
    SAMPLE_CHARS,
    SAMPLES_PER_RULE,
    STATE_NAME,
    Segment,
    finished_segments,
    segment_name,
    segments_of_unit,
)
from zero2all.corpus.sources import apply_mapping, fields_seen, guess_mapping

BATCH_CHARS = 1 << 19
BATCH_RECORDS = 4096
SEGMENT_BYTES = 64_000_000
"""A segment is closed when this much text has been read for it …"""
SEGMENT_ITEMS = 100_000
"""… or this many items, so that a worker's memory stays small."""
PROGRESS_BYTES = 1 << 18
MENDABLE = re.compile("[\u00c2-\u00f4]")
"""Every text in a wrong encoding that repair can mend has one of these."""
PEEKED_ROWS = 20
PEEKED_ITEMS = 1000
NAMED_FILES = 20


class Piece(NamedTuple):
    """A file to be read whole, or one unit of it."""

    file: InputFile
    unit: Unit | None = None
    """None: the worker finds out what the file is."""
    mapping: Mapping[str, str] | None = None
    """Record field -> raw field as found in the first rows of the file, where several workers read it; empty when
    nothing was found there. None: the worker looks."""


@dataclass(frozen=True)
class IngestTask:
    """Everything a worker needs to write one unit folder."""

    source: str
    channel: str
    given_mapping: Mapping[str, str]
    pieces: tuple[Piece, ...]
    folder: Path
    limits: Limits
    clean: CleanConfig
    dedup: DedupConfig

    @property
    def raw_bytes(self) -> int:
        """About how many bytes of input it reads, for the progress bar."""
        return sum(piece_bytes(piece) for piece in self.pieces)


def piece_bytes(piece: Piece) -> int:
    """About how many raw bytes a piece has."""
    return piece.unit.raw_bytes if piece.unit is not None else piece.file.size_bytes


def ingest_unit(task: IngestTask) -> list[Segment]:
    """Write what is missing of a unit folder; returns all its segments."""
    done = segments_of_unit(task.folder)
    if done is not None:
        return done
    segments = finished_segments(task.folder)
    items = _Items(task, segments[-1].state["next"] if segments else None)
    cleaner = Cleaner(task.clean, task.channel)
    while not items.at_end:
        folder = task.folder / segment_name(len(segments))
        with staged_folder(folder) as staging, ExitStack() as stack:
            writer = _SegmentWriter(task, staging, cleaner, stack)
            while not (writer.is_full or items.at_end):
                items.fill(writer)
                writer.clean_batch()
            state = writer.finish(items)
            stack.close()
            write_json(staging / STATE_NAME, state)
        segments.append(Segment(folder, state))
    items.tell_rest()
    write_json(task.folder / DONE_NAME, {"segments": [segment.state for segment in segments]})
    return segments


class _Items:
    """The items of a task in order, from its beginning or from where an earlier attempt stopped."""

    def __init__(self, task: IngestTask, resume: dict[str, Any] | None) -> None:
        self.task = task
        self.at_end = False
        self._piece = self._unit = 0
        self._mapping: Mapping[str, str] | None = None
        """That of the item handed out last."""
        self._resume = self._next = resume
        self._notes = _Notes()
        self._skips: list[tuple[str, str]] = []
        """Archive members without anything to read that stand before the next item …"""
        self._last_skips: list[tuple[str, str]] = []
        """… and those behind the last one, when it was looked at before its turn."""
        self._told = self._untold = 0
        self._stream = self._read()

    def fill(self, writer: _SegmentWriter) -> None:
        """Hand over items until the writer has a batch, or there are no more."""
        item: Row | Damaged | None = None
        for item in self._stream:
            document = _document_of(item, self._mapping)
            if isinstance(document, Damaged):
                writer.add_damaged(item, document)
            else:
                writer.add(item, document)
            if writer.batch_is_full():
                break
        else:
            self.at_end = True
        self._note_skips()
        if item is not None:
            mapping = dict(self._mapping) if self._mapping is not None else None
            place = {"piece": self._piece, "unit": self._unit, "origin": _origin_key(item), "cursor": item.cursor}
            self._next = {**place, "mapping": mapping}

    def take_notes(self) -> dict[str, Any]:
        """What was learnt about files since the last call, and where to go on."""
        notes, self._notes = self._notes, _Notes()
        return {"next": self._next, **notes.as_state()}

    def tell_rest(self) -> None:
        """Bring the progress bar to the end of this task."""
        advance(max(self.task.raw_bytes - self._told, 0))

    def _read(self) -> Iterator[Row | Damaged]:
        resume = self._resume
        for piece_number, piece in enumerate(self.task.pieces):
            if resume is not None and piece_number < resume["piece"]:
                continue
            units = [piece.unit] if piece.unit is not None else plan_units(piece.file, self.task.limits)
            for unit_number, unit in enumerate(units):
                if resume is not None and unit_number < resume["unit"]:
                    continue
                if unit.format in NOT_READ:
                    self._notes.skip(str(unit.format), piece.file.name)
                    if unit.note:
                        self._notes.notes.append(f"{piece.file.name}: {unit.note}")
                    continue
                at, resume = resume, None
                self._piece, self._unit = piece_number, unit_number
                cursor = at["cursor"] if at is not None else None
                items = read_unit(unit, self.task.limits, self._on_bytes, cursor, on_skip=self._on_skip)
                yield from self._mapped(iter(items), unit, piece.mapping, at)
                self._skips += self._last_skips
                self._last_skips = []
                self._note_skips()

    def _mapped(
        self,
        items: Iterator[Row | Damaged],
        unit: Unit,
        known: Mapping[str, str] | None,
        resumed: dict[str, Any] | None,
    ) -> Iterator[Row | Damaged]:
        """The items of a unit; `_mapping` is what was found in the first rows of their file or archive member."""
        origin: Any = None
        ahead: deque[tuple[Row | Damaged, list[tuple[str, str]]]] = deque()
        while True:
            was_ahead = bool(ahead)
            for item in self._from_ahead(ahead) if ahead else items:
                if item.origin is origin:
                    yield item
                    continue
                origin = item.origin
                if resumed is not None and _origin_key(item) == resumed["origin"]:
                    self._mapping = resumed["mapping"]
                else:
                    self._mapping = known if known is not None else self._guess(item, ahead, items)
                    is_first = unit.number == 0 or unit.format is Format.ARCHIVE
                    self._notes.add_origin(item, self._mapping, is_first)
                resumed = None
                yield item
                break  # some items may have been looked at before their turn, and come next
            else:
                if not was_ahead:
                    return

    def _guess(self, first: Row | Damaged, ahead: deque[Any], items: Iterator[Row | Damaged]) -> dict[str, str] | None:
        """The mapping for rows like the first of this origin; items looked at are put into `ahead`."""
        if isinstance(first, Row) and first.is_document:
            return None
        self._note_skips()
        rows = sum(isinstance(item, Row) for item, _ in ahead)
        while (
            rows < PEEKED_ROWS - 1 and len(ahead) < PEEKED_ITEMS and (not ahead or ahead[-1][0].origin is first.origin)
        ):
            item = next(items, None)
            skips, self._skips = self._skips, []
            if item is None:
                self._last_skips += skips
                break
            rows += isinstance(item, Row)
            ahead.append((item, skips))
        same = [item for item in [first, *(item for item, _ in ahead)] if item.origin is first.origin]
        fields = [item.fields for item in same if isinstance(item, Row)][:PEEKED_ROWS]
        mapping = guess_mapping(fields, self.task.given_mapping) if fields else None
        if mapping is None:
            self._notes.unmapped_fields.update(dict.fromkeys(fields_seen(fields)))
        return mapping

    def _from_ahead(self, ahead: deque[tuple[Row | Damaged, list[tuple[str, str]]]]) -> Iterator[Row | Damaged]:
        while ahead:
            item, skips = ahead.popleft()
            self._skips += skips
            yield item

    def _on_skip(self, reason: str, name: str) -> None:
        self._skips.append((reason, name))

    def _note_skips(self) -> None:
        """Count the members that were passed over up to here; an interrupted build will not meet them again."""
        for reason, name in self._skips:
            self._notes.skip(reason, name)
        self._skips = []

    def _on_bytes(self, amount: int) -> None:
        self._untold += amount
        if self._untold >= PROGRESS_BYTES:
            advance(self._untold)
            self._told += self._untold
            self._untold = 0


class _Notes:
    """What is learnt about files while they are read."""

    def __init__(self) -> None:
        self.formats: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.skipped_names: dict[str, list[str]] = {}
        self.mappings: list[dict[str, str]] = []
        self.unmapped_fields: dict[str, None] = {}
        self.notes: list[str] = []

    def skip(self, reason: str, name: str) -> None:
        """A file or archive member that is not read."""
        self.skipped[reason] += 1
        names = self.skipped_names.setdefault(reason, [])
        if len(names) < NAMED_FILES:
            names.append(name)

    def add_origin(self, first: Row | Damaged, mapping: Mapping[str, str] | None, is_beginning: bool) -> None:
        """A file or archive member, by its first item: what it is and how its rows are read, or that they cannot be."""
        if is_beginning and first.origin is not None:
            self.formats[str(first.origin.format)] += 1
        if mapping and mapping not in self.mappings:
            self.mappings.append(dict(mapping))
        elif not mapping and isinstance(first, Row) and not first.is_document:
            self.unmapped_fields.update(dict.fromkeys(first.fields))

    def as_state(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        return {
            "formats": dict(self.formats),
            "skipped": dict(self.skipped),
            "skipped_names": self.skipped_names,
            "mappings": self.mappings,
            "unmapped_fields": list(self.unmapped_fields),
            "notes": self.notes[:NAMED_FILES],
        }


def first_rows(items: Iterator[Row | Damaged], most: int = PEEKED_ROWS) -> list[Row]:
    """The first rows of a unit that come from one file or archive member."""
    first = next(items, None)
    if first is None:
        return []
    same = itertools.takewhile(lambda item: item.origin is first.origin, itertools.islice(items, PEEKED_ITEMS))
    rows = (item for item in itertools.chain([first], same) if isinstance(item, Row))
    return list(itertools.islice(rows, most))


def _origin_name(item: Row | Damaged) -> str:
    return item.origin.name if item.origin is not None else ""


def _origin_key(item: Row | Damaged) -> list[Any]:
    """Tells one file or archive member from another; as JSON holds it."""
    return [item.origin.name, *item.origin.path] if item.origin is not None else []


def _document_of(item: Row | Damaged, mapping: Mapping[str, str] | None) -> Document | Damaged:
    if isinstance(item, Damaged):
        return item
    if item.is_document:
        return Document(**item.fields)
    if not mapping or mapping["content"] not in item.fields:
        return _unusable_row(item, "no_text_field", f"fields: {', '.join(item.fields)}")
    try:
        return apply_mapping(item.fields, mapping)
    except ValueError as error:
        return _unusable_row(item, "not_text", str(error))


def _unusable_row(row: Row, reason: str, detail: str) -> Damaged:
    excerpt = repr(row.fields)
    return Damaged(row.place, reason, detail[:EXCERPT_CHARS], len(excerpt.encode(errors="replace")), excerpt)


def repair_field(text: str) -> str:
    """`repair` for short texts, most of which need none."""
    return text.strip() if text.isprintable() and not MENDABLE.search(text) else repair(text)


class _Waiting(NamedTuple):
    """A document of the current batch."""

    number: int
    item: Row | Damaged
    document: Document


class _SegmentWriter:
    """Fills the staging folder of one segment."""

    def __init__(self, task: IngestTask, staging: Path, cleaner: Cleaner, stack: ExitStack) -> None:
        self.task, self.staging, self.cleaner = task, staging, cleaner
        self.tally = Tally()
        self.unread_bytes = 0
        self._items = 0
        self._batch: list[_Waiting] = []
        self._batch_chars = 0
        self._batch_end = BATCH_RECORDS
        self._samples: Counter[str] = Counter()
        self._layout: list[np.ndarray] = []
        self._records = stack.enter_context((staging / RECORDS_NAME).open("wb", buffering=1 << 20))
        self._quarantined = stack.enter_context((staging / QUARANTINED_NAME).open("wb"))
        self._dropped = stack.enter_context((staging / DROPPED_NAME).open("wb"))
        self._index = stack.enter_context(IndexWriter(staging, near=task.dedup.near != "off"))
        self._lines = LineCounter(task.dedup) if uses_lines(task.channel, task.dedup) else None

    @property
    def is_full(self) -> bool:
        """Whether the segment should end here."""
        return self.tally.bytes_in >= SEGMENT_BYTES or self._items >= SEGMENT_ITEMS

    def batch_is_full(self) -> bool:
        """Whether the documents waiting should be cleaned now."""
        return self._batch_chars >= BATCH_CHARS or self._items >= self._batch_end

    def add(self, item: Row | Damaged, document: Document) -> None:
        """Take a document into the batch."""
        self._batch.append(_Waiting(self._items, item, document))
        self._batch_chars += len(document.content)
        self._items += 1

    def add_damaged(self, item: Row | Damaged, damaged: Damaged) -> None:
        """Count and list an item that could not be read."""
        self.tally.bytes_in += damaged.raw_bytes
        self._quarantine(self._items, item, damaged)
        self._items += 1

    def clean_batch(self) -> None:
        """Clean the documents waiting, and write those that are kept."""
        batch, self._batch, self._batch_chars = self._batch, [], 0
        self.tally.records_in += self._items - self._batch_end + BATCH_RECORDS
        self._batch_end = self._items + BATCH_RECORDS
        texts: list[str] = []
        lines: list[bytes] = []
        numbers: list[int] = []
        bytes_kept = bytes_repaired = bytes_in = 0
        for waiting, cleaned in zip(batch, self.cleaner.clean([one.document.content for one in batch]), strict=True):
            bytes_in += cleaned.text_bytes + cleaned.repaired_bytes
            if cleaned.reason is not None:
                self._drop(waiting, cleaned)
                continue
            line = self._encode(waiting, cleaned)
            if line is None:
                continue
            bytes_kept += cleaned.text_bytes
            bytes_repaired += cleaned.repaired_bytes
            if cleaned.masked:
                self.tally.masked.update(cleaned.masked)
            lines.append(line)
            texts.append(cleaned.text)
            numbers.append(waiting.number)
        self.tally.bytes_in += bytes_in
        if texts:
            self.tally.records_kept += len(texts)
            self.tally.bytes_kept += bytes_kept
            self.tally.bytes_repaired += bytes_repaired
            self._write(texts, lines, numbers)

    def finish(self, items: _Items) -> dict[str, Any]:
        """Write what is left; returns what is to be kept of this segment in words and figures."""
        np.save(self.staging / LAYOUT_NAME, np.concatenate(self._layout) if self._layout else np.zeros(0, LAYOUT))
        if self._lines is not None:
            self._lines.write(self.staging)
        return {
            "items": self._items,
            "tally": self.tally.as_report(),
            "unread_bytes": self.unread_bytes,
            **items.take_notes(),
        }

    def _encode(self, waiting: _Waiting, cleaned: Cleaned) -> bytes | None:
        document = waiting.document
        title = document.title and repair_field(document.title)
        category = document.category and repair_field(document.category)
        desc = document.desc and repair_field(document.desc)
        try:
            return encode_record(self.task.source, category, title, cleaned.text, desc, document.others)
        except ValueError as error:
            bytes_in = cleaned.text_bytes + cleaned.repaired_bytes
            damaged = Damaged(waiting.item.place, "not_json", str(error), bytes_in, cleaned.text[:EXCERPT_CHARS])
            self._quarantine(waiting.number, waiting.item, damaged)
            return None

    def _write(self, texts: list[str], lines: list[bytes], numbers: list[int]) -> None:
        self._records.writelines(lines)
        layout = np.empty(len(lines), LAYOUT)
        layout["line_bytes"] = [len(line) for line in lines]
        layout["script"] = scripts_of(texts)
        self._layout.append(layout)
        self._index.add(describe(texts, self.task.channel, self.task.dedup), np.array(numbers, np.uint64))
        if self._lines is not None:
            self._lines.add(texts)

    def _drop(self, waiting: _Waiting, cleaned: Cleaned) -> None:
        rule = cleaned.reason or ""
        self.tally.dropped[rule] += 1
        self.tally.bytes_dropped[rule] += cleaned.text_bytes + cleaned.repaired_bytes
        if self._samples[rule] < SAMPLES_PER_RULE:
            self._samples[rule] += 1
            sample = {
                "rule": rule,
                "item": waiting.number,
                "file": _origin_name(waiting.item),
                "place": waiting.item.place,
                "title": waiting.document.title[:SAMPLE_CHARS],
                "chars": len(cleaned.text),
                "excerpt": cleaned.text[:SAMPLE_CHARS],
                "measures": {name: round(value, 4) for name, value in (cleaned.measures or {}).items() if value},
            }
            self._dropped.write(jsonio.dumps_line(encodable(sample)))

    def _quarantine(self, number: int, item: Row | Damaged, damaged: Damaged) -> None:
        self.tally.quarantined[damaged.reason] += 1
        self.tally.bytes_quarantined += damaged.raw_bytes
        self.unread_bytes += damaged.raw_bytes if damaged.ends_file else 0
        self._quarantined.write(quarantine_line(number, _origin_name(item), damaged))
