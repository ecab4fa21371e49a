"""A look into a source before it is read: sampled documents for the guess of its channel, and the mapping of its files.

Samples are spread over the files, over the places where a file can be cut (lines, row groups, members of a zip), and
over what can be read from each place within a budget of bytes. They are documents as ingest will see them. A tar or a
compressed stream can only be read from its beginning, so the samples of a large one are from there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zero2all.corpus.build_errors import no_text_field, nothing_readable
from zero2all.corpus.channels import guess_channel, sampled_text
from zero2all.corpus.listing import InputFile, Listing
from zero2all.corpus.readers import NOT_READ, Format, ItemOrigin, RawRow, ReaderLimits, Unit, plan_units, read_unit
from zero2all.corpus.sources import PEEKED_ROWS, Source, apply_mapping, guess_mapping, longest_first

FILES = 16
"""Files looked into, spread over the source; of small ones more, up to `DOCUMENTS`."""
PLACES = 128
"""Places, spread over these files, at most `FILE_PLACES` in each."""
FILE_PLACES = 8
DOCUMENTS = 400
"""About how many documents are sampled, of all files together."""
RAW_BYTES = 8_000_000
"""Most bytes read, of all files together."""
PLAIN_BYTES = 32_000_000
"""The same once unpacked."""
ITEMS = 4000
"""Most items read, of all files together."""
MANY_ROWS = 400
"""When this many first rows of a file or archive member have no text, none will."""
LEAST_PLACE_BYTES = 1 << 16
BLOCK_BYTES = 1 << 20
"""What a reader takes of a file at once."""


class SourceSample:
    """What was found in the samples; an error when nothing in the source can be read, or nothing of it has a text."""

    def __init__(self, source: Source, listing: Listing, limits: ReaderLimits) -> None:
        self.mappings: list[dict[str, str]] = []
        """All that were found."""
        self.mapping_of: dict[str, dict[str, str]] = {}
        """By file name: those that hold for the whole file, handed on to ingest."""
        self.formats: list[str] = []
        self._titles: list[str] = []
        self._contents: list[str] = []
        self._left_out = Counter({reason: len(names) for reason, names in listing.skipped.items()})
        """Why files are not read, and what their reader says about it; of those looked into."""
        self._notes: list[str] = []
        self._tables: list[tuple[str, list[str]]] = []
        """Files with rows and their fields; and those of them in which no field holds the text."""
        self._textless: list[tuple[str, list[str]]] = []
        self._is_sure = True
        """Whether what was not looked at cannot hold a text when nothing that was looked at does."""
        files = listing.files
        skipped = self._left_out.total()
        usual_bytes = min(listing.size_bytes // max(len(files), 1), BLOCK_BYTES)
        sampled = spread(files, max(FILES, min(DOCUMENTS, RAW_BYTES // max(usual_bytes, 1))))
        for file in sampled:
            self._look_into(file, source, limits, len(sampled))
        if len(sampled) < len(files):
            return
        if self._left_out.total() - skipped == len(files):
            raise nothing_readable(source, self._left_out, self._notes)
        given = source.given_mapping.get("content")
        is_missing = given is not None and all(mapping["content"] != given for mapping in self.mappings)
        if self._is_sure and self._tables and is_missing:
            raise no_text_field(source, *self._tables[0])
        if self._is_sure and self._textless and not self._titles:
            raise no_text_field(source, *self._textless[0])

    def _look_into(self, file: InputFile, source: Source, limits: ReaderLimits, files: int) -> None:
        whole = plan_units(file, replace(limits, unit_bytes=max(file.size_bytes, 1)))[0]
        if whole.format in NOT_READ:
            if whole.format is not Format.UNREADABLE:
                self._left_out[str(whole.format)] += 1
                self._notes += [f"{file.name}: {whole.note}"] if whole.note else []
            return
        units = spread(_places(file, whole, limits), max(1, min(FILE_PLACES, PLACES // files)))
        for unit in units:
            sample = _Sample(unit, limits, len(units) * files)
            for origin, rows in sample.by_origin():
                mapping = self._take(origin, rows, sample.first_rows[origin], source)
                if mapping is not None and unit.number == 0 and sample.shows_first_rows(is_all=len(units) == 1):
                    self.mapping_of[file.name] = mapping
            self._is_sure = self._is_sure and sample.is_sure

    def _take(
        self, origin: ItemOrigin, rows: list[RawRow], first: list[RawRow], source: Source
    ) -> dict[str, str] | None:
        """Look at the rows of one file or archive member; returns how they are mapped."""
        self.formats = list(dict.fromkeys([*self.formats, str(origin.format)]))
        if first and first[0].is_document:
            for row in rows:
                self._add(row.fields["title"], row.fields["content"])
            return None
        raw = [row.fields for row in first]
        mapping = guess_mapping(raw, source.given_mapping)
        self._tables.append((origin.name, longest_first(raw)))
        if mapping is None:
            self._textless.append(self._tables[-1])
            return None
        if mapping not in self.mappings:
            self.mappings.append(mapping)
        for row in rows:
            try:
                document = apply_mapping(row.fields, mapping)
            except (KeyError, ValueError):
                continue
            self._add(document.title, document.content)
        return mapping

    def _add(self, title: str, content: str) -> None:
        self._titles.append(title)
        self._contents.append(sampled_text(content))

    def guess_channel(self) -> tuple[str, str]:
        """The channel of most of the sampled documents, and why."""
        return guess_channel(self._titles, self._contents)


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most `most` of the values, evenly spread, the first one among them."""
    if len(values) <= most:
        return list(values)
    return [values[number * len(values) // most] for number in range(most)]


def _places(file: InputFile, whole: Unit, limits: ReaderLimits) -> list[Unit]:
    """The file in as many units as there are places to look at, where finding them takes no pass over the file."""
    is_lines = not whole.compression and whole.format in (Format.JSON_LINES, Format.TEXT)
    if not (is_lines or whole.format is Format.PARQUET or whole.compression == "zip"):
        return [whole]
    return plan_units(file, replace(limits, unit_bytes=max(file.size_bytes // FILE_PLACES, LEAST_PLACE_BYTES)))


class _Sample:
    """Rows of one unit, thinned out as more of it is read, so that they are spread over what was read."""

    def __init__(self, unit: Unit, limits: ReaderLimits, places: int) -> None:
        self.first_rows: dict[ItemOrigin, list[RawRow]] = {}
        """The first rows of each file or archive member, which say how all its rows are mapped."""
        self._rows: list[RawRow] = []
        self._met = 0
        self._step = 1
        self._most = max(2, DOCUMENTS // places)
        self._raw_bytes = 0
        self._unit = unit
        self._damaged = 0
        self._is_whole = False
        self.is_sure = self._read(unit, limits, places)

    def _read(self, unit: Unit, limits: ReaderLimits, places: int) -> bool:
        """Take the sample; whether what was not read is like what was."""
        plain_bytes = rows = 0
        for number, item in enumerate(read_unit(unit, limits, self._on_bytes), 1):
            if isinstance(item, RawRow):
                first = self.first_rows.setdefault(item.origin, [])
                rows = rows + 1 if first else 1
                if len(first) < PEEKED_ROWS:
                    first.append(item)
                self._add(item)
                plain_bytes += item.raw_bytes
            else:
                self._damaged += 1
            # Readers take blocks larger than a place's share, so a first block is looked at whatever its size.
            enough_raw = self._raw_bytes > RAW_BYTES // places and self._met >= self._most
            spent = enough_raw or plain_bytes > PLAIN_BYTES // places
            if spent or number >= ITEMS // places:
                return rows >= max(MANY_ROWS // places, PEEKED_ROWS) or unit.format is not Format.ARCHIVE
        self._is_whole = True
        return True

    def shows_first_rows(self, is_all: bool) -> bool:
        """Whether it has the rows by which the mapping of the file is guessed; `is_all`: the unit is the whole file."""
        if self._unit.format is Format.ARCHIVE or self._damaged:
            return False
        return (is_all and self._is_whole) or all(len(rows) == PEEKED_ROWS for rows in self.first_rows.values())

    def _add(self, row: RawRow) -> None:
        self._met += 1
        if self._met % self._step == 0:
            self._rows.append(row)
            if len(self._rows) >= 2 * self._most:
                self._rows = self._rows[::2]
                self._step *= 2

    def _on_bytes(self, amount: int) -> None:
        self._raw_bytes += amount

    def by_origin(self) -> list[tuple[ItemOrigin, list[RawRow]]]:
        """Every file or archive member that rows were met in, with the rows of it that are in the sample."""
        rows: dict[ItemOrigin, list[RawRow]] = {origin: [] for origin in self.first_rows}
        for row in self._rows:
            rows[row.origin].append(row)
        return list(rows.items())
