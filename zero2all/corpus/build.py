"""Building the corpus: sources in, `corpus/<source>/{train,valid}/part-*.jsonl` and `report.json` out.

A source is built in a temporary folder, which gets its manifest last and is then renamed; a finished source whose
inputs have not changed is left alone. So an interrupted build, run again, goes on with the source it was in, and
what it writes is byte for byte what an uninterrupted build writes. `inputs` of a source covers its files (names,
sizes, times), mapping and options, and the `inputs` of the source before it, because duplicates are dropped across
sources in the order given. `digests.bin` beside the shards holds the digest of every kept text, 16 bytes each, so
that a later run knows the texts of finished sources without reading them.

`report.json` is removed before anything is rebuilt and written last: while it is absent there is no corpus. Its
sources are the corpus. A source left out of a later build keeps its folder, but no stage reads it.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero2all.common import jsonio
from zero2all.common.errors import BadInputError, DiskError, UsageError
from zero2all.common.files import (
    read_json,
    require_free_space,
    staged_folder,
    sweep_partials,
    write_json,
)
from zero2all.common.manifest import MANIFEST_NAME, fingerprint, is_current, write_manifest
from zero2all.common.progress import Bar, progress
from zero2all.corpus.clean import Cleaner, repair, text_digest
from zero2all.corpus.listing import InputFile, Listing, list_files, require_readable
from zero2all.corpus.quarantine import QUARANTINE_NAME, Quarantine
from zero2all.corpus.readers import (
    EXCERPT_CHARS,
    NOT_READ,
    Damaged,
    Format,
    Limits,
    Row,
    detect_format,
    read_file,
)
from zero2all.corpus.record import SOURCES_NAME, Document, Record, make_gid, source_numbers
from zero2all.corpus.report import REPORT_NAME, Tally, check_identity, counts_in_words, make_report
from zero2all.corpus.sources import (
    FIELD_NAMES,
    ChannelGuess,
    Source,
    apply_mapping,
    fields_seen,
    guess_mapping,
    source_problems,
)
from zero2all.corpus.split import SplitWriter

RULES = 1
"""Raise it when readers, field names or cleaning change what a build writes, so that older sources are rebuilt."""

DIGESTS_NAME = "digests.bin"
PEEKED_ROWS = 20
PEEKED_ITEMS = 1000
NAMED_FILES = 20
PROGRESS_BYTES = 1 << 18
DISK_SHARE = 1.2
DISK_SHARE_PARQUET = 5.0
DISK_MARGIN_BYTES = 64_000_000


@dataclass(frozen=True)
class BuildOptions:
    """How a corpus is built."""

    shard_bytes: int = 200_000_000
    """A shard file is closed before it would grow past this size."""
    valid_share: float = 0.01
    """Share of the kept records held out as valid, chosen by digest. A source of at least 20 records holds out at
    least one, a smaller one none. 0: nothing is held out."""
    min_chars: int = 1
    """Texts with fewer characters after repair are dropped as too_short."""
    max_damaged_share: float = 0.01
    """The build stops when a larger share of a source's records, or of its bytes, is damaged."""
    max_record_bytes: int = 32_000_000
    """A JSON line, JSON object or whole-file document above this size goes to quarantine unread."""
    split_text_above_bytes: int = 1_000_000
    """A plain text file above this size is cut into documents of 8 to 32 KB; below, it is one document."""

    def problems(self) -> list[str]:
        """Everything wrong with these options, one sentence each."""
        found = []
        if not 0 <= self.valid_share <= 0.5:
            found.append(f"valid_share is {self.valid_share}; expected 0 to 0.5")
        if not 0 <= self.max_damaged_share <= 1:
            found.append(f"max_damaged_share is {self.max_damaged_share}; expected 0 to 1")
        sizes = {"shard_bytes": self.shard_bytes, "max_record_bytes": self.max_record_bytes}
        sizes |= {"split_text_above_bytes": self.split_text_above_bytes, "min_chars": self.min_chars}
        return found + [f"{name} is {size}; expected at least 1" for name, size in sizes.items() if size < 1]


class Plan(NamedTuple):
    """One source, ready to be built."""

    source: Source
    number: int
    listing: Listing
    inputs: str
    folder: Path


