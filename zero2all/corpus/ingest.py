"""Ingest: one task's raw files -> segments of cleaned records, ready for dedup and finish.

A task is some files read whole, or one unit of a large file. Rows become documents, are cleaned in batches of about
1 MB, and written without their final numbers, which are known only when every task is done. What a segment holds
depends on the task alone, not on the worker or on interruptions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2all.common.engine import advance
from zero2all.common.files import staged_folder, write_json
from zero2all.corpus.clean.cleaner import Cleaner
from zero2all.corpus.clean.config import CleanConfig
from zero2all.corpus.dedup.config import DedupConfig
from zero2all.corpus.listing import UNREADABLE, InputFile
from zero2all.corpus.quality import Quality
from zero2all.corpus.readers import (
    EXCERPT_CHARS,
    NOT_READ,
    Damaged,
    Format,
    ItemOrigin,
    RawRow,
    ReaderLimits,
    Unit,
    plan_units,
    read_unit,
)
from zero2all.corpus.record import Document
from zero2all.corpus.segment_writer import SegmentWriter
from zero2all.corpus.segments import DONE_NAME, STATE_NAME, Segment, finished_segments, segment_name, segments_of_unit
from zero2all.corpus.sources import PEEKED_ROWS, apply_mapping, guess_mapping, has_field, longest_first

PROGRESS_BYTES = 1 << 18
PEEKED_ITEMS = 1000
NAMED_FILES = 20
NAMED_FIELDS = 50


@dataclass(frozen=True)
class IngestTask:
    """Everything a worker needs to write one unit folder."""

    files: tuple[InputFile | Unit, ...]
    """Files to be read whole, or one unit of a large one."""
    folder: Path
    source: str
    channel: str
    is_auto: bool
    """Documents go to the segments of their own channels; `channel` is that of what belongs to none."""
    given_mapping: Mapping[str, str]
    known_mappings: Mapping[str, Mapping[str, str]]
    """File name -> mapping of its rows, where it was guessed when the source was looked into."""
    limits: ReaderLimits
    cleans: Mapping[str, CleanConfig]
    """The rules of every channel a document may get."""
    dedup: DedupConfig
    quality: Quality

    @property
    def raw_bytes(self) -> int:
        """About how many bytes of input it reads, for the progress bar."""
        return sum(each.raw_bytes if isinstance(each, Unit) else each.size_bytes for each in self.files)


def ingest_unit(task: IngestTask) -> list[Segment]:
    """Write what is missing of a unit folder; returns all its segments."""
    done = segments_of_unit(task.folder)
    if done is not None:
        return done
    segments = finished_segments(task.folder)
    items = _Items(task, segments[-1].state["next"] if segments else None)
    cleaners = {channel: Cleaner(clean, channel) for channel, clean in task.cleans.items()}
    how = (task.dedup, task.quality, cleaners)
    while not items.at_end:
        folder = task.folder / segment_name(len(segments))
        with staged_folder(folder) as staging, ExitStack() as stack:
            writer = SegmentWriter(task.source, task.channel, task.is_auto, *how, staging, stack)
            while not (writer.is_full or items.at_end):
                items.fill(writer)
                writer.clean_batch()
            state = writer.finish(items.take_notes())
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
        self._file = self._unit = 0
        self._mapping: Mapping[str, str] | None = None
        """Mapping of the item handed out last."""
        self._resume = self._next = resume
        self._notes = _Notes()
        self._unit_items: Iterator[RawRow | Damaged] = iter(())
        self._skips: list[tuple[str, str]] = []
        """Archive members without anything to read before the item read last."""
        self._ahead: deque[tuple[RawRow | Damaged | None, list[tuple[str, str]]]] = deque()
        """Items read to guess a mapping and not handed out yet, with the members skipped before each; None: the end."""
        self._told = self._untold = 0
        self._unit_left = 0
        """Bytes of the current unit that have not been read."""
        self._stream = self._read()

    def fill(self, writer: SegmentWriter) -> None:
        """Hand over items until the writer has a batch, or there are no more."""
        item: RawRow | Damaged | None = None
        for item in self._stream:
            document = _document_of(item, self._mapping)
            writer.add(item, document, self._unread_behind(document) if isinstance(document, Damaged) else 0)
            if writer.batch_is_full:
                break
        else:
            self.at_end = True
        if item is not None:
            mapping = dict(self._mapping) if self._mapping is not None else None
            place = {"file": self._file, "unit": self._unit, "origin": _origin_key(item), "cursor": item.cursor}
            self._next = {**place, "mapping": mapping}

    def _unread_behind(self, damaged: Damaged) -> int:
        """Bytes of the file that are lost with an item behind which nothing can be read."""
        if not damaged.ends_file:
            return 0
        ends_unit = damaged.origin is not None and not damaged.origin.path  # and not only a member of an archive
        return max(damaged.raw_bytes, self._unit_left if ends_unit else 0)

    def take_notes(self) -> dict[str, Any]:
        """What was learnt about files since the last call, and where to go on."""
        notes, self._notes = self._notes, _Notes()
        return {"next": self._next, **asdict(notes)}

    def tell_rest(self) -> None:
        """Move the progress bar to the end of this task."""
        advance(max(self.task.raw_bytes - self._told, 0))

    def _read(self) -> Iterator[RawRow | Damaged]:
        resume = self._resume
        for file_number, file in enumerate(self.task.files):
            if resume is not None and file_number < resume["file"]:
                continue
            units = [file] if isinstance(file, Unit) else plan_units(file, self.task.limits)
            for unit_number, unit in enumerate(units):
                if resume is not None and unit_number < resume["unit"]:
                    continue
                if unit.format in NOT_READ and unit.format is not Format.UNREADABLE:
                    self._notes.skip(str(unit.format), unit.file.name)
                    self._notes.note(unit.file.name, unit.note)
                    continue
                at, resume = resume, None
                self._file, self._unit, self._unit_left = file_number, unit_number, unit.raw_bytes
                cursor = at["cursor"] if at is not None else None
                if unit.format is Format.UNREADABLE:
                    if at is None:
                        self._mapping = None
                        origin = ItemOrigin(unit.file.name, "", Format.UNREADABLE)
                        yield origin.damaged(0, 0, UNREADABLE, unit.note, unit.raw_bytes).to_the_end()
                    continue
                items = read_unit(unit, self.task.limits, self._on_bytes, cursor, on_skip=self._on_skip)
                self._unit_items = iter(items)
                yield from self._mapped(unit, at)

    def _mapped(self, unit: Unit, resumed: dict[str, Any] | None) -> Iterator[RawRow | Damaged]:
        """The items of a unit; `_mapping` is that of their file or archive member."""
        known = unit.mapping if unit.mapping is not None else self.task.known_mappings.get(unit.file.name)
        origin: Any = None
        while (item := self._take()) is not None:
            if item.origin is not origin:
                origin = item.origin
                if resumed is not None and _origin_key(item) == resumed["origin"]:
                    self._mapping = resumed["mapping"]
                else:
                    self._mapping = known if known is not None else self._guess(item)
                    is_first = unit.number == 0 or unit.format is Format.ARCHIVE
                    self._notes.add_origin(item, self._mapping, is_first)
                resumed = None
            yield item

    def _guess(self, first: RawRow | Damaged) -> dict[str, str] | None:
        """The mapping for rows like the first of this origin; the items read for it are put into `_ahead`."""
        if isinstance(first, RawRow) and first.is_document:
            return None
        rows = [first, *(item for item, _ in self._ahead if isinstance(item, RawRow))]
        last: RawRow | Damaged | None = self._ahead[-1][0] if self._ahead else first
        while (
            len(rows) < PEEKED_ROWS
            and len(self._ahead) < PEEKED_ITEMS
            and last is not None
            and last.origin is first.origin
        ):
            self._ahead.append(self._read_one())
            last = self._ahead[-1][0]
            rows += [last] if isinstance(last, RawRow) else []
        fields = [row.fields for row in rows if isinstance(row, RawRow) and row.origin is first.origin][:PEEKED_ROWS]
        mapping = guess_mapping(fields, self.task.given_mapping) if fields else None
        if mapping is None:
            self._notes.see_fields(longest_first(fields))
        return mapping

    def _take(self) -> RawRow | Damaged | None:
        """The next item of the unit. The archive members skipped before it are counted now: a resumed build starts
        behind them."""
        item, skips = self._ahead.popleft() if self._ahead else self._read_one()
        for reason, name in skips:
            self._notes.skip(reason, name)
        return item

    def _read_one(self) -> tuple[RawRow | Damaged | None, list[tuple[str, str]]]:
        item = next(self._unit_items, None)
        skips, self._skips = self._skips, []
        return item, skips

    def _on_skip(self, reason: str, name: str) -> None:
        self._skips.append((reason, name))

    def _on_bytes(self, amount: int) -> None:
        self._unit_left -= amount
        self._untold += amount
        if self._untold >= PROGRESS_BYTES:
            advance(self._untold)
            self._told += self._untold
            self._untold = 0


@dataclass
class _Notes:
    """What is learnt about files while they are read; as the state of a segment holds it."""

    formats: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_names: dict[str, list[str]] = field(default_factory=dict)
    mappings: list[dict[str, str]] = field(default_factory=list)
    unmapped_fields: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, reason: str, name: str) -> None:
        """A file or archive member that is not read."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        names = self.skipped_names.setdefault(reason, [])
        if len(names) < NAMED_FILES:
            names.append(name)

    def note(self, file_name: str, words: str) -> None:
        """Something to tell about a file."""
        if words and len(self.notes) < NAMED_FILES:
            self.notes.append(f"{file_name}: {words}")

    def see_fields(self, names: Iterable[str]) -> None:
        """Fields of rows none of which is known to hold the text; a few are enough for the message."""
        self.unmapped_fields = list(dict.fromkeys([*self.unmapped_fields, *names]))[:NAMED_FIELDS]

    def add_origin(self, first: RawRow | Damaged, mapping: Mapping[str, str] | None, is_beginning: bool) -> None:
        """A file or archive member, by its first item: what it is and how its rows are read, or that they cannot be."""
        if is_beginning and first.origin is not None:
            name = str(first.origin.format)
            self.formats[name] = self.formats.get(name, 0) + 1
            if first.origin.is_misnamed:
                self.note(first.origin.name, "read as plain text: the name says JSON, but the file holds none")
        if mapping and mapping not in self.mappings:
            self.mappings.append(dict(mapping))
        elif not mapping and isinstance(first, RawRow) and not first.is_document:
            self.see_fields(first.fields)


def _origin_key(item: RawRow | Damaged) -> list[Any]:
    """Tells one file or archive member from another; as JSON holds it."""
    return [item.origin.name, *item.origin.path] if item.origin is not None else []


def _document_of(item: RawRow | Damaged, mapping: Mapping[str, str] | None) -> Document | Damaged:
    if isinstance(item, Damaged):
        return item
    if item.is_document:
        return Document(**item.fields)
    if not mapping or not has_field(item.fields, mapping["content"]):
        return _unusable_row(item, "no_text_field", f"fields: {', '.join(item.fields)}")
    try:
        return apply_mapping(item.fields, mapping)
    except ValueError as error:
        return _unusable_row(item, "not_text", str(error))


def _unusable_row(row: RawRow, reason: str, detail: str) -> Damaged:
    excerpt = repr(row.fields)
    return Damaged(row.place, reason, detail[:EXCERPT_CHARS], len(excerpt.encode(errors="replace")), excerpt)
