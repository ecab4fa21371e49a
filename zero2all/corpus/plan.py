"""Planning: what each source consists of, how its rows are read, and into which tasks it is cut.

A look into some files settles the channel, where none was given, and the mapping of their rows; with that, everything
that decides what ingest writes is known and named (`inputs`). Only a source that has to be read is then cut into tasks:
small files are gathered into tasks of about `unit_bytes`; a larger file is planned by its reader, which splits what can
be split. That can take a pass over the file, so it is done by the engine and kept in `plan.json`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from zero2all.common.engine import TaskEngine, advance
from zero2all.common.errors import BadInputError
from zero2all.common.files import read_json, write_json
from zero2all.common.manifest import fingerprint
from zero2all.corpus.build_errors import nothing_readable
from zero2all.corpus.channels import CHANNELS
from zero2all.corpus.clean.config import CleanConfig
from zero2all.corpus.ingest import PEEKED_ITEMS, IngestTask
from zero2all.corpus.listing import InputFile, Listing, list_files
from zero2all.corpus.quality import Quality, find_quality
from zero2all.corpus.readers import NOT_READ, Format, RawRow, ReaderLimits, Unit, plan_units, read_unit
from zero2all.corpus.readers.chats import is_message
from zero2all.corpus.segment_writer import SEGMENT_BYTES, SEGMENT_ITEMS
from zero2all.corpus.segments import BUILD_NAME
from zero2all.corpus.settings import BuildOptions
from zero2all.corpus.source_sampling import SourceSample
from zero2all.corpus.sources import PEEKED_ROWS, Source, choose_template, guess_mapping, part_name

RULES = 11
"""Raise it when readers, field names, cleaning or signatures change what a build writes, so that it is made again."""

PLAN_NAME = "plan.json"
FILES_PER_TASK = 2000


@dataclass(frozen=True)
class SourcePlan:
    """One source, looked into."""

    source: Source
    listing: Listing
    channel: str
    """Of an `auto` source, the one that most of the sampled documents belong to."""
    channel_reason: str
    look: SourceSample
    """What was found in the files looked into."""
    cleans: Mapping[str, CleanConfig]
    """The rules of every channel a document of it may get."""
    inputs: str
    """Names everything that decides what ingest writes for this source."""
    folder: Path
    """Where ingest writes it."""
    template: str
    """How its records become training text."""
    limits: ReaderLimits
    quality: Quality

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name


@dataclass(frozen=True)
class SourcePart:
    """What becomes one source of the corpus: all of a source, or what `auto` found of one channel in it."""

    plan: SourcePlan
    channel: str
    number: int
    """Makes its gids."""

    @property
    def name(self) -> str:
        """Its name in the corpus."""
        return part_name(self.plan.name, self.channel) if self.plan.source.is_auto else self.plan.name

    @property
    def inputs(self) -> str:
        """Names everything that decides what ingest writes for it."""
        return fingerprint([self.plan.inputs, self.channel]) if self.plan.source.is_auto else self.plan.inputs

    @property
    def is_main(self) -> bool:
        """Whether what belongs to no document, such as damaged items, is counted here."""
        return self.channel == self.plan.channel

    @property
    def is_guessed(self) -> bool:
        """Whether its channel was guessed."""
        return self.plan.source.given_channel is None or self.plan.source.is_auto


def list_source(source: Source, corpus_folder: Path) -> Listing:
    """The files of a source; an error when there are none."""
    try:
        listing = list_files(source.path, leave_out=corpus_folder)
    except BadInputError:
        raise
    except Exception as error:  # whatever a file system behind fsspec, or the lack of one, may raise
        if not source.is_remote:
            raise
        raise BadInputError(
            f"Source {source.name}: {source.path} cannot be listed ({type(error).__name__}: {error}). Check the "
            f"address and the access rights; fsspec needs a package for each kind of address, such as s3fs for s3://."
        ) from error
    if not listing.files:
        raise nothing_readable(source, {reason: len(names) for reason, names in listing.skipped.items()}, [])
    return listing


def plan_source(source: Source, listing: Listing, corpus_folder: Path, options: BuildOptions) -> SourcePlan:
    """What a sample of a source shows."""
    limits = replace(options.limits, chats=source.kind == "conversation", encoding=source.encoding)
    look = SourceSample(source, listing, limits)
    template = choose_template(source, look.mappings)
    quality = find_quality(options.quality, corpus_folder.parent)
    guessed, reason = look.guess_channel()
    is_auto = source.is_auto
    channel = guessed if is_auto else source.given_channel or guessed
    cleans = {each: options.clean_config(each) for each in (CHANNELS if is_auto else (channel,))}
    signings = [options.signing(each) for each in cleans]
    inputs = fingerprint(
        {
            "rules": RULES,
            "name": source.name,
            "path": source.location,
            "files": [[file.name, file.size_bytes, file.mtime_ns] for file in listing.files],
            "channel": [channel, source.given_channel, source.kind],
            "mapping": source.given_mapping,
            "limits": asdict(limits),
            "clean": [asdict(clean) for clean in cleans.values()],
            "dedup": signings,
            "sizes": [options.unit_bytes, SEGMENT_BYTES, SEGMENT_ITEMS, FILES_PER_TASK, *quality.decisive],
        }
    )
    folder = corpus_folder / BUILD_NAME / inputs / source.name
    if not is_auto and source.given_channel:
        reason = "given" if source.channel else f"of the kind {source.kind}"
    return SourcePlan(source, listing, channel, reason, look, cleans, inputs, folder, template, limits, quality)


@dataclass(frozen=True)
class LargeFile:
    """A file that its reader may split."""

    file: InputFile
    limits: ReaderLimits
    given_mapping: Mapping[str, str]
    known_mapping: Mapping[str, str] | None


def cut_sources(plans: Sequence[SourcePlan], options: BuildOptions, engine: TaskEngine) -> list[IngestTask]:
    """The tasks of all sources, in order; large files are planned by the engine, once."""
    missing = [plan for plan in plans if not (plan.folder / PLAN_NAME).is_file()]
    large = [
        (plan, number, LargeFile(file, plan.limits, plan.source.given_mapping, plan.look.mapping_of.get(file.name)))
        for plan in missing
        for number, file in enumerate(plan.listing.files)
        if file.size_bytes > options.unit_bytes
    ]
    found: dict[str, dict[str, list[dict[str, Any]]]] = {plan.name: {} for plan in missing}
    for position, planned in engine.run(plan_large_file, [file for *_, file in large]):
        plan, number, _ = large[position]
        found[plan.name][str(number)] = planned
    for plan in missing:
        ordered = dict(sorted(found[plan.name].items(), key=lambda pair: int(pair[0])))
        write_json(plan.folder / PLAN_NAME, ordered)
    return [task for plan in plans for task in _tasks(plan, read_json(plan.folder / PLAN_NAME), options)]


def planned_units(plan: SourcePlan) -> list[Unit]:
    """The units of the large files of a source that has been cut."""
    large = read_json(plan.folder / PLAN_NAME)
    return [_unit_from(plan.listing.files[int(number)], values) for number in large for values in large[number]]


def plan_large_file(task: LargeFile) -> list[dict[str, Any]]:
    """The units of a file, with the mapping of its rows when there are several; as JSON holds them."""
    units = plan_units(task.file, task.limits)
    if task.limits.chats and _is_log(units[0], task.limits):  # a conversation may stand anywhere in it
        units = plan_units(task.file, replace(task.limits, unit_bytes=task.file.size_bytes))
    advance(0)
    if len(units) > 1 and units[0].format is not Format.ARCHIVE:
        mapping = task.known_mapping or _guessed(units[0], task)
        units = [replace(unit, mapping=mapping) for unit in units]
    names = [each.name for each in fields(Unit) if each.name != "file"]
    return [{name: getattr(unit, name) for name in names} for unit in units]


def _is_log(unit: Unit, limits: ReaderLimits) -> bool:
    items = read_unit(unit, replace(limits, chats=False), lambda _: None)
    first = next((item for item in items if isinstance(item, RawRow)), None)
    return first is not None and is_message(first.fields)


def _guessed(unit: Unit, task: LargeFile) -> dict[str, str]:
    """The mapping of a file that was not looked into, from the first rows of its first unit."""
    if unit.format in NOT_READ:
        return {}
    items = itertools.islice(read_unit(unit, task.limits, lambda _: None), PEEKED_ITEMS + 1)
    rows = itertools.islice((item for item in items if isinstance(item, RawRow)), PEEKED_ROWS)
    return guess_mapping([row.fields for row in rows if not row.is_document], task.given_mapping) or {}


def _tasks(plan: SourcePlan, large: Mapping[str, Any], options: BuildOptions) -> list[IngestTask]:
    source = plan.source
    reading = (source.name, plan.channel, source.is_auto, source.given_mapping, plan.look.mapping_of, plan.limits)
    units = enumerate(_files_of_tasks(plan.listing, large, options.unit_bytes))
    return [
        IngestTask(tuple(files), plan.folder / f"unit-{number:05d}", *reading, plan.cleans, options.dedup, plan.quality)
        for number, files in units
    ]


def _files_of_tasks(
    listing: Listing, large: Mapping[str, Any], unit_bytes: int
) -> Iterator[list[InputFile] | list[Unit]]:
    """What each task reads, in order: some small files, or one unit of a large one."""
    gathered: list[InputFile] = []
    size = 0
    for number, file in enumerate(listing.files):
        units = large.get(str(number))
        is_full = size + file.size_bytes > unit_bytes or len(gathered) >= FILES_PER_TASK
        if gathered and (units is not None or is_full):
            yield gathered
            gathered, size = [], 0
        if units is None:
            gathered.append(file)
            size += file.size_bytes
            continue
        for values in units:
            yield [_unit_from(file, values)]
    if gathered:
        yield gathered


def _unit_from(file: InputFile, values: Mapping[str, Any]) -> Unit:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    plain["format"] = Format(values["format"])
    return Unit(file, **plain)