def build_corpus(corpus_folder: Path, sources: Sequence[Source], options: BuildOptions | None = None) -> dict[str, Any]:
    """Build what is missing or out of date, and return the report, which is also `corpus_folder/report.json`."""
    options = options or BuildOptions()
    check_sources(sources, options)
    listings = [_listing_of(source, corpus_folder) for source in sources]
    _sweep(corpus_folder, sources)
    plans = _make_plans(corpus_folder, sources, listings, options)
    stale = [plan for plan in plans if not is_current(plan.folder, "corpus", plan.inputs)]
    try:
        if stale:
            require_free_space(corpus_folder, _disk_bytes_needed(stale), "the corpus")
            (corpus_folder / REPORT_NAME).unlink(missing_ok=True)
            _build_stale(plans, {plan.source.name for plan in stale}, options)
        return _write_report(corpus_folder, plans, options)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"The disk of {corpus_folder} is full; the source that was being built has been removed again. Free "
                f"some space and run the same command: finished sources are not built twice."
            ) from error
        raise


def check_sources(sources: Sequence[Source], options: BuildOptions) -> None:
    """Raise what is wrong with names, options and paths; nothing is written."""
    problems = source_problems(sources) + options.problems()
    if len(problems) == 1:
        raise UsageError(f"The corpus cannot be built: {problems[0]}.")
    if problems:
        raise UsageError("The corpus cannot be built:\n" + "\n".join(f"{n}. {p}" for n, p in enumerate(problems, 1)))
    for source in sources:
        require_readable(source.path, source.name)


def _listing_of(source: Source, corpus_folder: Path) -> Listing:
    listing = list_files(source.path, leave_out=corpus_folder)
    if not listing.files:
        raise _nothing_readable(source, {reason: len(names) for reason, names in listing.skipped.items()})
    return listing


def _sweep(corpus_folder: Path, sources: Sequence[Source]) -> None:
    """Remove what a killed build left behind, also where nothing is going to be rebuilt."""
    names = [*(source.name for source in sources), REPORT_NAME, SOURCES_NAME]
    for name in names:
        sweep_partials(corpus_folder / name)
    for source in sources:
        sweep_partials(corpus_folder / QUARANTINE_NAME / f"{source.name}.jsonl")


def _make_plans(
    corpus_folder: Path, sources: Sequence[Source], listings: list[Listing], options: BuildOptions
) -> list[Plan]:
    numbers = source_numbers(corpus_folder, [source.name for source in sources])
    plans: list[Plan] = []
    for source, listing in zip(sources, listings, strict=True):
        inputs = fingerprint(
            {
                "rules": RULES,
                "number": numbers[source.name],
                "name": source.name,
                "path": str(source.path.resolve()),
                "files": [[file.name, file.size_bytes, file.mtime_ns] for file in listing.files],
                "channel": source.channel,
                "mapping": dict(source.mapping) if source.mapping else None,
                "options": {**asdict(options), "max_damaged_share": None},  # decides whether, not what, is written
                "after": plans[-1].inputs if plans else None,
            }
        )
        plans.append(Plan(source, numbers[source.name], listing, inputs, corpus_folder / source.name))
    return plans


def _disk_bytes_needed(plans: list[Plan]) -> int:
    needed = 0.0
    for file in itertools.chain.from_iterable(plan.listing.files for plan in plans):
        is_parquet = file.path.suffix.lower() == ".parquet"  # compressed: text in it grows about 2 to 5 times
        needed += file.size_bytes * (DISK_SHARE_PARQUET if is_parquet else DISK_SHARE)
    return int(needed) + DISK_MARGIN_BYTES


def _build_stale(plans: list[Plan], stale: set[str], options: BuildOptions) -> None:
    cleaner = Cleaner(options.min_chars)
    total = sum(plan.listing.size_bytes for plan in plans)
    done = sum(plan.listing.size_bytes for plan in plans if plan.source.name not in stale)
    with progress("corpus", total=total, unit="B", done=done) as bar:
        for plan in plans:
            if plan.source.name in stale:
                with staged_folder(plan.folder) as staging:
                    _SourceBuild(plan, cleaner, options, bar).run(staging)
            else:
                cleaner.restore(plan.folder / DIGESTS_NAME)


def _write_report(corpus_folder: Path, plans: list[Plan], options: BuildOptions) -> dict[str, Any]:
    by_source = {plan.source.name: read_json(plan.folder / MANIFEST_NAME)["report"] for plan in plans}
    report = make_report(by_source, asdict(options), plans[-1].inputs)
    totals = report["totals"]
    if not totals["records_kept"]:
        raise BadInputError(
            f"The corpus is empty: {totals['records_in']:,} records were read and none was kept "
            f"({counts_in_words(totals['dropped'])}, {totals['quarantined']:,} quarantined). Check that the text "
            f"field is the right one (content was taken from {_mappings_in_words(by_source)}), and that min_chars "
            f"({options.min_chars}) is not too strict for this text."
        )
    path = corpus_folder / REPORT_NAME
    if not path.is_file() or path.read_bytes() != jsonio.dumps_pretty(report):
        write_json(path, report)
    return report


def _mappings_in_words(by_source: dict[str, dict[str, Any]]) -> str:
    fields = [mapping["content"] for source in by_source.values() for mapping in source["mappings"]]
    return ", ".join(f"'{field}'" for field in dict.fromkeys(fields)) or "whole text files"


class _SourceBuild:
    """One source on its way from raw files to a finished folder."""

    def __init__(self, plan: Plan, cleaner: Cleaner, options: BuildOptions, bar: Bar) -> None:
        self.plan, self.cleaner, self.options, self.bar = plan, cleaner, options, bar
        self.source = plan.source
        self.limits = Limits(options.max_record_bytes, options.split_text_above_bytes)
        self.tally = Tally()
        self.channel_guess = ChannelGuess()
        self.mappings: list[dict[str, str]] = []
        self.formats: dict[str, int] = {}
        self.skipped = {reason: list(names) for reason, names in plan.listing.skipped.items()}
        self.unmapped_fields: list[str] = []
        self.unread_bytes = 0
        self.ordinal = 0
        self._bar_debt = 0

    def run(self, staging: Path) -> None:
        """Fill the staging folder, manifest last."""
        quarantine = Quarantine(self.plan.folder.parent / QUARANTINE_NAME / f"{self.source.name}.jsonl")
        with ExitStack() as stack:
            self.quarantine = stack.enter_context(quarantine)
            self.split = SplitWriter(staging, self.options.valid_share, self.options.shard_bytes)
            stack.callback(self.split.close)
            self.digests = stack.enter_context(open(staging / DIGESTS_NAME, "wb"))
            for file in self.plan.listing.files:
                self._take_file(file)
            self.bar.advance(self._bar_debt)
            self.split.finish()
            quarantine.commit()  # also when the build stops below: the message points at it
        self._require_usable(quarantine)
        report = self._report()
        check_identity(self.source.name, report)
        write_manifest(
            staging,
            "corpus",
            self.plan.inputs,
            {
                "source": self.source.name,
                "number": self.plan.number,
                "path": str(self.source.path.resolve()),
                "channel": report["channel"],
                "report": report,
                "skipped_file_names": {reason: names[:NAMED_FILES] for reason, names in sorted(self.skipped.items())},
            },
        )

    def _take_file(self, file: InputFile) -> None:
        found = detect_format(file)
        if found in NOT_READ:
            self.skipped.setdefault(found, []).append(file.name)
            self._on_bytes(file.size_bytes)
            return
        self.formats[found] = self.formats.get(found, 0) + 1
        items: Iterator[Row | Damaged] = read_file(file, found, self.limits, self._on_bytes)
        if found is Format.TEXT:
            mapping = None
        else:
            peeked = _peek(items)
            mapping = self._mapping_for(file, [item.fields for item in peeked if isinstance(item, Row)])
            items = itertools.chain(peeked, items)
        for item in items:
            self._take_item(file, item, mapping)
            self.ordinal += 1

    def _mapping_for(self, file: InputFile, rows: list[dict[str, Any]]) -> dict[str, str] | None:
        if not rows:
            return None
        mapping = guess_mapping(rows, self.source.mapping)
        if mapping is None:
            self.unmapped_fields = list(dict.fromkeys([*self.unmapped_fields, *fields_seen(rows)]))
            if len(self.plan.listing.files) == 1:  # in a folder, other files may do; here nothing will
                raise self._no_text_field(file.name)
        elif mapping not in self.mappings:
            self.mappings.append(mapping)
        return mapping

    def _take_item(self, file: InputFile, item: Row | Damaged, mapping: dict[str, str] | None) -> None:
        document = _document_of(item, mapping)
        if isinstance(document, Damaged):
            self.tally.records_in += 1
            self.tally.bytes_in += document.raw_bytes
            self.tally.quarantined[document.reason] += 1
            self.tally.bytes_quarantined += document.raw_bytes
            self.unread_bytes += document.raw_bytes if document.ends_file else 0
            self.quarantine.add(make_gid(self.plan.number, self.ordinal), file.name, document)
        else:
            self._take_document(document)

    def _take_document(self, document: Document) -> None:
        tally = self.tally
        bytes_in = len(document.content.encode("utf-8", errors="surrogatepass"))
        tally.records_in += 1
        tally.bytes_in += bytes_in
        content = repair(document.content)
        digest = text_digest(content)
        reason = self.cleaner.drop_reason(content, digest)
        if reason is not None:
            tally.dropped[reason] += 1
            tally.bytes_dropped[reason] += bytes_in
            return
        bytes_kept = len(content.encode())
        tally.records_kept += 1
        tally.bytes_kept += bytes_kept
        tally.bytes_repaired += bytes_in - bytes_kept
        record: Record = {
            "gid": make_gid(self.plan.number, self.ordinal),
            "id": self.ordinal,
            "data_src": self.source.name,
            "category": repair(document.category),
            "title": repair(document.title),
            "content": content,
            "desc": repair(document.desc),
            "others": document.others,
        }
        self.channel_guess.look(record["title"], content)
        self.digests.write(digest)
        self.split.write(jsonio.dumps_line(record), digest)

    def _on_bytes(self, amount: int) -> None:
        self._bar_debt += amount
        if self._bar_debt >= PROGRESS_BYTES:
            self.bar.advance(self._bar_debt, note=self.source.name)
            self._bar_debt = 0

    def _require_usable(self, quarantine: Quarantine) -> None:
        tally = self.tally
        if not tally.records_in:
            raise _nothing_readable(self.source, {reason: len(names) for reason, names in self.skipped.items()})
        damaged = tally.quarantined.total()
        if damaged == tally.quarantined["no_text_field"] == tally.records_in:
            raise self._no_text_field(f"{self.source.path}")
        share = max(damaged / tally.records_in, self.unread_bytes / max(self.plan.listing.size_bytes, 1))
        if share > self.options.max_damaged_share:
            raise BadInputError(
                f"Source {self.source.name}: {damaged:,} of {tally.records_in:,} records are damaged, and "
                f"{self.unread_bytes:,} bytes behind damaged places could not be read: {share:.2%}, where "
                f"{self.options.max_damaged_share:.2%} is allowed. Found: {quarantine.in_words()}. Each is listed "
                f"with file, place and reason in {quarantine.path}. Repair the input, or accept the loss with a "
                f"larger --max-damaged-share."
            )

    def _no_text_field(self, where: str) -> BadInputError:
        fields = self.unmapped_fields
        wanted = (self.source.mapping or {}).get("content")
        missing = f"the field '{wanted}' that content was mapped to is not in it" if wanted else "none is a known name"
        return BadInputError(
            f"Source {self.source.name}: no text field was found in {where}. Its records have the fields "
            f"{', '.join(fields) or '(none)'}; {missing}. Say which field holds the text with --map content=FIELD, "
            f"for example --map content={fields[0] if fields else 'text'}. Recognised without it: "
            f"{FIELD_NAMES['content'].replace(' ', ', ')}."
        )

    def _report(self) -> dict[str, Any]:
        guessed_channel, reason = self.channel_guess.result()
        given = self.source.mapping or {}
        return {
            **self.tally.as_report(),
            "train_records": self.split.train.records,
            "valid_records": self.split.valid.records,
            "channel": self.source.channel or guessed_channel,
            "channel_guessed": self.source.channel is None,
            "channel_reason": reason if self.source.channel is None else "given",
            "mappings": self.mappings,
            "mapping_guessed": any(set(mapping) - set(given) for mapping in self.mappings),
            "formats": dict(sorted(self.formats.items())),
            "input_files": len(self.plan.listing.files),
            "input_file_bytes": self.plan.listing.size_bytes,
            "skipped_files": {reason: len(names) for reason, names in sorted(self.skipped.items())},
        }


def _peek(items: Iterator[Row | Damaged]) -> list[Row | Damaged]:
    """The first items, enough to see which fields the rows have, also behind a damaged beginning."""
    peeked = []
    rows = 0
    for item in itertools.islice(items, PEEKED_ITEMS):
        peeked.append(item)
        rows += isinstance(item, Row)
        if rows == PEEKED_ROWS:
            break
    return peeked


def _document_of(item: Row | Damaged, mapping: dict[str, str] | None) -> Document | Damaged:
    if isinstance(item, Damaged):
        return item
    if item.is_document:
        return Document(**item.fields)
    if mapping is None or mapping["content"] not in item.fields:
        return _unusable_row(item, "no_text_field", f"fields: {', '.join(item.fields)}")
    try:
        return apply_mapping(item.fields, mapping)
    except ValueError as error:
        return _unusable_row(item, "not_text", str(error))


def _unusable_row(row: Row, reason: str, detail: str) -> Damaged:
    excerpt = repr(row.fields)
    return Damaged(row.place, reason, detail[:EXCERPT_CHARS], len(excerpt.encode(errors="replace")), excerpt)


def _nothing_readable(source: Source, skipped: dict[str, int]) -> BadInputError:
    why = f" (left out: {counts_in_words(skipped)})" if skipped else ""
    hint = " Decompress archives first." if Format.COMPRESSED in skipped else ""
    return BadInputError(
        f"Source {source.name}: nothing readable was found in {source.path}{why}. Expected text, JSON lines, a JSON "
        f"array or parquet, in files whose names do not start with a dot.{hint} Check the path."
    )
